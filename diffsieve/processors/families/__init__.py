"""Adapters to the transformer families of diffusers: one small file each, found by the attributes of the model."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from . import pixel_dit, wan

Grid = tuple[int, int, int]


@dataclass(frozen=True)
class Family:
    """What the processors need to know about one family of transformers.

    Attributes:
        name: Short name.
        models: Transformer classes that the tests run; copies with the same attributes match too.
        pipelines: Pipelines that the tests run.
        is_self_attention: Whether an attention module is a self-attention layer of this family.
        grid: (transformer, hidden_states) -> (frames, height, width) of the token grid.
        project: (attn, hidden_states, rotary_emb) -> query, key, value, each (B, L, H, D), position encoding applied.
        output: (attn, attended (B, L, H, D)) -> hidden states (B, L, C).
        order: (transformer) -> name of the order in which the model hands its tokens to the layers; None for raster.
        text_tokens: (prefix, suffix) counts of text tokens around the video tokens of the sequence.
        full_attention: () -> processor that attends to all tokens, for models that may attend to fewer by themselves;
            None where the model's own processors are dense.
        trained: (transformer) -> fields of the `LLSAConfig` that the model attends by itself with, None if it does not.
    """

    name: str
    models: tuple[str, ...]
    pipelines: tuple[str, ...]
    is_self_attention: Callable[[nn.Module], bool]
    grid: Callable[[nn.Module, torch.Tensor], Grid]
    project: Callable[[Any, torch.Tensor, Any], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    output: Callable[[Any, torch.Tensor], torch.Tensor]
    order: Callable[[nn.Module], str] | None = None
    text_tokens: tuple[int, int] = (0, 0)
    full_attention: Callable[[], Any] | None = None
    trained: Callable[[nn.Module], dict[str, Any] | None] | None = None

    @property
    def num_text(self) -> int:
        """Text tokens in the sequence."""
        return self.text_tokens[0] + self.text_tokens[1]


FAMILIES: dict[str, Family] = {
    "wan": Family(
        name="wan",
        models=("WanTransformer3DModel", "WanVACETransformer3DModel"),
        pipelines=("WanPipeline", "WanImageToVideoPipeline", "WanVideoToVideoPipeline", "WanVACEPipeline"),
        is_self_attention=wan.is_self_attention,
        grid=wan.grid,
        project=wan.project,
        output=wan.output,
    ),
    "pixel-dit": Family(
        name="pixel-dit",
        models=("PixelDiTTransformer2DModel",),
        pipelines=("PixelDiTPipeline",),
        is_self_attention=pixel_dit.is_self_attention,
        grid=pixel_dit.grid,
        project=pixel_dit.project,
        output=pixel_dit.output,
        order=pixel_dit.order,
        full_attention=pixel_dit.FullAttnProcessor,
        trained=pixel_dit.trained,
    ),
}


def self_attention_layers(transformer: nn.Module, family: Family) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) of the self-attention layers of a transformer, in module order."""
    for name, module in transformer.named_modules():
        if family.is_self_attention(module):
            yield name, module


def find_family(transformer: nn.Module) -> Family | None:
    """Return the family whose adapter fits a transformer, or None."""
    for family in FAMILIES.values():
        if next(self_attention_layers(transformer, family), None) is not None:
            return family
    return None


def supported_models() -> list[dict[str, str]]:
    """Return the table of supported models: one row per family, for the documentation and for error messages."""
    return [
        {"family": family.name, "transformers": ", ".join(family.models), "pipelines": ", ".join(family.pipelines)}
        for family in FAMILIES.values()
    ]
