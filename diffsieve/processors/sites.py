"""The self-attention layers of a transformer, before a method is installed in them."""

import re
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import UserInputError
from .families import Family, find_family, self_attention_layers, supported_models

PARALLEL_MESSAGE = (
    "sparse attention does not support parallelism inside a model yet (context or tensor parallel): remove it with "
    "remove_sparse_attention(pipe), or load the model without a parallel_config"
)


@dataclass(frozen=True)
class Site:
    """One self-attention layer.

    Attributes:
        name: "blocks.3".
        group: "blocks".
        number: 3.
        last: Whether it is the last one of its group.
        attn: The attention module.
    """

    name: str
    group: str
    number: int
    last: bool
    attn: Any


def find_sites(name: str, transformer: nn.Module) -> tuple[Family, list[Site]]:
    """Return the family of a transformer and its self-attention layers in module order.

    Args:
        name: What messages call the transformer.

    Raises:
        UserInputError: no adapter for its family, or a model under parallelism.
    """
    family = find_family(transformer)
    if family is None:
        raise UserInputError(
            f"{name} must belong to a supported family, got {type(transformer).__name__}; supported: {supported_text()}"
        )
    if getattr(transformer, "_parallel_config", None) is not None:
        raise UserInputError(PARALLEL_MESSAGE)
    found = []
    for path, attn in self_attention_layers(transformer, family):
        match = re.match(r"(.+)\.(\d+)\.", path)
        assert match is not None, path
        found.append((match.group(1), int(match.group(2)), attn))
    last = {group: number for group, number, _ in found}
    sites = [Site(f"{group}.{number}", group, number, number == last[group], attn) for group, number, attn in found]
    return family, sites


def select_layers(sites: list[Site], numbers: tuple[int, ...], field: str) -> set[str]:
    """Return the names of the layers with these numbers in any list of blocks; negative numbers count from the end.

    Raises:
        UserInputError: no list is that long; the message names `field`.
    """
    sizes: dict[str, int] = {}
    for site in sites:
        sizes[site.group] = max(sizes.get(site.group, 0), site.number + 1)
    selected = set()
    for number in numbers:
        hits = {site.name for site in sites if site.number == (number if number >= 0 else sizes[site.group] + number)}
        if not hits:
            raise UserInputError(f"{field} must name layers of the model ({max(sizes.values())} layers), got {number}")
        selected |= hits
    return selected


def reset_misplaced(transformer: nn.Module, ours: tuple[type, ...]) -> None:
    """Give every layer on which one of `ours` was set directly its default processor, cross-attention included.

    Such a processor never could run: it does not know its layer.
    """
    for module in transformer.modules():
        attn: Any = module
        if isinstance(getattr(attn, "processor", None), ours):
            attn.set_processor(attn._default_processor_cls())


def supported_text() -> str:
    """The supported models in one line, for messages."""
    return ", ".join(f"{row['transformers']} ({row['pipelines']})" for row in supported_models())
