"""`diffsieve capture`: queries, keys and values of chosen layers and steps of a dense run, into files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ..compare import folder as folders
from ..compare.claim import claim_settings
from ..compare.clip import generate_clip
from ..compare.config import DENSE, RunConfig
from ..compare.files import remove_parts, write_json
from ..compare.prepare import prepare, resolve_place, transformer_of
from ..compare.recorded import spread
from ..compare.report import environment, now
from ..compare.shards import Deadline, Shard
from ..errors import UserInputError
from ..pipelines.loading import weights_digest
from ..processors.warmup import dense_steps
from .captured import DONE, Captured, write_captured

SETTINGS = "capture.settings.json"
SETTINGS_SCHEMA = "diffsieve.capture.settings/1"
CAPTURE_SCHEMA = "diffsieve.capture.clip/1"
_LAYERS, _LATER = 5, 3


@dataclass(frozen=True, kw_only=True)
class CaptureConfig(RunConfig):
    """What to capture; see `RunConfig` for the clip. The run is dense.

    Args:
        layers: numbers of the layers, negative ones from the end; empty: five, spread over the model.
        steps_kept: steps, from 0; empty: the last of the warm-up, in which BA-Att calibrates, and three after it.
        both_branches: also the branch of guidance that sees the negative prompt.
        warmup: dense steps that a sparse run would begin with, for the choice of steps.
    """

    _without_method: ClassVar[tuple[str, ...]] = (DENSE,)
    _dense_takes: ClassVar[tuple[str, ...]] = ("warmup",)

    method: str = DENSE
    warmup: int | float | None = 0.2
    layers: tuple[int, ...] = ()
    steps_kept: tuple[int, ...] = ()
    both_branches: bool = False
    out: Path = Path("outputs/capture")


def capture(
    config: CaptureConfig,
    *,
    pipe: Any | None = None,
    shard: Shard | None = None,
    deadline: Deadline | None = None,
    progress: Callable[[str], None] | None = None,
    command: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Run every prompt and seed dense and write the attention calls asked for.

    A folder for each clip; clips that are complete are not made again. A file holds 3 B H L D values: 41 MB for
    mini-wan at 17,600 tokens, 2.3 GB for Wan2.1-14B at 75,600 tokens, in bfloat16.

    Args:
        config: see `CaptureConfig`.
        pipe: a loaded text-to-video pipeline; default: load `config.model`.
        shard: the share of this process.
        deadline: ends the run between two clips.
        progress: told a line before each clip.
        command: the words of the command line, for the record.

    Returns:
        `{"out", "files", "clips", "missing"}`: files and clips that are there, and clips of this shard that are not.

    Raises:
        UserInputError: an argument is wrong, or the folder holds captures of other settings.
    """
    from ..processors import observe_attention

    shard, deadline = shard or Shard(), deadline or Deadline(None)
    config = resolve_place(config, pipe)
    folders.check_writable(config.out)
    ready = prepare(config, pipe=pipe, attention=None)
    config, pipe = ready.config, ready.pipe
    assert config.steps is not None
    layers = config.layers or tuple(spread(range(int(transformer_of(pipe).config.num_layers)), _LAYERS))
    steps = config.steps_kept or _telling_steps(config)
    if wrong := [step for step in steps if not 0 <= step < config.steps]:
        raise UserInputError(f"step must be from 0 to {config.steps - 1}, got {wrong[0]}")
    with observe_attention(pipe, lambda call: None, layers=layers, steps=steps):
        pass  # layers that the model does not have are refused before anything is written
    place = environment(pipe)
    settings = config.settings() | {
        "device": place["device"],  # shards run on other GPUs
        "layers": list(layers),
        "steps_kept": list(steps),
        "weights": weights_digest(pipe),
    }
    folders.make_output(config.out)
    claim_settings(config.out / SETTINGS, SETTINGS_SCHEMA, settings)
    items = [(i, prompt, seed) for i, prompt in enumerate(config.prompt) for seed in config.seed]
    missing = 0
    for index, prompt, seed in shard.of(items):
        folder = config.out / folders.item_name(index, prompt, seed)
        if _read_record(folder, prompt) is not None:
            continue
        if deadline.passed:
            missing += 1
            continue
        if progress is not None:
            progress(f"{folder.name}: {config.steps} steps")
        deadline.begin()
        files = _capture_clip(pipe, config, folder, prompt, seed, layers, steps)
        record = {
            "schema": CAPTURE_SCHEMA,
            "created": now(),
            "command": None if command is None else list(command),
            "settings": settings,
            "environment": place,
            "prompt": prompt,
            "seed": seed,
            "files": files,
        }
        write_json(folder / DONE, record)
        deadline.end()
    found = [_read_record(config.out / folders.item_name(*item), item[1]) for item in items]
    done = [record for record in found if record is not None]
    return {
        "out": str(config.out),
        "files": sum(len(record["files"]) for record in done),
        "clips": len(done),
        "missing": missing,
    }


def _capture_clip(
    pipe: Any,
    config: CaptureConfig,
    folder: Path,
    prompt: str,
    seed: int,
    layers: Sequence[int],
    steps: Sequence[int],
) -> list[str]:
    from ..processors import AttentionCall, observe_attention

    folder.mkdir(exist_ok=True)
    remove_parts(folder)
    files: list[str] = []

    def keep(call: AttentionCall) -> None:
        if call.call and not config.both_branches:
            return
        name = f"{call.layer}-step{call.step:03d}-call{call.call}.safetensors"
        values = {field.name: getattr(call, field.name) for field in dataclasses.fields(call)}
        scale = call.query.shape[-1] ** -0.5
        write_captured(folder / name, Captured(**values, model=config.model, prompt=prompt, seed=seed, scale=scale))
        files.append(name)

    with observe_attention(pipe, keep, layers=layers, steps=steps):
        generate_clip(pipe, config, prompt=prompt, seed=seed)
    if not files:
        raise UserInputError("the model made no self-attention call in the steps asked for")
    return files


def _read_record(folder: Path, prompt: str) -> dict[str, Any] | None:
    """Return what was written of a complete clip, else `None`; the name of its folder holds a part of the prompt."""
    if not (folder / DONE).is_file():
        return None
    try:
        record = json.loads((folder / DONE).read_text(encoding="utf-8"))
        complete, known = all((folder / name).is_file() for name in record["files"]), record["prompt"]
    except (ValueError, KeyError, TypeError):
        return None
    if known != prompt:
        raise UserInputError(f"prompt must be {known!r}, whose captures are in {folder}, got {prompt!r}")
    return record if complete else None


def _telling_steps(config: CaptureConfig) -> tuple[int, ...]:
    assert config.steps is not None
    assert config.warmup is not None
    first = min(dense_steps(config.warmup, config.steps), config.steps - 1)
    return tuple(dict.fromkeys([max(first - 1, 0), *spread(range(first, config.steps), _LATER)]))
