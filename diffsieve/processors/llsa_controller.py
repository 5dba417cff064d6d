"""LLSA in one transformer: gives the processors the token order of each forward's grid, and tells what they do."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import UserInputError
from ..kernels.orders import inverse_order
from .clock import StepClock
from .families import Family, Grid
from .llsa import LLSAProcessor
from .llsa_config import LLSAConfig
from .sites import PARALLEL_MESSAGE, find_sites, select_layers
from .token_order import reordering
from .watch import watch_forwards

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LLSALayer:
    """One layer that runs LLSA: its name, attention module, former and present processor."""

    name: str
    attn: Any
    original: Any
    processor: LLSAProcessor


@dataclass(frozen=True)
class DenseLayer:
    """One layer of `dense_layers`; its processors differ where the model attends sparsely by itself."""

    name: str
    attn: Any
    original: Any
    processor: Any


class LLSAController:
    """Watches the forwards of one transformer for their grid."""

    def __init__(
        self,
        name: str,
        transformer: nn.Module,
        family: Family,
        layers: list[LLSALayer],
        dense: list[DenseLayer],
        config: LLSAConfig,
    ) -> None:
        """Args: name: of the transformer in its pipeline."""
        self.name, self.transformer, self.family = name, transformer, family
        self.layers, self.dense, self.config = layers, dense, config
        self.grid: Grid | None = None
        self._device: torch.device | None = None
        self._handle = watch_forwards(transformer)

    def remove(self) -> None:
        """Detach from the transformer and give every layer its own processor back."""
        self._handle.remove()
        changed: list[LLSALayer | DenseLayer] = [*self.layers, *self.dense]
        for layer in changed:
            if layer.attn.processor is layer.processor:
                layer.attn.set_processor(layer.original)

    @torch.inference_mode(False)  # tensors made inside inference mode could not be used in training later
    def before_forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor | None) -> None:
        """Give the layers the token order of the forward that comes (see `watch_forwards`)."""
        if getattr(self.transformer, "_parallel_config", None) is not None:
            raise UserInputError(PARALLEL_MESSAGE)
        grid = self.family.grid(self.transformer, hidden_states)
        if (grid, hidden_states.device) == (self.grid, self._device):
            return
        self.grid, self._device = grid, hidden_states.device
        inverse = None
        order = reordering(self.family, self.transformer, self.config.order, grid)
        if order is not None:
            order, inverse = order.to(self._device), inverse_order(order).to(self._device)
        for layer in self.layers:
            layer.processor._order, layer.processor._inverse = order, inverse

    @property
    def tokens(self) -> int | None:
        """Tokens of the latest forward, None before the first."""
        return None if self.grid is None else math.prod(self.grid)


def plan_llsa(
    name: str, transformer: nn.Module, config: LLSAConfig, *, warn: bool
) -> Callable[[StepClock], LLSAController]:
    """Check everything, change nothing.

    Args:
        name: Of the transformer in its pipeline.
        config: Settings, held against the layers of the model.
        warn: Whether the installation says that a model has to be trained for it.

    Returns:
        The installation, to be called once nothing is installed any more. LLSA has no steps: it ignores the clock.

    Raises:
        UserInputError: the model is not supported, or the settings do not fit it.
    """
    family, sites = find_sites(name, transformer)
    if family.num_text:
        raise UserInputError(f"{name} must have no text in its self-attention for LLSA, got {family.num_text} tokens")
    dense = select_layers(sites, config.dense_layers, "dense_layers")
    recorded = select_layers(sites, config.record_masks, "record_masks")

    def install(clock: StepClock) -> LLSAController:
        layers, dense_layers = [], []
        for site in sites:
            original = site.attn.processor
            if site.name in dense:
                full = original if family.full_attention is None else family.full_attention()
                site.attn.set_processor(full)
                dense_layers.append(DenseLayer(site.name, site.attn, original, full))
                continue
            processor = LLSAProcessor(config).bind(family, record=site.name in recorded)
            site.attn.set_processor(processor)
            layers.append(LLSALayer(site.name, site.attn, original, processor))
        trained = None if family.trained is None else family.trained(transformer)
        if warn and not (trained and config.attends_like(LLSAConfig.from_dict(trained))):
            logger.warning(
                "%s now attends by LLSA, which changes the output of a model that was not trained with it: use weights "
                "trained with these settings, or fine-tune",
                name,
            )
        return LLSAController(name, transformer, family, layers, dense_layers, config)

    return install
