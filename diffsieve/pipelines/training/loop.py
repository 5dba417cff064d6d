"""The training loop that both stages share: time budget, gradient averaging, EMA, stage log, checkpoints, resume."""

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

from .checkpoint import AveragedWeights, load_state, save_state
from .config import StageConfig
from .muon import Muon

logger = logging.getLogger(__name__)

AGREE_ON_WEIGHTS_EVERY = 500  # steps; processes compute the same update, this removes what rounding could leave


@dataclass(frozen=True)
class LogEntry:
    """One line of the stage log."""

    stage: str
    step: int
    progress: float  # share of the stage, [0, 1]
    seconds: float  # of training in this stage, all legs
    clips_per_second: float  # all processes
    memory_gib: float  # peak of this process
    learning_rate: float  # factor in [0, 1]
    losses: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StageResult:
    """How a leg ended."""

    step: int
    seconds: float
    finished: bool
    ema: AveragedWeights


def run_stage(
    name: str,
    folder: Path,
    config: StageConfig,
    accelerator: Accelerator,
    modules: Mapping[str, nn.Module],
    hidden: list[nn.Parameter],
    other: list[nn.Parameter],
    compute_loss: Callable[[int, float], tuple[dict[str, torch.Tensor], int]],
    *,
    max_seconds: float | None = None,
    resume: bool = False,
    report: Callable[[LogEntry], None] | None = None,
) -> StageResult:
    """Train until the stage or the leg is over and leave a complete checkpoint.

    Every random choice of a step must derive from the step's number, so that a resumed run repeats an uninterrupted one.

    Args:
        name: Stage name for the log.
        folder: Gets `state.pt` and `log.jsonl`.
        config: Schedule and optimiser settings.
        accelerator: Gives device and processes.
        modules: What is trained, by name.
        hidden: Parameters for Muon.
        other: Parameters for AdamW.
        compute_loss: Takes step and progress; returns the losses, among them "loss", and the number of clips it used.
        max_seconds: End of this leg, in seconds from now.
        resume: Go on from the folder's checkpoint if there is one; otherwise start anew.
        report: Gets every log entry (main process only).
    """
    started = time.monotonic()
    device = accelerator.device
    fused = device.type == "cuda"
    muon = Muon(hidden, lr=config.muon_lr, weight_decay=config.weight_decay)
    adam = torch.optim.AdamW(other, lr=config.adam_lr, betas=(0.9, 0.98), weight_decay=0.0, fused=fused)
    optimizers: dict[str, torch.optim.Optimizer] = {"muon": muon, "adam": adam}
    peaks = {"muon": config.muon_lr, "adam": config.adam_lr}
    ema = AveragedWeights(modules, config.ema_decay)
    step, before = 0, 0.0
    state = load_state(folder, device) if resume else None
    if state is not None:
        step, before = state["step"], state["seconds"]
        for key, module in modules.items():
            module.load_state_dict(state["modules"][key])
        for key, optimizer in optimizers.items():
            optimizer.load_state_dict(state["optimizers"][key])
        ema.load_state_dict(state["ema"])
        logger.info("%s: resumed at step %d, %.0f s", name, step, before)
    parameters = [*hidden, *other]
    _share_weights(parameters, accelerator)

    def save(elapsed: float) -> None:
        if accelerator.is_main_process:
            save_state(
                folder,
                {
                    "stage": name,
                    "step": step,
                    "seconds": elapsed,
                    "modules": {key: module.state_dict() for key, module in modules.items()},
                    "optimizers": {key: optimizer.state_dict() for key, optimizer in optimizers.items()},
                    "ema": ema.state_dict(),
                },
            )

    elapsed, leg, last_save = before, 0.0, 0.0
    clips, clips_since = 0, time.monotonic()
    finished = _progress(config, step, elapsed) >= 1
    while not finished and (max_seconds is None or leg < max_seconds):
        progress = _progress(config, step, elapsed)
        factor = config.learning_rate_factor(progress)
        for key, optimizer in optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = peaks[key] * factor
        losses, count = compute_loss(step, progress)
        losses["loss"].backward()
        _average_gradients(parameters, accelerator)
        losses["gradient_norm"] = nn.utils.clip_grad_norm_(parameters, config.clip_norm)
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        ema.update()
        step += 1
        clips += count * accelerator.num_processes
        if step % AGREE_ON_WEIGHTS_EVERY == 0:
            _share_weights(parameters, accelerator)
        if step % config.log_every == 0 or config.steps == step:
            values = {key: float(value.detach()) for key, value in losses.items()}  # waits for the device
            if not math.isfinite(values["loss"]):
                raise FloatingPointError(f"the loss of {name} at step {step} must be finite, got {values['loss']}")
            leg = _agree(time.monotonic() - started, accelerator)
            elapsed = before + leg
            now = time.monotonic()
            memory = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
            entry = LogEntry(
                name,
                step,
                _progress(config, step, elapsed),
                elapsed,
                clips / (now - clips_since),
                memory,
                factor,
                values,
            )
            clips, clips_since = 0, now
            if accelerator.is_main_process:
                _append(folder / "log.jsonl", asdict(entry))
                if report is not None:
                    report(entry)
            if leg - last_save > config.save_every:
                last_save = leg
                save(elapsed)
        finished = _progress(config, step, elapsed) >= 1
    elapsed = before + _agree(time.monotonic() - started, accelerator)
    save(elapsed)
    return StageResult(step, elapsed, finished, ema)


@contextmanager
def many_shapes() -> Iterator[None]:
    """Let the compiler keep one graph for each layer shape and clip size; its default limit falls back to eager after 8."""
    import torch._dynamo

    with torch._dynamo.config.patch(recompile_limit=64, accumulated_recompile_limit=512):
        yield


def _progress(config: StageConfig, step: int, seconds: float) -> float:
    if config.steps is not None:
        return min(1.0, step / config.steps)
    return min(1.0, seconds / config.seconds)


def _agree(seconds: float, accelerator: Accelerator) -> float:
    """The main process's clock, so that all processes take the same decisions."""
    if accelerator.num_processes == 1:
        return seconds
    value = torch.tensor([seconds], device=accelerator.device, dtype=torch.float64)
    torch.distributed.broadcast(value, src=0)
    return float(value)


def _average_gradients(parameters: list[nn.Parameter], accelerator: Accelerator) -> None:
    # the networks are small: one reduction of all gradients after the backward pass costs about a millisecond
    if accelerator.num_processes == 1:
        return
    gradients: list[Any] = [parameter.grad for parameter in parameters]
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
    torch._foreach_copy_(
        parameters, [part.view_as(parameter) for part, parameter in zip(parts, parameters, strict=True)]
    )


def _append(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(value) + "\n")
