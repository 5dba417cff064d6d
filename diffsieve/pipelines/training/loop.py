"""The training loop that all stages share: time budget, gradient averaging, EMA, stage log, checkpoints, resume."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from ...errors import DiffsieveError, UserInputError
from .checkpoint import (
    WEIGHTS_FILE,
    AveragedWeights,
    copy_file,
    copy_weights,
    load_state,
    raise_with_name,
    save_state,
    write_atomically,
)
from .muon import Muon
from .stage_config import StageConfig

logger = logging.getLogger(__name__)

LOG_FILE = "log.jsonl"
AGREE_ON_WEIGHTS_EVERY = 500  # steps; processes compute the same update, this removes what rounding could leave


@dataclass(frozen=True)
class LogEntry:
    """One line of the stage log."""

    stage: str
    step: int
    progress: float  # share of the stage, [0, 1]
    seconds: float  # of training in this stage, all legs, without set-up
    samples_per_second: float  # clips or pictures, all processes
    memory_gib: float  # peak of this process
    learning_rate: float  # factor in [0, 1]
    processes: int
    losses: dict[str, float] = field(default_factory=dict)
    details: dict[str, float] = field(default_factory=dict)  # what a stage adds


@dataclass(frozen=True)
class Leg:
    """One call of the training.

    Args:
        deadline: Time of `clock` at which the leg must stop; None = no limit.
        share: Part of the time left after its first step that a stage which starts now fits its schedule to; None = it
            keeps its schedule and pauses at the deadline.
        resume: Go on from the folder's checkpoint if there is one; else start anew.
        report: Gets every log entry (main process only).
        copy_to: Folder that gets the averaged weights after every save (main process only).
    """

    deadline: float | None = None
    share: float | None = 1.0
    resume: bool = False
    report: Callable[[LogEntry], None] | None = None
    copy_to: Path | None = None


@dataclass(frozen=True)
class StageResult:
    """How a leg ended."""

    step: int
    seconds: float
    finished: bool


def run_stage(
    name: str,
    folder: Path,
    config: StageConfig,
    accelerator: Accelerator,
    modules: Mapping[str, nn.Module],
    parameters: tuple[list[nn.Parameter], list[nn.Parameter]],
    compute_loss: Callable[[int, float], tuple[dict[str, torch.Tensor], int]],
    leg: Leg,
    *,
    save_average: Callable[[AveragedWeights, int], None],
    sample: Callable[[AveragedWeights, float, Path], None],
    describe: Callable[[float, float], dict[str, float]] | None = None,
) -> StageResult:
    """Train until the stage or the leg is over and leave a complete checkpoint.

    Every random choice of a step must derive from the step's number, so that a resumed run repeats an uninterrupted
    one.

    Args:
        name: Stage name for the log.
        folder: Gets `state.pt`, `log.jsonl` and `samples/`.
        config: Schedule and optimiser settings.
        accelerator: Gives device and processes.
        modules: What is trained, by name.
        parameters: Those for Muon (none: no Muon) and those for AdamW.
        compute_loss: Takes step and progress; returns the losses, among them "loss", and the number of samples it used.
        leg: Deadline, resume, reports.
        save_average: Writes the averaged weights of a step to the folder (main process only).
        sample: Draws a contact sheet of the averaged weights at a progress to a path (main process only).
        describe: Takes the progress that the step began with and samples per second; returns more numbers for the log.

    Raises:
        UserInputError: When the deadline leaves no time.
        DiffsieveError: When the loss is not finite; the last save stays.
    """
    device = accelerator.device
    main = accelerator.is_main_process
    hidden, other = parameters
    adam = torch.optim.AdamW(
        other,
        lr=config.adam_lr,
        betas=(0.9, config.adam_beta2),
        weight_decay=config.adam_weight_decay,
        fused=device.type == "cuda",
    )
    optimizers: dict[str, torch.optim.Optimizer] = {"adam": adam}
    if hidden:
        optimizers = {"muon": Muon(hidden, lr=config.muon_lr, weight_decay=config.weight_decay), "adam": adam}
    peaks = {"muon": config.muon_lr, "adam": config.adam_lr}
    ema = AveragedWeights(modules, config.ema_decay)
    step, before, length = 0, 0.0, config.seconds
    state = load_state(folder, device) if leg.resume else None
    fresh = state is None
    if state is not None:
        step, before, length = state["step"], state["seconds"], state["length"]
        for key, module in modules.items():
            module.load_state_dict(state["modules"][key])
        if state["optimizers"].keys() != optimizers.keys():
            raise UserInputError(
                f"{folder} must hold a state of {', '.join(optimizers)}, got one of {', '.join(state['optimizers'])}"
            )
        for key, optimizer in optimizers.items():
            optimizer.load_state_dict(state["optimizers"][key])
        ema.load_state_dict(state["ema"])
        logger.info("%s: resumed at step %d, %.0f s", name, step, before)
        del state  # a second copy of everything
    everything = [*hidden, *other]
    _share_weights(everything, accelerator)
    if main:
        _trim_log(folder / LOG_FILE, step)

    def save(elapsed: float) -> None:
        if not main:
            return
        values = {
            "stage": name,
            "step": step,
            "seconds": elapsed,
            "length": length,
            "modules": {key: module.state_dict() for key, module in modules.items()},
            "optimizers": {key: optimizer.state_dict() for key, optimizer in optimizers.items()},
            "ema": ema.state_dict(),
        }
        save_state(folder, values)
        save_average(ema, step)
        if leg.copy_to is not None:
            copy_weights(folder, leg.copy_to / folder.name)
            for path in folder.iterdir():
                if path.suffix in (".json", ".jsonl") and path.name != WEIGHTS_FILE:
                    copy_file(path, leg.copy_to / folder.name / path.name)

    sample_every = config.sample_every
    if sample_every is None:
        sample_every = 120.0 if device.type == "cuda" else 0.0
    elapsed = before
    started = last_save = last_sample = samples_since = clock(accelerator)
    samples, first = 0, True
    finished = _progress(config, step, elapsed, length) >= 1
    paused = False
    while not finished and not paused:
        progress = _progress(config, step, elapsed, length)
        factor = config.learning_rate_factor(progress)
        for key, optimizer in optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = peaks[key] * factor
        losses, count = compute_loss(step, progress)
        losses["loss"].backward()
        _average_gradients(everything, accelerator)
        losses["gradient_norm"] = nn.utils.clip_grad_norm_(everything, config.clip_norm)
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        ema.update()
        step += 1
        samples += count * accelerator.num_processes
        if step % AGREE_ON_WEIGHTS_EVERY == 0:
            _share_weights(everything, accelerator)
        if first:
            # compilation and the choice of kernels happen in the first step: the schedule begins after it
            first = False
            _wait(device)
            started = last_save = last_sample = samples_since = clock(accelerator)
            samples = 0
            if fresh and leg.share is not None and leg.deadline is not None and config.steps is None:
                length = (leg.deadline - started) * leg.share
                if length <= 0:
                    raise UserInputError(f"max_seconds must leave time for {name} after its set-up, got {length:.0f} s")
                logger.info("%s: first step done, %.0f s for the rest", name, length)
        if step % config.log_every and step != config.steps:
            continue
        values = {key: float(value.detach()) for key, value in losses.items()}  # waits for the device
        if not math.isfinite(values["loss"]):
            raise DiffsieveError(f"the loss of {name} at step {step} must be finite, got {values['loss']}")
        now = clock(accelerator)
        elapsed = before + now - started
        memory = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
        used, progress = progress, _progress(config, step, elapsed, length)
        rate = samples / max(now - samples_since, 1e-9)
        details = describe(used, rate) if describe is not None else {}
        entry = LogEntry(
            name, step, progress, elapsed, rate, memory, factor, accelerator.num_processes, values, details
        )
        samples, samples_since = 0, now
        finished = progress >= 1
        paused = leg.deadline is not None and now >= leg.deadline
        if main:
            _append(folder / LOG_FILE, asdict(entry))
            if leg.report is not None:
                leg.report(entry)
            if not (finished or paused) and now - last_save > config.save_every:
                last_save = now
                save(elapsed)
            if sample_every and now - last_sample > sample_every:
                last_sample = now
                sample(ema, progress, folder / "samples" / f"{step:07d}.png")
    save(elapsed)
    accelerator.wait_for_everyone()
    return StageResult(step, elapsed, finished)


@contextmanager
def many_shapes() -> Iterator[None]:
    """Let the compiler keep a graph for each layer shape and clip size; by default it gives up after 8."""
    import torch._dynamo

    with torch._dynamo.config.patch(recompile_limit=64, accumulated_recompile_limit=512):
        yield


def _progress(config: StageConfig, step: int, seconds: float, length: float) -> float:
    if config.steps is not None:
        return min(1.0, step / config.steps)
    return min(1.0, seconds / length)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clock(accelerator: Accelerator) -> float:
    """`time.monotonic()` of the main process, so that all processes take the same decisions."""
    if accelerator.num_processes == 1:
        return time.monotonic()
    value = torch.tensor([time.monotonic()], device=accelerator.device, dtype=torch.float64)
    torch.distributed.broadcast(value, src=0)
    return float(value)


def _average_gradients(parameters: list[nn.Parameter], accelerator: Accelerator) -> None:
    # the networks are small: one reduction of all gradients after the backward pass costs about a millisecond
    if accelerator.num_processes == 1:
        return
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    torch.distributed.all_reduce(flat)
    flat /= accelerator.num_processes
    parts = flat.split([gradient.numel() for gradient in gradients])
    torch._foreach_copy_(gradients, [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)])


@torch.no_grad()
def _share_weights(parameters: list[nn.Parameter], accelerator: Accelerator) -> None:
    if accelerator.num_processes == 1:
        return
    flat = torch.cat([parameter.reshape(-1) for parameter in parameters])
    torch.distributed.broadcast(flat, src=0)
    parts = flat.split([parameter.numel() for parameter in parameters])
    targets: list[torch.Tensor] = [*parameters]
    torch._foreach_copy_(targets, [part.view_as(target) for part, target in zip(parts, targets, strict=True)])


def _append(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(value) + "\n")
    except OSError as error:  # as on a full disk; half of a line goes when the run is resumed
        raise_with_name(error, path)


def _trim_log(path: Path, step: int) -> None:
    """Drop the lines of steps that a resumed run repeats, and all lines of an earlier run when it starts anew."""
    if path.is_file():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        write_atomically(path, lambda temporary: temporary.write_text("".join(kept), encoding="utf-8"))
