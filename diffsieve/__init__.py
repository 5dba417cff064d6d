"""Block-sparse attention for the diffusion transformers of Hugging Face `diffusers`.

`import diffsieve` loads nothing but this file: a public name imports the room that it lives in on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .errors import BackendUnavailableError, DiffsieveError, UserInputError
    from .kernels.ba_att import ba_attention
    from .kernels.block_sparse import block_sparse_attention
    from .kernels.llsa import llsa_attention
    from .pipelines.loading import load_pipeline
    from .pipelines.pixel_dit import PixelDiTPipeline, PixelDiTTransformer2DModel
    from .processors import (
        BAAttConfig,
        BAAttProcessor,
        LLSAConfig,
        LLSAProcessor,
        LLSASummary,
        SparsitySummary,
        apply_sparse_attention,
        remove_sparse_attention,
        save_orders,
        sparse_attention,
        sparsity_summary,
    )

__all__ = [
    "BAAttConfig",
    "BAAttProcessor",
    "BackendUnavailableError",
    "DiffsieveError",
    "LLSAConfig",
    "LLSAProcessor",
    "LLSASummary",
    "PixelDiTPipeline",
    "PixelDiTTransformer2DModel",
    "SparsitySummary",
    "UserInputError",
    "__version__",
    "apply_sparse_attention",
    "ba_attention",
    "block_sparse_attention",
    "llsa_attention",
    "load_pipeline",
    "remove_sparse_attention",
    "save_orders",
    "sparse_attention",
    "sparsity_summary",
]

_HOMES = {
    "BAAttConfig": "processors",
    "BAAttProcessor": "processors",
    "BackendUnavailableError": "errors",
    "DiffsieveError": "errors",
    "LLSAConfig": "processors",
    "LLSAProcessor": "processors",
    "LLSASummary": "processors",
    "PixelDiTPipeline": "pipelines.pixel_dit",
    "PixelDiTTransformer2DModel": "pipelines.pixel_dit",
    "SparsitySummary": "processors",
    "UserInputError": "errors",
    "apply_sparse_attention": "processors",
    "ba_attention": "kernels.ba_att",
    "block_sparse_attention": "kernels.block_sparse",
    "llsa_attention": "kernels.llsa",
    "load_pipeline": "pipelines.loading",
    "remove_sparse_attention": "processors",
    "save_orders": "processors",
    "sparse_attention": "processors",
    "sparsity_summary": "processors",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value  # later look-ups do not come here again
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
