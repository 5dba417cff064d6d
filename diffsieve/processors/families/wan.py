"""Wan 2.1 and 2.2, VACE, and the models that carry a copy of their attention.

Self-attention over pure video tokens in row-major (frame, height, width) order; text reaches the video by
cross-attention, which stays as it is.
"""

import inspect
from typing import Any

import torch
from torch import nn

# How `forward` of the attention module calls its processor. Helios and Wan-Animate 2 have the same attributes but more
# inputs, and another order of operations behind them.
_CALL = ("attn", "hidden_states", "encoder_hidden_states", "attention_mask", "rotary_emb")


def is_self_attention(module: nn.Module) -> bool:
    """Whether a module is a Wan self-attention layer, or a copy of one."""
    if getattr(module, "is_cross_attention", True) or not hasattr(module, "_default_processor_cls"):
        return False
    if not all(hasattr(module, name) for name in ("to_q", "norm_q", "norm_k", "to_out", "heads")):
        return False
    processor: Any = module._default_processor_cls
    call = inspect.signature(processor.__call__)
    return tuple(call.parameters)[1:] == _CALL


def grid(transformer: Any, hidden_states: torch.Tensor) -> tuple[int, int, int]:
    """Return (frames, height, width) in tokens for a transformer input of shape (B, C, T, Y, X)."""
    frames, height, width = (
        size // patch for size, patch in zip(hidden_states.shape[-3:], transformer.config.patch_size, strict=True)
    )
    return frames, height, width


def project(
    attn: Any, hidden_states: torch.Tensor, rotary_emb: tuple[torch.Tensor, torch.Tensor] | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return query, key and value, each (B, L, H, D), after the norm over all heads and the rotation."""
    if attn.fused_projections:
        query, key, value = attn.to_qkv(hidden_states).chunk(3, dim=-1)
    else:
        query, key, value = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
    query, key = attn.norm_q(query), attn.norm_k(key)
    query, key, value = (x.unflatten(2, (attn.heads, -1)) for x in (query, key, value))
    if rotary_emb is not None:
        query, key = _rotate(query, *rotary_emb), _rotate(key, *rotary_emb)
    return query, key, value


def output(attn: Any, attended: torch.Tensor) -> torch.Tensor:
    """Merge the heads of (B, L, H, D) and project to (B, L, C)."""
    hidden_states = attn.to_out[0](attended.flatten(2, 3))
    return attn.to_out[1](hidden_states)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    # Pairs of neighbouring channels turn together. The tables (1, L, 1, D) hold every angle twice.
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    even, odd = x[..., 0::2], x[..., 1::2]
    rotated = torch.empty_like(x)
    rotated[..., 0::2] = even * cos - odd * sin
    rotated[..., 1::2] = odd * cos + even * sin
    return rotated
