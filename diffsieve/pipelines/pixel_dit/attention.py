"""Self-attention of the pixel-space DiT: one module, three methods."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.attention import AttentionModuleMixin
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from ...kernels.llsa import llsa_attention
from ...processors.unmasked import check_unmasked
from .grid import rotate

METHODS = ("llsa", "full", "topk")


class PixelDiTAttnProcessor:
    """Attends as the module's own settings say; every module of a new model has one."""

    def __call__(
        self,
        attn: PixelDiTAttention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Hidden states (B, L, C) in token order, in and out."""
        check_unmasked(encoder_hidden_states, attention_mask)
        query, key, value = (x.transpose(1, 2) for x in attn.project_heads(hidden_states, rotary_emb))
        return attn.merge_heads(attn.attend(query, key, value).transpose(1, 2))


class PixelDiTAttention(nn.Module, AttentionModuleMixin):
    """Projections, RMS norm of each head's queries and keys, rotation, attention, output projection.

    Args:
        dim: C, channels of the hidden states.
        heads: H.
        head_dim: D.
        method: "llsa" (log-linear sparse attention), "full", or "topk": the best blocks of keys alone, chosen in one
            level, no pooled tokens.
        block_size: of "llsa" and "topk": tokens in a block.
        topk: of "llsa" and "topk": blocks kept by each block of queries; "llsa" takes one number per level too.
        levels: of "llsa"; see `llsa_attention`.
        enrich: of "llsa"; see `llsa_attention`.
        disjoint: of "llsa"; see `llsa_attention`.
    """

    _default_processor_cls: Any = PixelDiTAttnProcessor
    _available_processors: Any = (PixelDiTAttnProcessor,)
    processor: Any
    to_qkv: nn.Linear  # there while the projections are fused

    def __init__(
        self,
        dim: int,
        heads: int,
        head_dim: int,
        *,
        method: str,
        block_size: int,
        topk: int | tuple[int, ...],
        levels: int | str,
        enrich: bool,
        disjoint: bool,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.method = method
        self.options: dict[str, Any] = {"block_size": block_size, "topk": topk}
        if method == "topk":
            self.options |= {"levels": 1, "enrich": False, "disjoint": False}
        else:
            self.options |= {"levels": levels, "enrich": enrich, "disjoint": disjoint}
        inner = heads * head_dim
        self.to_q = nn.Linear(dim, inner)
        self.to_k = nn.Linear(dim, inner)
        self.to_v = nn.Linear(dim, inner)
        self.norm_q = nn.RMSNorm(head_dim, eps=1e-6)
        self.norm_k = nn.RMSNorm(head_dim, eps=1e-6)
        self.to_out = nn.Linear(inner, dim)
        self.use_bias = True  # fuse_projections asks for it
        self.processor = self._default_processor_cls()

    def project_heads(
        self, hidden_states: torch.Tensor, rotary_emb: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of (B, L, C), each (B, L, H, D), normalised and rotated."""
        if self.fused_projections:
            parts = self.to_qkv(hidden_states).chunk(3, dim=-1)
        else:
            parts = self.to_q(hidden_states), self.to_k(hidden_states), self.to_v(hidden_states)
        query, key, value = (x.unflatten(2, (self.heads, -1)) for x in parts)
        query, key = self.norm_q(query), self.norm_k(key)
        if rotary_emb is not None:
            query, key = rotate(query, *rotary_emb), rotate(key, *rotary_emb)
        return query, key, value

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attend by this module's method: (B, H, L, D), tokens in an order in which neighbours are close."""
        query, key = query.to(value.dtype), key.to(value.dtype)  # norms come out of autocast in float32
        if self.method == "full":
            return scaled_dot_product_attention(query, key, value)
        out = llsa_attention(query, key, value, **self.options)
        assert isinstance(out, torch.Tensor)
        return out

    def merge_heads(self, attended: torch.Tensor) -> torch.Tensor:
        """Merge the heads of (B, L, H, D) and project to (B, L, C)."""
        out: torch.Tensor = self.to_out(attended.flatten(2))
        return out

    def forward(
        self, hidden_states: torch.Tensor, rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Attend among the tokens of (B, L, C), with the processor that is set."""
        out: torch.Tensor = self.processor(self, hidden_states, None, None, rotary_emb)
        return out
