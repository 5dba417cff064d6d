"""The pixel-space DiT of this package: self-attention over single pixels, in the token order of the model."""

from typing import Any

import torch
from torch import nn


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
