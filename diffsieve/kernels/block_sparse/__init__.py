"""Block-sparse attention: each block of queries attends to its own list of key blocks."""

from .op import BACKENDS, MAX_BLOCK_SIZE, BackendChoice, block_sparse_attention, choose_backend

__all__ = ["BACKENDS", "MAX_BLOCK_SIZE", "BackendChoice", "block_sparse_attention", "choose_backend"]
