"""Block-sparse attention: each block of queries attends to its own list of key blocks."""

from .backends import BACKENDS, BackendChoice, choose_backend
from .dense import dense_attention, dense_backend
from .op import MAX_BLOCK_SIZE, block_sparse_attention

__all__ = [
    "BACKENDS",
    "MAX_BLOCK_SIZE",
    "BackendChoice",
    "block_sparse_attention",
    "choose_backend",
    "dense_attention",
    "dense_backend",
]
