"""A whole pixel DiT run: pictures, training in legs, export, contact sheet.

Layout of a run's folder: `dit/` (state.pt, log.jsonl, data.json, weights.json, weights-*.safetensors, samples/),
`start/` (weights that the run began with), `model/` (the exported pipeline), `settings.json`, `sheet.png`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from ....errors import UserInputError
from ...pixel_dit import PixelDiTPipeline
from ..accelerating import fast_arithmetic, make_accelerator
from ..checkpoint import (
    STATE_FILE,
    copy_file,
    copy_weights,
    has_weights,
    load_weights,
    save_weights,
    write_atomically,
    write_json,
)
from ..loop import LOG_FILE, Leg, LogEntry, clock
from .config import PixelTrainConfig
from .export import export_pipeline, training_legs
from .images import load_images
from .sampling import build_pipeline, contact_sheet, generate
from .stage import DATA_FILE, load_transformer, train_transformer

logger = logging.getLogger(__name__)

SETTINGS_FILE = "settings.json"
START_FILE = "start.json"
START_FOLDER = "start"
SHEET_FILE = "sheet.png"


def train_pixel_dit(
    out: Path,
    data: Path,
    config: PixelTrainConfig | None = None,
    *,
    max_seconds: float | None = None,
    pause: bool = False,
    resume: bool = False,
    start_from: Path | None = None,
    copy_to: Path | None = None,
    report: Callable[[LogEntry], None] | None = None,
    announce: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Train a pixel DiT on a set of pictures, export it and draw a contact sheet.

    Args:
        out: folder of the run.
        data: pictures; see `load_images`.
        config: settings; None = those of the run in `out` when it is resumed, else the defaults.
        max_seconds: length of this leg, reading the pictures and export included. The schedule of a run that starts in
            it is fitted to it.
        pause: keep the schedule of the settings, and stop after `max_seconds`; a later leg goes on with `resume`.
        resume: continue from the checkpoint in `out`, with its schedule; without one a run begins, with a warning.
        start_from: weights to begin with: an exported pipeline, the folder of a run, or of its stage. They may come
            from other picture sizes and another attention method.
        copy_to: folder that gets averaged weights, log and results, without the large training state.
        report: gets every log entry (main process only).
        announce: gets the name of each part when it begins (main process only).

    Returns:
        "finished", "step", "seconds", "skipped", and, once finished, "model" with "bytes".

    Raises:
        UserInputError: an argument, the pictures or the weights to start from cannot be used.
        DiffsieveError: the loss is not finite; the last save stays.
    """
    if max_seconds is not None and max_seconds <= 0:
        raise UserInputError(f"max_seconds must be positive, got {max_seconds}")
    if pause and max_seconds is None:
        raise UserInputError("pause needs max_seconds, got None")
    config = _settings(out, config, resume)
    accelerator = make_accelerator()
    begun = clock(accelerator)
    main = accelerator.is_main_process
    if main and announce is not None:
        announce("data")
    images = load_images(data, config.dit.side)
    if images.skipped and main:
        logger.warning("%s", images.describe_skipped())
    continued = resume and (out / "dit" / STATE_FILE).is_file()
    if main and resume and not continued:
        logger.warning("%s holds no checkpoint to go on from, so a new run begins there", out)
    if main:
        if start_from is not None and not continued:
            _take_over(start_from, out)
        elif not resume:
            (out / START_FILE).unlink(missing_ok=True)  # of a run that ended before its first save
        write_json(out / SETTINGS_FILE, config.to_dict())
        if copy_to is not None:
            copy_results(out, copy_to)
    accelerator.wait_for_everyone()
    deadline = None
    if max_seconds is not None:
        deadline = begun + max_seconds - (0.0 if pause else config.reserve_seconds)
    leg = Leg(deadline, None if pause else 1.0, resume, report, copy_to)
    summary: dict[str, Any] = {
        "main_process": main,
        "out": str(out),
        "pictures": len(images),
        "classes": list(images.classes),
        "skipped": [list(item) for item in images.skipped],
    }
    if main and announce is not None:
        announce("dit")
    with fast_arithmetic(accelerator.device):
        # its folder says whether a run began with weights of another: the call that resumes need not say it again
        begins = (out / START_FILE).is_file() and not continued
        start = load_weights(out / START_FOLDER) if begins else None
        result = train_transformer(config, images, out / "dit", accelerator, leg, start_from=start)
        summary |= {"step": result.step, "seconds": result.seconds, "finished": result.finished}
        if main and result.finished:
            if announce is not None:
                announce("finish")
            summary |= finish(out, images.classes, config, accelerator.device)
    if main and copy_to is not None:
        copy_results(out, copy_to)
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return summary


def finish(out: Path, classes: tuple[str, ...], config: PixelTrainConfig, device: torch.device) -> dict[str, Any]:
    """Export the averaged weights of a run to `out/model` and draw the contact sheet from there.

    Returns:
        "model", "bytes", "parameters".
    """
    transformer = load_transformer(config, out / "dit", len(classes))
    parameters = sum(parameter.numel() for parameter in transformer.parameters())
    data = json.loads((out / "dit" / DATA_FILE).read_text(encoding="utf-8"))
    training = {
        "parameters": parameters,
        "side": config.dit.side,
        "classes": list(classes),
        "pictures": data["pictures"],
        "attention": config.model.attention_method,
        "sampling": config.to_dict()["sampling"],
        "data_note": config.data_note,
        "legs": _legs(out),
    }
    size = export_pipeline(build_pipeline(transformer, classes, config.sampling), out / "model", training)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    pipe = PixelDiTPipeline.from_pretrained(out / "model", dtype=dtype).to(device)
    pictures, labels = generate(pipe, config.sampling)
    sheet = contact_sheet(pictures, labels, classes)
    write_atomically(out / SHEET_FILE, lambda path: sheet.save(path, format="PNG"))
    return {"model": str(out / "model"), "bytes": size, "parameters": parameters}


def copy_results(out: Path, folder: Path) -> None:
    """Copy the files of a run that are not the state: settings, contact sheet, model, log."""
    names = [SETTINGS_FILE, START_FILE, SHEET_FILE, f"dit/{DATA_FILE}", f"dit/{LOG_FILE}"]
    names += [path.relative_to(out).as_posix() for path in (out / "model").rglob("*") if path.is_file()]
    for name in names:
        if (out / name).is_file():
            copy_file(out / name, folder / name)
    if has_weights(out / "dit"):
        copy_weights(out / "dit", folder / "dit")


def _settings(out: Path, config: PixelTrainConfig | None, resume: bool) -> PixelTrainConfig:
    path = out / SETTINGS_FILE
    saved = PixelTrainConfig.from_dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None
    if not resume and (out / "dit" / STATE_FILE).is_file():
        raise UserInputError(f"out must not hold a run unless it is resumed, got {out}")
    if resume and saved is not None:
        if config is not None and config != saved:
            raise UserInputError(f"settings must be left out or equal {path} when a run is resumed")
        return saved
    return config or PixelTrainConfig()


def _take_over(start_from: Path, out: Path) -> None:
    """Copy weights to begin with to `out/start`, and the legs that they went through to `out/start.json`.

    That file is written last; where it exists, everything is there.
    """
    folder = start_from
    for candidate in (start_from / "dit", start_from / "model"):
        if has_weights(candidate) or (candidate / "model_index.json").is_file():
            folder = candidate
            break
    if has_weights(folder):
        tensors = {key.removeprefix("transformer."): value for key, value in load_weights(folder).items()}
        # a run keeps the history in its exported model, or one folder up
        legs = training_legs(folder.parent / "model") or _legs(folder.parent)
    elif (folder / "model_index.json").is_file():
        tensors = _pipeline_weights(folder)
        legs = training_legs(folder)
    else:
        raise UserInputError(
            f"start_from must be a pipeline folder (model_index.json), the folder of a run or its stage, got {folder}"
        )
    save_weights(out / START_FOLDER, tensors, 0)
    write_json(out / START_FILE, {"legs": legs})


def _pipeline_weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = sorted((folder / "transformer").glob("*.safetensors"))
    if not files:
        raise UserInputError(f"start_from must hold transformer/*.safetensors, got {folder}")
    tensors: dict[str, torch.Tensor] = {}
    try:
        for file in files:
            tensors.update(load_file(file))
    except (SafetensorError, OSError) as error:
        raise UserInputError(f"start_from must hold readable weights, got {folder}: {error}") from error
    return tensors


def _legs(out: Path) -> list[dict[str, Any]]:
    """The legs that a run began with and its own, oldest first."""
    path = out / START_FILE
    earlier: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["legs"] if path.is_file() else []
    return [*earlier, *_own_legs(out)]


def _own_legs(out: Path) -> list[dict[str, Any]]:
    """What this run did, from its log: one entry for each stretch with one picture size, batch and process count."""

    def stretch(line: dict[str, Any]) -> tuple[int, int, int]:
        return line["details"]["side"], line["details"]["batch_size"], line["processes"]

    path = out / "dit" / LOG_FILE
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
    legs: list[dict[str, Any]] = []
    step = seconds = 0
    for (side, batch_size, processes), within in groupby(lines, stretch):
        *_, last = within
        steps = last["step"] - step
        legs.append(
            {
                "side": side,
                "steps": steps,
                "images": steps * batch_size * processes,
                "seconds": round(last["seconds"] - seconds),
                "processes": processes,
            }
        )
        step, seconds = last["step"], last["seconds"]
    return legs
