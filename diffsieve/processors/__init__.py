"""Attention processors for diffusers: configs, installing and removing, the warm-up clock, the summary.

`BAAttConfig` and `LLSAConfig` need no diffusers. The first use of any other name imports diffusers and adds
`set_attn_processor` and `sparsity_summary` to its pipeline base classes.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .config import BAAttConfig
from .llsa_config import LLSAConfig

if TYPE_CHECKING:
    from .ba_att import BAAttProcessor
    from .custom import use_custom_selection
    from .families import supported_models
    from .full import full_attention, trained_llsa
    from .install import apply_sparse_attention, remove_sparse_attention, sparse_attention
    from .llsa import LLSAProcessor
    from .llsa_summary import LLSASummary
    from .masks import RecordedMask, recorded_masks
    from .observe import AttentionCall, observe_attention
    from .selections import RecordedSelection, recorded_selections
    from .summary import SparsitySummary, save_orders, sparsity_summary

__all__ = [
    "AttentionCall",
    "BAAttConfig",
    "BAAttProcessor",
    "LLSAConfig",
    "LLSAProcessor",
    "LLSASummary",
    "RecordedMask",
    "RecordedSelection",
    "SparsitySummary",
    "apply_sparse_attention",
    "full_attention",
    "observe_attention",
    "recorded_masks",
    "recorded_selections",
    "remove_sparse_attention",
    "save_orders",
    "sparse_attention",
    "sparsity_summary",
    "supported_models",
    "trained_llsa",
    "use_custom_selection",
]

_HOMES = {
    "AttentionCall": "observe",
    "BAAttProcessor": "ba_att",
    "LLSAProcessor": "llsa",
    "LLSASummary": "llsa_summary",
    "RecordedMask": "masks",
    "RecordedSelection": "selections",
    "SparsitySummary": "summary",
    "apply_sparse_attention": "install",
    "full_attention": "full",
    "observe_attention": "observe",
    "recorded_masks": "masks",
    "recorded_selections": "selections",
    "remove_sparse_attention": "install",
    "save_orders": "summary",
    "sparse_attention": "install",
    "sparsity_summary": "summary",
    "supported_models": "families",
    "trained_llsa": "full",
    "use_custom_selection": "custom",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    if home != "families":
        import_module(f"{__name__}.install").add_pipeline_methods()
    globals()[name] = value  # later look-ups do not come here again
    return value
