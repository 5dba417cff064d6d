"""Whole pipelines: loading by name, the embedded small models, and the code that trains them."""
