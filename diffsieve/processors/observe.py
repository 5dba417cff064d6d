"""Watch the queries, keys and values that the self-attention layers of a dense pipeline attend with."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import UserInputError
from .clock import StepClock
from .families import Family, Grid
from .install import transformers_of
from .mailbox import ContextMailbox
from .sites import Site, find_sites, select_layers
from .watch import CONTROLLER, watch_forwards


@dataclass(frozen=True)
class AttentionCall:
    """One call of one self-attention layer.

    Attributes:
        layer: "transformer.blocks.3".
        number: Of the layer in its list of blocks, from 0.
        num_layers: In that list.
        step: Step of the generation, from 0.
        num_steps: Steps of the generation, None if unknown.
        call: Number of the transformer's call within the step, from 0; with guidance 0 is the branch of the prompt.
        sigma: Noise level of the step, None if unknown.
        timestep: The same as the scheduler's timestep.
        grid_thw: (frames, height, width) in tokens.
        query: (B, H, L, D), after projection, norm and position encoding, in the dtype of the model.
        key: (B, Hkv, L, D), the same.
        value: (B, Hkv, L, D).
    """

    layer: str
    number: int
    num_layers: int
    step: int
    num_steps: int | None
    call: int
    sigma: float | None
    timestep: float | None
    grid_thw: Grid
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


@contextmanager
def observe_attention(
    pipeline_or_transformer: Any,
    callback: Callable[[AttentionCall], None],
    *,
    layers: Collection[int] | None = None,
    steps: Collection[int] | None = None,
) -> Iterator[None]:
    """Tell `callback` of self-attention calls inside a `with` block; the results of the model stay what they were.

    The tensors are computed a second time for it. Eager runs only.

    Args:
        pipeline_or_transformer: a dense pipeline, or one of its transformers.
        callback: called before the layer attends, without gradients.
        layers: numbers within each list of blocks, negative ones from the end; `None` for all.
        steps: `None` for all.

    Raises:
        UserInputError: sparse attention is applied, no adapter for the model, or layers that it does not have.
    """
    clock = StepClock(None if isinstance(pipeline_or_transformer, nn.Module) else pipeline_or_transformer)
    plans = []
    for name, transformer in transformers_of(pipeline_or_transformer):
        if CONTROLLER in transformer.__dict__:
            raise UserInputError(f"{name} must be dense to be observed: call remove_sparse_attention(pipe) first")
        family, sites = find_sites(name, transformer)
        wanted = {site.name for site in sites} if layers is None else select_layers(sites, tuple(layers), "layers")
        plans.append((name, transformer, family, sites, wanted))
    observers = []
    try:
        for name, transformer, family, sites, wanted in plans:
            mailbox = ContextMailbox(transformer, transformer.get_submodule(sites[0].group), clock)
            observer = _Observer(name, transformer, family, clock, mailbox, callback, steps)
            transformer.__dict__[CONTROLLER] = observer
            observers.append(observer)
            for site in sites:
                if site.name in wanted:
                    observer.wrap(site, max(other.number for other in sites if other.group == site.group) + 1)
        yield
    finally:
        for observer in observers:
            observer.remove()


class _Observer:
    """Follows the steps of one transformer and hands the calls of its layers on."""

    def __init__(
        self,
        name: str,
        transformer: nn.Module,
        family: Family,
        clock: StepClock,
        mailbox: ContextMailbox,
        callback: Callable[[AttentionCall], None],
        steps: Collection[int] | None,
    ) -> None:
        self.name, self.transformer, self.family, self.clock = name, transformer, family, clock
        self._mailbox, self._callback, self._steps = mailbox, callback, steps
        self._wrapped: list[tuple[Any, Any]] = []
        self._place = (-1, -1)
        self._call = 0
        self._grid: Grid = (0, 0, 0)
        self._handle = watch_forwards(transformer)

    def wrap(self, site: Site, num_layers: int) -> None:
        self._wrapped.append((site.attn, site.attn.processor))
        site.attn.set_processor(_ObservedProcessor(site.attn.processor, self, site, num_layers))

    def remove(self) -> None:
        self._handle.remove()
        self._mailbox.remove()
        for attn, original in self._wrapped:
            attn.set_processor(original)
        self.transformer.__dict__.pop(CONTROLLER, None)

    def before_forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor | None) -> None:
        self.clock.tick(self.name, self._mailbox.context, timestep)
        place = (self.clock.generation, self.clock.step)
        self._call = self._call + 1 if place == self._place else 0
        self._place = place
        self._grid = self.family.grid(self.transformer, hidden_states)

    @torch.no_grad()
    def observe(self, site: Site, num_layers: int, hidden_states: torch.Tensor, rotary_emb: Any) -> None:
        if self._steps is not None and self.clock.step not in self._steps:
            return
        query, key, value = (x.transpose(1, 2) for x in self.family.project(site.attn, hidden_states, rotary_emb))
        sigma, timestep = self.clock.noise_level(self.clock.step)
        self._callback(
            AttentionCall(
                layer=f"{self.name}.{site.name}",
                number=site.number,
                num_layers=num_layers,
                step=self.clock.step,
                num_steps=self.clock.num_steps,
                call=self._call,
                sigma=sigma,
                timestep=timestep,
                grid_thw=self._grid,
                query=query,
                key=key,
                value=value,
            )
        )


class _ObservedProcessor:
    def __init__(self, original: Any, observer: _Observer, site: Site, num_layers: int) -> None:
        self._original, self._observer, self._site, self._num_layers = original, observer, site, num_layers

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: Any = None,
    ) -> torch.Tensor:
        self._observer.observe(self._site, self._num_layers, hidden_states, rotary_emb)
        return self._original(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)
