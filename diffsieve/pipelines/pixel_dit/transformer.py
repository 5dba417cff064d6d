"""A diffusion transformer on single pixels: no autoencoder, no patches."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.attention import AttentionMixin
from diffusers.models.cache_utils import CacheMixin
from diffusers.models.embeddings import TimestepEmbedding, Timesteps
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.modeling_utils import ModelMixin
from torch import nn
from torch.nn.functional import gelu, layer_norm

from ...errors import UserInputError
from ...processors.llsa_config import LLSAConfig
from .attention import METHODS, PixelDiTAttention
from .grid import TOKEN_ORDERS, GridTables, grid_tables

_TIME_CHANNELS = 256
_TOKENS_AT_ONCE = 1024  # through the two-layer network on a CPU, so that its wide layer stays in the cache
_ALIGNMENT = 64  # bytes, of memory that PyTorch gets for a new tensor on a CPU


class PixelDiTBlock(nn.Module):
    """Attention and a two-layer network, both modulated by time and class (adaLN-zero)."""

    def __init__(self, dim: int, hidden: int, attention: PixelDiTAttention) -> None:
        super().__init__()
        self.modulation = nn.Linear(dim, 6 * dim)
        self.attn = attention
        self.linear_in = nn.Linear(dim, hidden)
        self.linear_out = nn.Linear(hidden, dim)

    def forward(
        self, hidden_states: torch.Tensor, condition: torch.Tensor, rotary_emb: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Args: hidden_states: (B, L, C); condition: (B, C); rotary_emb: see `GridTables`. Returns (B, L, C)."""
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = self.modulation(condition)[:, None].chunk(6, dim=-1)
        attended = self.attn(_modulate(hidden_states, shift_1, scale_1), rotary_emb)
        hidden_states = torch.addcmul(hidden_states, gate_1, attended)
        if not hidden_states.is_cpu or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return torch.addcmul(hidden_states, gate_2, self._feed_forward(hidden_states, shift_2, scale_2))
        for part in hidden_states.split(_TOKENS_AT_ONCE, dim=1):
            part.addcmul_(gate_2, self._feed_forward(part, shift_2, scale_2))
        return hidden_states

    def _feed_forward(self, hidden_states: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.linear_out(gelu(self.linear_in(_modulate(hidden_states, shift, scale))))


class PixelDiTTransformer2DModel(ModelMixin, ConfigMixin, AttentionMixin, CacheMixin):
    """Transformer for flow matching on pixels, one token each (arXiv 2512.16615), for any height and width.

    Tokens are ordered once before the first block, so that neighbours in the sequence are neighbours in the picture,
    and put back once behind the last.

    Args:
        sample_size: height and width in pixels that the model is made for; others run too.
        in_channels: of a picture.
        num_layers: blocks.
        num_attention_heads: heads.
        attention_head_dim: channels of a head, a multiple of 4; heads times channels is the width of the model.
        mlp_ratio: width of the two-layer network of a block, relative to that of the model.
        num_classes: classes of pictures; 0 for a model without classes.
        attention_method: "llsa" (log-linear sparse attention, grows with L log L), "full", or "topk" (the best blocks
            of keys alone, chosen in one level). Changing it needs training.
        token_order: "hilbert", "morton" or "raster". The first two keep blocks compact, which LLSA needs.
        block_size: of "llsa" and "topk": tokens in a block. Smaller blocks choose better, larger run faster.
        topk: blocks kept by each block of queries, for "llsa" also one number per level, from fine to coarse. More is
            closer to full attention and slower.
        levels: of "llsa": pooled levels, in [1, 4], "auto" or "paper".
        enrich: of "llsa": attend to pooled tokens too; without, far context is lost.
        disjoint: of "llsa": leave out pooled tokens whose children are attended; not the published form.
        rope_theta: base of the frequencies of the rotary position embedding.
        rope_extent: length that the longer side stands for, so that weights know a layout at every resolution; None
            counts pixels.

    Raises:
        UserInputError: a setting is out of range, or two contradict each other.
    """

    _supports_gradient_checkpointing = True
    _no_split_modules = ("PixelDiTBlock",)
    _repeated_blocks = ("PixelDiTBlock",)

    @register_to_config
    def __init__(
        self,
        sample_size: int = 128,
        in_channels: int = 3,
        num_layers: int = 12,
        num_attention_heads: int = 6,
        attention_head_dim: int = 64,
        mlp_ratio: float = 4.0,
        num_classes: int = 0,
        attention_method: str = "llsa",
        token_order: str = "hilbert",
        block_size: int = 16,
        topk: Any = 8,
        levels: Any = "auto",
        enrich: bool = True,
        disjoint: bool = False,
        rope_theta: float = 10_000.0,
        rope_extent: int | None = None,
    ) -> None:
        super().__init__()
        topk = tuple(topk) if isinstance(topk, list) else topk
        _check_sizes(locals())
        LLSAConfig(block_size=block_size, topk=topk, levels=levels, enrich=enrich, disjoint=disjoint)
        dim = num_attention_heads * attention_head_dim
        self.gradient_checkpointing = False
        self.proj_in = nn.Linear(in_channels, dim)
        self.time_proj = Timesteps(_TIME_CHANNELS, flip_sin_to_cos=True, downscale_freq_shift=0)
        self.time_embedding = TimestepEmbedding(_TIME_CHANNELS, dim)
        # the last entry stands for no class, in guidance and in training
        self.class_embedding = nn.Embedding(num_classes + 1, dim) if num_classes else None
        self.blocks = nn.ModuleList(
            PixelDiTBlock(
                dim,
                round(dim * mlp_ratio),
                PixelDiTAttention(
                    dim,
                    num_attention_heads,
                    attention_head_dim,
                    method=attention_method,
                    block_size=block_size,
                    topk=topk,
                    levels=levels,
                    enrich=enrich,
                    disjoint=disjoint,
                ),
            )
            for _ in range(num_layers)
        )
        self.modulation_out = nn.Linear(dim, 2 * dim)
        self.proj_out = nn.Linear(dim, in_channels)
        self._initialise()

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.time_embedding.linear_1.weight, std=0.02)
        nn.init.normal_(self.time_embedding.linear_2.weight, std=0.02)
        if self.class_embedding is not None:
            nn.init.normal_(self.class_embedding.weight, std=0.02)
        # every block begins as the identity, the model with a velocity of 0
        for name, parameter in self.named_parameters():
            if "modulation" in name or name.startswith("proj_out"):
                nn.init.zeros_(parameter)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load a model as every model of diffusers does; on a CPU its output is that of the saved one, bit for bit."""
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # with loading info, where that was asked for
        for parameter in model.parameters():
            # Tensors of a mapped file begin anywhere, and the order of a product's sums depends on where.
            if parameter.device.type == "cpu" and parameter.data_ptr() % _ALIGNMENT:
                parameter.data = parameter.data.clone()
        return loaded

    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        class_labels: torch.Tensor | None = None,
        return_dict: bool = True,
    ) -> Transformer2DModelOutput | tuple[torch.Tensor]:
        """Predict the velocity of noisy pictures.

        Args:
            hidden_states: (B, in_channels, H, W).
            timestep: (B,) or a scalar, in [0, 1000]: 1000 times the share of noise.
            class_labels: (B,) int64 in [0, num_classes], `num_classes` for no class; None where the model has none, or
                for no class at all.
            return_dict: return an output object instead of a tuple.

        Returns:
            The velocity, noise minus picture, (B, in_channels, H, W).

        Raises:
            UserInputError: wrong shape, or labels for a model without classes.
        """
        if not torch.compiler.is_compiling():
            self._check_inputs(hidden_states, class_labels)
        batch, _, height, width = hidden_states.shape
        tables = self._tables(height, width, hidden_states.device)
        tokens = hidden_states.flatten(2).transpose(1, 2)  # [B, L, in_channels]
        if tables.order is not None:
            tokens = tokens.index_select(1, tables.order)
        x = self.proj_in(tokens)
        condition = self._condition(timestep, class_labels, batch, x.dtype)
        rotary = (tables.cos, tables.sin)
        for block in self.blocks:
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                x = self._gradient_checkpointing_func(block, x, condition, rotary)
            else:
                x = block(x, condition, rotary)
        shift, scale = self.modulation_out(condition)[:, None].chunk(2, dim=-1)
        out = self.proj_out(_modulate(x, shift, scale))
        if tables.inverse is not None:
            out = out.index_select(1, tables.inverse)
        sample = out.transpose(1, 2).unflatten(2, (height, width))
        return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)

    def _tables(self, height: int, width: int, device: torch.device) -> GridTables:
        c = self.config
        return grid_tables(height, width, c.token_order, c.attention_head_dim, c.rope_theta, c.rope_extent, device)

    def _condition(
        self, timestep: torch.Tensor, class_labels: torch.Tensor | None, batch: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """What the blocks are modulated by, (B, C)."""
        channels = self.time_proj(timestep.expand(batch))
        condition = self.time_embedding(channels.to(self.time_embedding.linear_1.weight.dtype))
        if self.class_embedding is not None:
            if class_labels is None:
                class_labels = torch.full_like(timestep.expand(batch), self.config.num_classes, dtype=torch.int64)
            condition = condition + self.class_embedding(class_labels)
        return torch.nn.functional.silu(condition).to(dtype)

    def _check_inputs(self, hidden_states: torch.Tensor, class_labels: torch.Tensor | None) -> None:
        channels = self.config.in_channels
        if hidden_states.ndim != 4 or hidden_states.shape[1] != channels:
            raise UserInputError(
                f"hidden_states must have shape (B, {channels}, H, W), got {tuple(hidden_states.shape)}"
            )
        if class_labels is None:
            return
        if self.class_embedding is None:
            raise UserInputError("class_labels must be None for a model without classes, got labels")
        if class_labels.shape != hidden_states.shape[:1]:
            raise UserInputError(
                f"class_labels must have shape ({hidden_states.shape[0]},), got {tuple(class_labels.shape)}"
            )


def _modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    normal = layer_norm(x, x.shape[-1:], eps=1e-6).to(x.dtype)  # autocast gives float32
    return torch.addcmul(shift, normal, 1 + scale)


def _check_sizes(values: dict[str, Any]) -> None:
    names = ("sample_size", "in_channels", "num_layers", "num_attention_heads", "attention_head_dim", "rope_extent")
    for name in names:
        value = values[name]
        absent = name == "rope_extent" and value is None
        if not absent and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise UserInputError(f"{name} must be a positive integer, got {value!r}")
    if values["attention_head_dim"] % 4:
        raise UserInputError(f"attention_head_dim must be a multiple of 4, got {values['attention_head_dim']}")
    if not isinstance(values["num_classes"], int) or values["num_classes"] < 0:
        raise UserInputError(f"num_classes must be 0 or a positive integer, got {values['num_classes']!r}")
    for name in ("mlp_ratio", "rope_theta"):
        if not values[name] > 0:
            raise UserInputError(f"{name} must be positive, got {values[name]!r}")
    if values["attention_method"] not in METHODS:
        raise UserInputError(
            f"attention_method must be one of {', '.join(METHODS)}, got {values['attention_method']!r}"
        )
    if values["token_order"] not in TOKEN_ORDERS:
        raise UserInputError(f"token_order must be one of {', '.join(TOKEN_ORDERS)}, got {values['token_order']!r}")
    if values["attention_method"] == "topk" and not isinstance(values["topk"], int):
        raise UserInputError(f"topk must be one number for attention_method 'topk', got {values['topk']!r}")
