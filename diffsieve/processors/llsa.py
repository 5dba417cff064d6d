"""LLSAProcessor: log-linear sparse attention inside a self-attention layer, for training and for trained models."""

from typing import Any

import torch

from ..errors import UserInputError
from ..kernels.llsa import choose_backend, hierarchical_topk, llsa_attention
from .families import Family
from .llsa_config import LLSAConfig
from .unmasked import check_unmasked


class LLSAProcessor:
    """Attention processor that runs self-attention as LLSA, in training and inference alike.

    Give one to `pipe.set_attn_processor(...)` or `apply_sparse_attention(...)`: every self-attention layer then gets
    its own copy. It has no weights, and keeps nothing from call to call but the choice of keys in the layers of
    `record_masks`. Other models call `attend` with their own queries, keys and values.

    Args:
        config: Settings; default `LLSAConfig()`.
        **options: Fields of `LLSAConfig`, instead of a config.

    Raises:
        UserInputError: a wrong setting, or both a config and options.
    """

    def __init__(self, config: LLSAConfig | None = None, **options: Any) -> None:
        if config is not None and not isinstance(config, LLSAConfig):
            raise UserInputError(f"config must be an LLSAConfig, got {type(config).__name__}")
        if config is not None and options:
            raise UserInputError(f"give a config or options, not both (got a config and {', '.join(options)})")
        self.config = LLSAConfig.from_dict(options) if config is None else config
        self._family: Family | None = None
        # Set before each forward by the controller; the same tensors as long as the grid stays.
        self._order: torch.Tensor | None = None
        self._inverse: torch.Tensor | None = None
        self._backend: str | None = None
        self._record = False
        self._selection: list[torch.Tensor] | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.config!r})"

    def bind(self, family: Family, *, record: bool = False) -> "LLSAProcessor":
        """Return a copy for one layer of a model of a family; `record`: whether to keep the layer's last choice."""
        bound = type(self)(self.config)
        bound._family, bound._record = family, record
        return bound

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attend with these settings; the tokens must be in an order in which neighbours are close.

        Args:
            query: (B, H, L, D), position encoding applied.
            key, value: (B, Hkv, L, D).

        Returns:
            (B, H, L, D).
        """
        config = self.config
        indices = None
        # Shorter sequences are attended densely: nothing is chosen. Compiled code keeps nothing.
        if self._record and query.shape[2] >= config.block_size and not torch.compiler.is_compiling():
            indices = self._selection = hierarchical_topk(
                query,
                key,
                block_size=config.block_size,
                topk=config.topk,
                levels=config.levels,
                backend=config.backend,
            )
        out = llsa_attention(
            query,
            key,
            value,
            block_size=config.block_size,
            topk=config.topk,
            levels=config.levels,
            enrich=config.enrich,
            disjoint=config.disjoint,
            indices=indices,
            backend=config.backend,
        )
        assert isinstance(out, torch.Tensor)
        return out

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Attend; hidden states (B, L, C) in and out, in the dtype of the input."""
        if self._family is None:
            raise UserInputError(
                "LLSAProcessor cannot be set on a transformer directly: it needs to know the token grid. Write "
                "pipe.set_attn_processor(LLSAProcessor()), or apply_sparse_attention(transformer, LLSAConfig())"
            )
        check_unmasked(encoder_hidden_states, attention_mask)
        query, key, value = self._family.project(attn, hidden_states, rotary_emb)
        if self._order is not None:
            query, key, value = (x.index_select(1, self._order) for x in (query, key, value))
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        if not torch.compiler.is_compiling():
            block_size, backend = self.config.block_size, self.config.backend
            self._backend = choose_backend(query, block_size=block_size, backend=backend).name
        attended = self.attend(query, key, value).transpose(1, 2)
        if self._inverse is not None:
            attended = attended.index_select(1, self._inverse)
        return self._family.output(attn, attended)
