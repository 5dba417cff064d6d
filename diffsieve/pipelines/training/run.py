"""A whole mini-wan run: stages in order, each in legs, then export, measurement and model card.

Layout of a run's folder: `vae/` and `dit/` (state.pt, log.jsonl, weights-*.safetensors), `model/` (the exported pipeline),
`quality.json`, `sheet.png`.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from diffsieve.errors import DiffsieveError, UserInputError

from .checkpoint import write_atomically, write_json
from .config import EvaluationConfig, TrainConfig
from .loop import LogEntry
from .sprites import Sprites, load_sprites

if TYPE_CHECKING:
    from diffusers import WanPipeline

logger = logging.getLogger(__name__)

STAGES = ("vae", "dit", "all", "finish")


def train_mini_wan(
    out: Path,
    sprites_path: Path,
    config: TrainConfig,
    *,
    stage: str = "all",
    max_seconds: float | None = None,
    resume: bool = False,
    start_from: Path | None = None,
    measured: bool = True,
    report: Callable[[LogEntry], None] | None = None,
) -> dict[str, Any]:
    """Train one stage or all of them.

    Args:
        out: Folder of the run.
        sprites_path: File of `diffsieve data sprites`.
        config: Settings; a resumed run takes those of its first leg.
        stage: "vae", "dit", "finish" (export and measure) or "all" (the three in order).
        max_seconds: Length of this leg; a later call with `resume` goes on. Not for "finish".
        resume: Continue from the checkpoints in `out`.
        start_from: Folder of averaged weights that the "dit" stage begins with.
        measured: Measure the autoencoder at the end of its stage. "all" needs it to decide whether to go on.
        report: Gets every log entry.

    Returns:
        What was reached: "stage", "step", "seconds", "finished" and, where measured, "quality".

    Raises:
        UserInputError: For a wrong stage or a missing file.
    """
    from accelerate import Accelerator

    if stage not in STAGES:
        raise UserInputError(f"stage must be one of {', '.join(STAGES)}, got {stage!r}")
    sprites = load_sprites(sprites_path)
    config = _settings(out, config, resume)
    accelerator = Accelerator(mixed_precision="bf16" if torch.cuda.is_available() else "no")
    if accelerator.device.type == "cuda":
        torch.cuda.set_device(accelerator.device)
        torch.backends.cudnn.benchmark = True
    summary: dict[str, Any] = {"stage": stage}
    started = time.monotonic()
    if stage in ("vae", "all"):
        from .vae_stage import train_vae

        result = train_vae(
            config, sprites, out / "vae", accelerator, max_seconds=max_seconds, resume=resume, report=report
        )
        summary.update(step=result.step, seconds=result.seconds, finished=result.finished)
        if accelerator.is_main_process and (measured or stage == "all"):
            summary["vae_quality"] = _measure_vae(out, sprites, config, accelerator.device)
        accelerator.wait_for_everyone()
        if not result.finished or stage == "vae":
            return summary
        ceiling = json.loads((out / "vae" / "quality.json").read_text(encoding="utf-8"))["reconstruction_subject"]
        if ceiling < config.vae.min_ceiling:
            raise DiffsieveError(
                f"the autoencoder must let the judge see at least {config.vae.min_ceiling:.0%} of the subjects, got "
                f"{ceiling:.1%}; train it longer"
            )
    if stage in ("dit", "all"):
        from .dit_stage import train_dit

        result = train_dit(
            config,
            sprites,
            out / "dit",
            out / "vae",
            accelerator,
            max_seconds=None if max_seconds is None else max_seconds - (time.monotonic() - started),
            resume=resume,
            start_from=start_from,
            report=report,
        )
        summary.update(step=result.step, seconds=result.seconds, finished=result.finished)
    if accelerator.is_main_process:
        summary["quality"] = finish(out, sprites, config, accelerator.device)
    accelerator.wait_for_everyone()
    return summary


def _settings(out: Path, config: TrainConfig, resume: bool) -> TrainConfig:
    path = out / "settings.json"
    if resume and path.is_file():
        return TrainConfig.from_dict(json.loads(path.read_text(encoding="utf-8")))
    write_json(path, config.to_dict())
    return config


def _measure_vae(out: Path, sprites: Sprites, config: TrainConfig, device: torch.device) -> dict[str, Any]:
    from .evaluate import evaluate_vae
    from .sheets import contact_sheet
    from .vae_stage import load_vae

    vae = load_vae(config, out / "vae").to(device)
    figures, pairs, specs = evaluate_vae(vae, sprites, config.evaluation)
    write_json(out / "vae" / "quality.json", figures)
    captions = [text for text in specs.captions()[: len(pairs) // 2] for text in (text, "  reconstruction")]
    sheet = contact_sheet(pairs * 2 - 1, captions)
    write_atomically(out / "vae" / "sheet.png", lambda path: sheet.save(path, format="PNG"))
    return figures


def load_trained(folder: Path, device: torch.device) -> WanPipeline:
    """An exported pipeline for measurement: transformer in bfloat16 on a GPU, float32 on the CPU; decoder in float32."""
    from diffusers import WanPipeline

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    pipe = WanPipeline.from_pretrained(folder, torch_dtype={"vae": torch.float32, "default": dtype})
    return pipe.to(device)


def finish(out: Path, sprites: Sprites, config: TrainConfig, device: torch.device) -> dict[str, Any]:
    """Export the averaged weights of both stages to `out/model`, measure them, write figures, contact sheet and card."""
    from .captions import build_tokenizer
    from .dit_stage import load_networks
    from .evaluate import assemble
    from .export import export_pipeline
    from .vae_stage import load_vae

    vae = load_vae(config, out / "vae")
    transformer, text_encoder = load_networks(config, out / "dit", len(build_tokenizer(sprites.names)))
    pipe = assemble(config.model, sprites, vae, transformer, text_encoder)
    size = export_pipeline(pipe, out / "model", card="")
    logger.info("exported %.1f MB", size / 1e6)
    return measure(out, sprites, config.evaluation, device)


def measure(out: Path, sprites: Sprites, config: EvaluationConfig, device: torch.device) -> dict[str, Any]:
    """Measure `out/model` and write `quality.json`, `sheet.png` and the model card."""
    from .evaluate import evaluate_pipeline
    from .export import model_card
    from .sheets import contact_sheet

    figures, clips, specs = evaluate_pipeline(load_trained(out / "model", device), sprites, config)
    write_json(out / "quality.json", figures)
    sheet = contact_sheet(clips * 2 - 1, specs.captions()[: len(clips)])
    write_atomically(out / "sheet.png", lambda path: sheet.save(path, format="PNG"))
    vae_path = out / "vae" / "quality.json"
    if vae_path.is_file():
        card = model_card(figures, json.loads(vae_path.read_text(encoding="utf-8")), training_summary(out))
        write_atomically(out / "model" / "README.md", lambda path: path.write_text(card, encoding="utf-8"))
    return figures


def training_summary(out: Path) -> dict[str, Any]:
    """Rows of the model card's training table, from the stage logs."""
    rows: dict[str, Any] = {}
    for stage, title in (("vae", "autoencoder"), ("dit", "transformer and text encoder")):
        log = out / stage / "log.jsonl"
        if log.is_file():
            last = json.loads(log.read_text(encoding="utf-8").splitlines()[-1])
            rows[f"{title}: steps"] = last["step"]
            rows[f"{title}: seconds"] = round(last["seconds"])
    return rows


def with_evaluation(config: TrainConfig, **changes: Any) -> TrainConfig:
    """The same settings with other evaluation fields."""
    return dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, **changes))
