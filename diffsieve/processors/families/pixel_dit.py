"""The pixel-space DiT of this package: self-attention over single pixels, in the token order of the model."""

from typing import Any

import torch
from torch import nn

from ..unmasked import check_unmasked


def is_self_attention(module: nn.Module) -> bool:
    """Whether a module is a self-attention layer of the pixel-space DiT."""
    return all(hasattr(module, name) for name in ("project_heads", "merge_heads", "method"))


def grid(transformer: Any, hidden_states: torch.Tensor) -> tuple[int, int, int]:
    """Return (1, height, width) for a transformer input of shape (B, C, height, width)."""
    height, width = hidden_states.shape[-2:]
    return 1, height, width


def order(transformer: Any) -> str:
    """Return the order in which the model's tokens reach its layers: "hilbert", "morton" or "raster"."""
    name: str = transformer.config.token_order
    return name


def trained(transformer: Any) -> dict[str, Any] | None:
    """Return the fields of the `LLSAConfig` that the model attends by itself with, None for full attention."""
    config = transformer.config
    if config.attention_method == "full":
        return None
    fields: dict[str, Any] = {"block_size": config.block_size, "topk": config.topk, "order": config.token_order}
    if config.attention_method == "topk":
        return fields | {"levels": 1, "enrich": False}
    return fields | {"levels": config.levels, "enrich": config.enrich, "disjoint": config.disjoint}


class FullAttnProcessor:
    """Attends to all tokens, whatever method the model was trained with."""

    # diffusers writes these on processors that have them.
    _attention_backend: Any = None
    _parallel_config: Any = None

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Hidden states (B, L, C), in and out."""
        from diffusers.models.attention_dispatch import dispatch_attention_fn

        check_unmasked(encoder_hidden_states, attention_mask)
        query, key, value = project(attn, hidden_states, rotary_emb)
        return output(attn, dispatch_attention_fn(query, key, value, backend=self._attention_backend))


def project(
    attn: Any, hidden_states: torch.Tensor, rotary_emb: tuple[torch.Tensor, torch.Tensor] | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return query, key and value, each (B, L, H, D), after the norm of each head and the rotation."""
    query, key, value = attn.project_heads(hidden_states, rotary_emb)
    return query.to(value.dtype), key.to(value.dtype), value


def output(attn: Any, attended: torch.Tensor) -> torch.Tensor:
    """Merge the heads of (B, L, H, D) and project to (B, L, C)."""
    hidden_states: torch.Tensor = attn.merge_heads(attended)
    return hidden_states
