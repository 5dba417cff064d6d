"""LLSA: trainable log-linear sparse attention (arXiv 2512.16615), for any length, with exact gradients.

One file per step: `levels` and `pyramid`, the choice of keys and the attention in `reference` and the backends,
`transpose`, `op` for the calls, `checks` and `backends` for what they accept, `selection_map` for pictures.
"""

from .backends import choose_backend
from .levels import resolve_levels
from .op import enriched_attention, hierarchical_topk, llsa_attention
from .pyramid import pyramid
from .selection_map import llsa_selection_map
from .transpose import TransposedIndex, transpose_index

__all__ = [
    "TransposedIndex",
    "choose_backend",
    "enriched_attention",
    "hierarchical_topk",
    "llsa_attention",
    "llsa_selection_map",
    "pyramid",
    "resolve_levels",
    "transpose_index",
]
