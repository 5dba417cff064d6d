"""The step clock: which denoising step of which generation a transformer call belongs to.

One clock serves all transformers of a pipeline, so the step survives the hand-over between the two of Wan 2.2. It never
counts calls (guidance runs a step twice, step caches skip parts of it) and reads no tensor that lives on a GPU, except
for a transformer used without its pipeline. Sources, best first, looked up anew at every call:

1. the cache context that the pipeline opens around a call, where it carries `step_index`;
2. `scheduler.step_index` of the pipeline's present scheduler, relative to its value at the start;
3. the timestep passed to the transformer: each new value is a step, a rise starts a generation.
"""

import weakref
from typing import Any, Protocol

import torch


class CallContext(Protocol):
    """The part of diffusers' `CacheContext` that the clock reads."""

    name: str
    step_index: int | None
    num_inference_steps: int | None
    timestep: Any
    sigma: float | None


class StepClock:
    """Step counter shared by the transformers of one pipeline.

    Attributes:
        generation: Number of the present generation (pipeline call), from 1; 0 before the first.
        step: Step within the generation, from 0. With image-to-image strength below 1 the first step that runs is 0.
        num_steps: Steps that the generation will run, None if unknown.
        source: "context", "scheduler" or "timestep".
    """

    def __init__(self, pipeline: Any | None = None) -> None:
        """Args: pipeline: pipeline whose scheduler to follow (held weakly); None for a transformer on its own."""
        self._pipeline = weakref.ref(pipeline) if pipeline is not None else None
        self.generation = 0
        self.step = 0
        self.num_steps: int | None = None
        self.source = ""
        self._finished = True
        self._scheduler: Any = None
        self._schedule: Any = None
        self._first_index: int | None = None
        self._callers: set[tuple[str, str]] = set()
        self._timestep: float | None = None
        self._context_level: tuple[float | None, float | None] = (None, None)
        self._levels: list[tuple[float | None, float | None]] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "StepClock":
        # A copy must not follow the original pipeline: it follows the copied one, or none where only the transformer
        # is copied.
        pipeline = self._pipeline() if self._pipeline is not None else None
        clock = StepClock(memo.get(id(pipeline)))
        clock.generation = self.generation
        return clock

    def __reduce__(self) -> tuple[type["StepClock"], tuple[()], dict[str, Any]]:
        # A pickled transformer must not carry the whole pipeline with it: what comes back counts as one on its own.
        return StepClock, (), {"generation": self.generation, "source": self.source}

    @property
    def has_pipeline(self) -> bool:
        """Whether there is a pipeline and it is still alive."""
        return self._pipeline is not None and self._pipeline() is not None

    def finish(self) -> None:
        """Note that the pipeline call is over: the next tick starts a generation."""
        self._finished = True

    def tick(self, transformer: str, context: CallContext | None, timestep: torch.Tensor | None) -> None:
        """Take in one transformer call and update `generation`, `step` and `num_steps`.

        Args:
            transformer: Name of the calling transformer in its pipeline.
            context: The cache context around the call, if the pipeline opened one.
            timestep: The timestep that the transformer received, any shape. Its value is read only without a pipeline
                and without a step in the context (that waits for the device).
        """
        pipeline = self._pipeline() if self._pipeline is not None else None
        scheduler = getattr(pipeline, "scheduler", None)
        schedule = getattr(scheduler, "timesteps", None)
        # `set_timesteps` makes a new tensor, so its identity marks a generation even where the indices look alike
        # (aborted in the first step, or a single step).
        new = self._finished or scheduler is not self._scheduler or schedule is not self._schedule
        self._scheduler, self._schedule = scheduler, schedule
        if new:
            self._first_index = _first_index(pipeline, scheduler)
        caller = (transformer, context.name if context is not None else "")

        if context is not None and context.step_index is not None:
            self.source = "context"
            step = int(context.step_index)
            repeated = pipeline is None and step == self.step == 0 and caller in self._callers
            new = new or step < self.step or repeated
        elif scheduler is not None and hasattr(scheduler, "step_index"):
            self.source = "scheduler"
            step = self._scheduler_step(scheduler.step_index, new)
            new = new or step < self.step
        else:
            self.source = "timestep"
            value = None if timestep is None else float(timestep.max())
            new = new or (value is not None and self._timestep is not None and value > self._timestep)
            step = 0 if new else self.step + int(value != self._timestep)
            self._timestep = value

        if new:
            self.generation += 1
            self._levels = None
            self._finished = False
        if new or step != self.step:
            self._callers.clear()
        self._callers.add(caller)
        self.step = step
        self.num_steps = _num_steps(context, pipeline, scheduler, self._first_index)
        self._context_level = _context_level(context, self._timestep if self.source == "timestep" else None)

    def noise_level(self, step: int) -> tuple[float | None, float | None]:
        """Return (sigma, timestep) of a step of this generation, each None if unknown.

        The first use in a generation copies the schedule from the device, once.
        """
        if self._schedule is None:
            return self._context_level if step == self.step else (None, None)
        if self._levels is None:
            timesteps = self._schedule.tolist()
            sigmas: list[float | None] = [None] * len(timesteps)
            if getattr(self._scheduler, "sigmas", None) is not None:
                sigmas = self._scheduler.sigmas.tolist()
            self._levels = list(zip(sigmas, timesteps, strict=False))
        index = step + (self._first_index or 0)
        return self._levels[index] if index < len(self._levels) else (None, None)

    def _scheduler_step(self, index: int | None, new: bool) -> int:
        if index is None:  # between `set_timesteps()` and the first `step()`
            return 0
        if self._first_index is None:  # no begin index was set: after step 0 this is its index plus one
            self._first_index = index if new else index - 1
        return max(index - self._first_index, 0)


def _first_index(pipeline: Any, scheduler: Any) -> int | None:
    """Position in the schedule of the first step that runs: above 0 with image-to-image strength < 1."""
    begin = getattr(scheduler, "begin_index", None)
    if begin is not None:
        return int(begin)
    running, total = _pipeline_steps(pipeline), _schedule_length(scheduler)
    return total - running if running is not None and total is not None and running <= total else None


def _num_steps(context: CallContext | None, pipeline: Any, scheduler: Any, first_index: int | None) -> int | None:
    if context is not None and context.num_inference_steps is not None:
        return int(context.num_inference_steps)
    total = _schedule_length(scheduler)
    return _pipeline_steps(pipeline) if total is None else total - (first_index or 0)


def _pipeline_steps(pipeline: Any) -> int | None:
    # A pipeline made from this one (`from_pipe`) shares the transformer. While that one runs, this one is not in its
    # loop, and its count is that of an earlier run.
    if getattr(pipeline, "current_timestep", 0) is None:
        return None
    steps = getattr(pipeline, "num_timesteps", None)  # pipelines set it before the loop, strength taken into account
    return steps if isinstance(steps, int) and steps > 0 else None


def _schedule_length(scheduler: Any) -> int | None:
    timesteps = getattr(scheduler, "timesteps", None)
    return None if timesteps is None else len(timesteps)


def _context_level(context: CallContext | None, timestep: float | None) -> tuple[float | None, float | None]:
    sigma = None if context is None else context.sigma
    given = None if context is None else context.timestep
    if isinstance(given, int | float):
        timestep = float(given)
    return (None if sigma is None else float(sigma), timestep)
