"""Block-sparse attention: each block of queries attends to its own list of key blocks."""

from .op import BACKENDS, BackendChoice, block_sparse_attention, choose_backend

__all__ = ["BACKENDS", "BackendChoice", "block_sparse_attention", "choose_backend"]
