"""The eager side of one transformer: sees every forward, asks the clock, sets the flags that the processors read."""

import logging
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import UserInputError
from ..kernels.ba_att import budgets_of_levels, kept_video_blocks, measured_blocks
from ..kernels.orders import inverse_order
from .ba_att import COUNTERS, BAAttProcessor
from .calibration import choose_all_budgets, choose_all_orders
from .clock import StepClock
from .config import BAAttConfig
from .crossover import Crossover, crossover
from .dense import backend_of_dense_calls, chosen_backends, may_replace
from .families import Family, Grid
from .mailbox import ContextMailbox
from .sites import PARALLEL_MESSAGE
from .timing import StageTimer
from .token_order import reordering
from .warmup import Warmup
from .watch import watch_forwards

logger = logging.getLogger(__name__)

WARMUP = "warm-up"
CALIBRATION = "calibration after the warm-up"
DENSE_LAYER = "dense layer"
TEXT = "text in the sequence"
MASK = "attention mask"


@dataclass(frozen=True)
class Layer:
    """One self-attention layer under control.

    Attributes:
        name: Name within the transformer, such as "blocks.3".
        attn: The attention module.
        original: The processor that the module had before.
        processor: The processor that it has now.
        always_dense: Whether the config keeps this layer dense.
    """

    name: str
    attn: Any
    original: Any
    processor: BAAttProcessor
    always_dense: bool


@dataclass(frozen=True)
class StepRecord:
    """What one transformer did in one step.

    Attributes:
        step: Step of the generation, from 0.
        reasons: Per layer, why it was to run dense, or None.
        counters: int64 (layers, len(COUNTERS)), on the device of the run.
        dense_backend: Backend that was to do dense calls, None where the model's own processors were to do all.
    """

    step: int
    reasons: tuple[str | None, ...]
    counters: torch.Tensor
    dense_backend: str | None


class SparseController:
    """Runs the layers of one transformer: dense, dense and calibrating, or sparse, step by step."""

    def __init__(
        self,
        name: str,
        transformer: nn.Module,
        family: Family,
        layers: list[Layer],
        config: BAAttConfig,
        clock: StepClock,
        mailbox: ContextMailbox,
        orders: dict[str, tuple[int, ...]] | None,
        levels: dict[str, tuple[int, ...]] | None = None,
    ) -> None:
        """Args: name: of the transformer in its pipeline; orders, levels: checked tables of the config, or None."""
        self.name, self.transformer, self.family, self.layers = name, transformer, family, layers
        self.config, self.clock, self.mailbox, self.orders = config, clock, mailbox, orders
        self.generation = 0
        self.warmup_too_long = False
        self.measured: torch.Tensor | None = None  # (layers,) bool: which layers the calibration reached
        self.chosen: torch.Tensor | None = None  # (layers, H) order ids from the calibration of this generation
        # Levels of the budgets by layer: those of the table, or from the calibration of this generation.
        self.levels: dict[str, tuple[int, ...]] | None = levels
        self._warmup = Warmup(config)
        self._records: list[StepRecord] = []
        self._step = -1
        self._shape: tuple[Grid, int, torch.device] | None = None
        self._dense_reason: str | None = None
        self._calibrating = self._chose = False
        self._checked_sparse_step = False
        self._reasons: tuple[str | None, ...] = ()
        self._dense_backend: str | None = None
        self._chosen_backends: tuple[Any, ...] = ()
        self._timer: StageTimer | None = None
        self._handle = watch_forwards(transformer)

    def remove(self) -> None:
        """Detach from the transformer and give every layer its own processor back."""
        self._handle.remove()
        self.mailbox.remove()
        for layer in self.layers:
            if layer.attn.processor is layer.processor:
                layer.attn.set_processor(layer.original)

    @property
    def records(self) -> list[StepRecord]:
        """Records of the present generation, the running step included."""
        return [*self._records, self._running_record()] if self._step >= 0 else []

    @property
    def timer(self) -> StageTimer | None:
        """The timer of the present generation, None where nothing is measured."""
        return self._timer

    @property
    def shape(self) -> tuple[Grid, int, torch.device] | None:
        """(token grid, batch, device) of the latest forward."""
        return self._shape

    @property
    def replaces_dense_calls(self) -> bool:
        """Whether dense calls of the latest forward go to a kernel of ours in place of the model's own processors."""
        return any(layer.processor._dense_backend is not None for layer in self.layers)

    def count_dense_forward(self) -> None:
        """Count a forward that did not run, as its dense result was known."""
        for layer in self.layers:
            layer.processor._counters.add_(layer.processor._dense_counts)

    def before_forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor | None) -> None:
        """Set what the layers do in the forward that comes (see `watch_forwards`)."""
        if getattr(self.transformer, "_parallel_config", None) is not None:
            raise UserInputError(PARALLEL_MESSAGE)
        self.clock.tick(self.name, self.mailbox.context, timestep)
        shape = (self.family.grid(self.transformer, hidden_states), hidden_states.shape[0], hidden_states.device)
        if self._shape is None or shape != self._shape:
            self._prepare(*shape)
        new_generation = self.clock.generation != self.generation
        if new_generation:
            self._start_generation(hidden_states.device)
        new_step = new_generation or self.clock.step != self._step
        if new_step:
            self._start_step()
        # Asked at every forward: whoever uses a transformer by itself may choose another between two of one step.
        chosen_before = self._chosen_backends
        self._chosen_backends = chosen_backends(layer.processor._original for layer in self.layers)
        if new_step or shape != self._shape or self._chosen_backends != chosen_before:
            self._shape = shape
            self._set_flags(hidden_states)

    def _start_generation(self, device: torch.device) -> None:
        steps, warmup_steps = self.clock.num_steps, self._warmup.steps(self.clock)
        self.generation = self.clock.generation  # after what can fail: the next call must fail, too
        self._records, self._step, self._checked_sparse_step = [], -1, False
        self.measured = self.chosen = None
        self._chose = False
        if self.config.calibrates_budgets:
            self.levels = None
        measure = device.type == "cpu" or (device.type == "cuda" and self.config.measure_time)
        self._timer = StageTimer(device) if measure else None
        for layer in self.layers:
            layer.processor._timer = self._timer
            layer.processor._backend = layer.processor._backend_reason = None
            layer.processor._counters.zero_()
            layer.processor._order_errors.zero_()
            layer.processor._budget_errors.zero_()
        self.warmup_too_long = steps is not None and warmup_steps >= steps
        if self.warmup_too_long:
            logger.warning(
                "warmup_steps=%s covers all %s steps: the whole generation runs dense", self.config.warmup_steps, steps
            )

    def _start_step(self) -> None:
        self._dense_reason, self._calibrating = self._plan(first_step=self._step < 0)
        if self._step >= 0:
            self._records.append(self._running_record())
            self._check_first_sparse_step(self._records[-1])
            for layer in self.layers:
                layer.processor._counters.zero_()
        self._step, self._dense_backend = self.clock.step, None
        if self._calibrating:
            for layer in self.layers:
                layer.processor._order_errors.zero_()
                layer.processor._budget_errors.zero_()

    def _plan(self, *, first_step: bool) -> tuple[str | None, bool]:
        """Return (why the whole step is dense or None, whether it calibrates)."""
        step, steps = self.clock.step, self.clock.num_steps
        warm = self._warmup.covers(self.clock, step)
        if warm is None:
            raise UserInputError(
                "warmup_until_sigma and warmup_until_timestep need the noise level of the step, which this transformer "
                "does not learn: write apply_sparse_attention(pipe, config) for the whole pipeline"
            )
        if warm:
            last = steps is not None and step + 1 >= steps
            # Where the next step is unknown, this one may be the last of the warm-up.
            return WARMUP, self._calibrates and not last and self._warmup.covers(self.clock, step + 1) is not True
        # The second transformer of Wan 2.2 takes over after the warm-up: its first step calibrates it.
        if self._calibrates and first_step and self._warmup.covers(self.clock, 0):
            return CALIBRATION, True
        return None, False

    def _check_first_sparse_step(self, record: StepRecord) -> None:
        """Raise when the first sparse step of the generation was not finite; later ones show in the summary."""
        if self._checked_sparse_step or not any(reason is None for reason in record.reasons):
            return
        self._checked_sparse_step = True  # a wait for the device, like those of `_errors`
        broken = record.counters[:, COUNTERS.index("broken_calls")].nonzero()
        if len(broken):
            layer = self.layers[int(broken[0])].name
            raise UserInputError(
                f"attention inputs must be finite, got NaN or infinity in {self.name}.{layer} (step {record.step})"
            )

    @property
    def _calibrates(self) -> bool:
        return self.config.calibrates or self.calibrates_budgets

    @property
    def calibrates_budgets(self) -> bool:
        """Whether heads of its layers share their blocks by a measurement in each generation.

        Not where all layers run dense, have one head or a selection of their own, nor where so many blocks are kept, or
        so few, that there are no two numbers of blocks to measure at: no step has to run dense for that.
        """
        if not self.config.calibrates_budgets or not any(
            x.processor.shared_budgets is not None and not x.always_dense for x in self.layers
        ):
            return False
        prepared = all(self.layers[0].processor._grid)
        return not prepared or measured_blocks(*self._video_blocks()) is not None

    def _choose(self) -> None:
        """Choose orders and budgets from what the calibrating step measured."""
        if self.config.calibrates:
            self.chosen, self.measured = choose_all_orders(self._errors("_order_errors"))
            for layer, orders in zip(self.layers, self.chosen, strict=True):
                assert layer.processor._orders is not None
                layer.processor._orders.copy_(orders)
        if self.calibrates_budgets:
            levels, measured = choose_all_budgets(self._errors("_budget_errors"), *self._video_blocks())
            self.measured = measured if self.measured is None else self.measured
            self.levels = {x.name: tuple(of_layer) for x, of_layer in zip(self.layers, levels.tolist(), strict=True)}
            self._set_budgets()
        self._chose = True  # after what can fail

    def _errors(self, name: str) -> torch.Tensor:
        errors = torch.stack([getattr(layer.processor, name) for layer in self.layers])
        # A wait for the device. NaN would choose silently and show in every later step.
        if torch.isnan(errors).any():
            bad = [layer.name for layer, sums in zip(self.layers, errors, strict=True) if torch.isnan(sums).any()]
            raise UserInputError(
                f"attention inputs must be finite, got NaN in {self.name}.{bad[0]} (step {self._step - 1}); the dense "
                "model produces NaN there too"
            )
        return errors

    def _set_budgets(self) -> None:
        """Give the layers the blocks that their heads keep: of the levels, equal ones until there are some."""
        kept, video = self._video_blocks()
        for layer in self.layers:
            budgets = layer.processor._budgets
            if budgets is not None:
                levels = (self.levels or {}).get(layer.name, (0,) * len(budgets))
                budgets.copy_(torch.tensor(budgets_of_levels(list(levels), kept, video)))

    def _video_blocks(self) -> tuple[int, int]:
        """The blocks of the video that a row keeps at equal budgets, and all of them."""
        size = self.config.block_size
        video = -(-math.prod(self.layers[0].processor._grid) // size)
        return kept_video_blocks(video, -(-self.family.num_text // size), self.config.kept), video

    def _set_flags(self, hidden_states: torch.Tensor) -> None:
        assert self._shape is not None
        grid, _, device = self._shape
        tokens = math.prod(grid) + self.family.num_text
        shortest = _crossover(self.config, device)
        reason = self._dense_reason
        if tokens < shortest.tokens:
            how = ", an estimate" if shortest.estimate else ""
            reason = f"short sequence ({tokens:,} < {shortest.tokens:,} tokens{how})"
        elif self.config.text == "dense" and self.family.num_text:
            reason = TEXT
        self._reasons = tuple(reason or (DENSE_LAYER if layer.always_dense else None) for layer in self.layers)
        calibrating = self._calibrating and reason == self._dense_reason
        if reason is None and self._calibrates and not self._chose:
            self._choose()
        free, dense_backend = self._chosen_backends[0] == "native", None
        if free:
            dense_backend = backend_of_dense_calls(self.transformer, hidden_states, tokens, self.config)
        self._dense_backend = dense_backend or self._dense_backend  # of an earlier forward of this step
        for layer, why in zip(self.layers, self._reasons, strict=True):
            plain = free and may_replace(self.family, layer.attn, layer.processor._original)
            layer.processor._may_replace = plain
            layer.processor._dense_backend = dense_backend if plain else None
            layer.processor._sparse = why is None
            layer.processor._calibrating = calibrating and not layer.always_dense

    @torch.inference_mode(False)  # tensors made inside inference mode could not be updated outside it later
    def _prepare(self, grid: Grid, batch: int, device: torch.device) -> None:
        """Give the layers their tensors for a shape; existing counts stay."""
        tokens = math.prod(grid) + self.family.num_text
        to_raster = reordering(self.family, self.transformer, "raster", grid)
        from_raster = None
        if to_raster is not None:
            to_raster, from_raster = to_raster.to(device), inverse_order(to_raster).to(device)
        block_pairs = _num_blocks(math.prod(grid), self.family.num_text, self.config.block_size) ** 2
        for layer in self.layers:
            processor, heads = layer.processor, layer.attn.heads
            pairs, token_pairs = (batch * heads * count for count in (block_pairs, tokens * tokens))
            processor._grid, processor._to_raster, processor._from_raster = grid, to_raster, from_raster
            processor._dense_counts = torch.tensor([pairs, pairs, token_pairs, token_pairs, 0, 1, 0, 0], device=device)
            processor._counters = processor._counters.to(device)
            processor._order_errors = processor._order_errors.to(device)
            processor._budget_errors = processor._budget_errors.to(device)
        self._set_budgets()

    def _running_record(self) -> StepRecord:
        counters = torch.stack([layer.processor._counters for layer in self.layers])
        return StepRecord(self._step, self._reasons, counters, self._dense_backend)


def _crossover(config: BAAttConfig, device: torch.device) -> Crossover:
    """The shortest sequence that runs sparse: what the config says, or that of the device."""
    if config.min_tokens != "auto":
        return Crossover(config.min_tokens)
    on_nvidia = device.type == "cuda" and torch.version.hip is None
    if not on_nvidia:
        return crossover(device.type)
    return crossover(device.type, torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device))


def _num_blocks(video_tokens: int, text_tokens: int, block_size: int) -> int:
    return -(-video_tokens // block_size) + -(-text_tokens // block_size)
