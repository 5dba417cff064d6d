"""Tensors in, tensors out: the attention operations, one folder each. Nothing here knows diffusers."""
