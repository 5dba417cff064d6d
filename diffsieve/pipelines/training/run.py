"""A whole mini-wan run: stages in order, each in legs, then export, measurement and model card.

Layout of a run's folder: `vae/`, `decoder/` and `dit/` (state.pt, log.jsonl, weights.json, weights-*.safetensors,
samples/), `start/` (weights that the run began with), `model/` (the exported pipeline), `settings.json`,
`quality.json`, `sheet.png`.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...errors import DiffsieveError, UserInputError
from .accelerating import fast_arithmetic, make_accelerator
from .checkpoint import STATE_FILE, copy_file, has_weights, write_atomically, write_json
from .config import TrainConfig
from .history import SETTINGS_FILE, START_FILE, read_settings, run_legs
from .loop import Leg, LogEntry, StageResult, clock
from .sprites import Sprites, load_sprites

if TYPE_CHECKING:
    from accelerate import Accelerator
    from diffusers import WanPipeline

logger = logging.getLogger(__name__)

# what each choice of `stage` does, in order
PLANS = {
    "all": ("vae", "dit", "finish"),
    "continue": ("decoder", "dit", "finish"),
    "vae": ("vae",),
    "decoder": ("decoder",),
    "dit": ("dit", "finish"),
    "finish": ("finish",),
}


def train_mini_wan(
    out: Path,
    sprites_path: Path,
    config: TrainConfig | None = None,
    *,
    stage: str = "all",
    max_seconds: float | None = None,
    pause: bool = False,
    resume: bool = False,
    start_from: Path | None = None,
    copy_to: Path | None = None,
    report: Callable[[LogEntry], None] | None = None,
    announce: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Train one stage or several.

    Args:
        out: Folder of the run.
        sprites_path: File of `diffsieve data sprites`.
        config: Settings; None = those of the run in `out` when it is resumed, else the defaults. "finish" takes those
            of the run, with this evaluation.
        stage: A key of `PLANS`. "dit" exports and measures too, "vae" and "decoder" measure the autoencoder.
        max_seconds: Length of this leg, export and measurement included. The schedules of the stages that start in it
            are fitted to it: they share the time in the ratio of their `seconds`.
        pause: Keep the schedules of the settings, and stop after `max_seconds`; a later leg goes on with `resume`.
        resume: Continue from the checkpoints in `out`, with their schedules; without any a run begins, with a warning.
        start_from: Trained weights to begin with: an exported pipeline, the folder of a run, or of a stage.
        copy_to: Folder that gets the averaged weights, logs and results, without the large training states.
        report: Gets every log entry (main process only).
        announce: Gets the name of each part of the plan when it begins (main process only).

    Returns:
        "main_process" (is this it), "stage", "out", "finished" (False when a leg paused), for each trained stage
        "step", "seconds" and "finished", and where measured "vae_quality" and "quality".

    Raises:
        UserInputError: For a wrong argument, a missing file, or an `out` that holds a run which is not resumed.
        DiffsieveError: When the loss is not finite, or the autoencoder is too poor to go on.
    """
    if stage not in PLANS:
        raise UserInputError(f"stage must be one of {', '.join(PLANS)}, got {stage!r}")
    if max_seconds is not None and max_seconds <= 0:
        raise UserInputError(f"max_seconds must be positive, got {max_seconds}")
    if pause and max_seconds is None:
        raise UserInputError("pause needs max_seconds, got None")
    sprites = load_sprites(sprites_path)
    plan = PLANS[stage]
    config = _settings(out, config, plan, resume)
    accelerator = make_accelerator()
    deadline = None
    if max_seconds is not None:
        reserve = config.reserve_seconds if "finish" in plan and not pause else 0.0
        deadline = clock(accelerator) + max_seconds - reserve
    if accelerator.is_main_process:
        if resume and plan != ("finish",) and not any((out / name / STATE_FILE).is_file() for name in plan):
            logger.warning("%s holds no checkpoint to go on from, so a new run begins there", out)
        if start_from is not None and not (resume and (out / START_FILE).is_file()):
            from .start import take_over

            take_over(start_from, out, sprites)
        if stage != "finish":
            write_json(out / SETTINGS_FILE, config.to_dict())
        if copy_to is not None:
            copy_results(out, copy_to)
    accelerator.wait_for_everyone()
    main = accelerator.is_main_process
    summary: dict[str, Any] = {"main_process": main, "stage": stage, "out": str(out), "finished": True}
    with fast_arithmetic(accelerator.device):
        for i, name in enumerate(plan):
            if announce is not None and accelerator.is_main_process:
                announce(name)
            if name == "finish":
                if accelerator.is_main_process:
                    summary.update(finish(out, sprites, config, accelerator.device))
            else:
                leg = Leg(deadline, None if pause else _share(config, plan[i:]), resume, report, copy_to)
                result = _train(name, out, sprites, config, accelerator, leg)
                summary[name] = {"step": result.step, "seconds": result.seconds, "finished": result.finished}
                if result.finished and name != "dit" and accelerator.is_main_process:
                    summary["vae_quality"] = measure_vae(out / name, sprites, config, accelerator.device)
                accelerator.wait_for_everyone()
                if not result.finished:
                    summary["finished"] = False
                    break
                if name == "vae" and "dit" in plan:
                    _require_ceiling(out / name, config)
            if copy_to is not None and accelerator.is_main_process:
                copy_results(out, copy_to)
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return summary


def _settings(out: Path, config: TrainConfig | None, plan: tuple[str, ...], resume: bool) -> TrainConfig:
    saved = read_settings(out) if (out / SETTINGS_FILE).is_file() else None
    if not resume:
        used = [name for name in plan if (out / name / STATE_FILE).is_file()]
        if used:
            raise UserInputError(f"out must not hold a run of {', '.join(used)} unless it is resumed, got {out}")
    elif saved is not None and config is not None and saved != config:
        raise UserInputError(f"settings must be left out or equal {out / SETTINGS_FILE} when a run is resumed")
    if plan == ("finish",):
        if saved is None:
            raise UserInputError(f"out must hold a trained run, got {out} without {SETTINGS_FILE}")
        # the networks are there already: all that can change is how they are measured
        return saved if config is None else dataclasses.replace(saved, evaluation=config.evaluation)
    if config is None:
        return saved if saved is not None and resume else TrainConfig()
    return config


def _share(config: TrainConfig, parts: tuple[str, ...]) -> float:
    """Share of the first of the parts in the time of all of them."""
    seconds = [getattr(config, part).seconds for part in parts if part != "finish"]
    return float(seconds[0] / sum(seconds))


def _train(
    name: str, out: Path, sprites: Sprites, config: TrainConfig, accelerator: Accelerator, leg: Leg
) -> StageResult:
    if name == "dit":
        from .dit_stage import train_dit
        from .start import NETWORKS_FOLDER

        started = out / NETWORKS_FOLDER if has_weights(out / NETWORKS_FOLDER) else None
        return train_dit(config, sprites, out / "dit", out / "vae", accelerator, leg, start_from=started)
    from .vae_stage import train_vae

    decoder_of = out / "vae" if name == "decoder" else None
    return train_vae(config, sprites, out / name, accelerator, leg, decoder_of=decoder_of)


def _require_ceiling(folder: Path, config: TrainConfig) -> None:
    ceiling = json.loads((folder / "quality.json").read_text(encoding="utf-8"))["reconstruction_subject"]
    if ceiling < config.vae.min_ceiling:
        raise DiffsieveError(
            f"the autoencoder must let the judge see at least {config.vae.min_ceiling:.0%} of the subjects, got "
            f"{ceiling:.1%}; train it longer"
        )


def measure_vae(folder: Path, sprites: Sprites, config: TrainConfig, device: torch.device) -> dict[str, Any]:
    """Measure the autoencoder of a stage folder; writes `quality.json` and `sheet.png` there."""
    from .evaluate import evaluate_vae
    from .sheets import contact_sheet
    from .vae_stage import load_vae

    figures, pairs, specs = evaluate_vae(load_vae(config, folder).to(device), sprites, config.evaluation)
    captions = [line for text in specs.captions()[: len(pairs) // 2] for line in (text, "  reconstruction")]
    sheet = contact_sheet(pairs * 2 - 1, captions)
    write_atomically(folder / "sheet.png", lambda path: sheet.save(path, format="PNG"))
    write_json(folder / "quality.json", figures)
    return figures


def load_trained(folder: Path, device: torch.device) -> WanPipeline:
    """An exported pipeline for measurement: decoder in float32, the rest in bfloat16 on a GPU and float32 on a CPU."""
    from diffusers import WanPipeline

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    pipe = WanPipeline.from_pretrained(folder, dtype={"vae": torch.float32, "default": dtype})
    return pipe.to(device)


def export_run(out: Path, sprites: Sprites, config: TrainConfig, folder: Path) -> Path:
    """Write the averaged weights of a run as a pipeline to `folder`; returns the folder of its autoencoder's stage."""
    from .captions import build_tokenizer
    from .dit_stage import load_networks
    from .evaluate import assemble
    from .export import export_pipeline
    from .start import NETWORKS_FOLDER
    from .vae_stage import load_vae

    vae_folder = out / ("decoder" if has_weights(out / "decoder") else "vae")
    networks_folder = out / ("dit" if has_weights(out / "dit") else NETWORKS_FOLDER)
    vae = load_vae(config, vae_folder)
    networks = load_networks(config, networks_folder, len(build_tokenizer(sprites.names)))
    size = export_pipeline(assemble(config.model, sprites, vae, *networks), folder)
    logger.info("exported %.1f MB", size / 1e6)
    return vae_folder


def finish(out: Path, sprites: Sprites, config: TrainConfig, device: torch.device) -> dict[str, Any]:
    """Export the averaged weights to `out/model`, measure them, write figures, contact sheet and model card.

    Returns:
        "quality" and "vae_quality".
    """
    from .evaluate import evaluate_pipeline
    from .export import describe
    from .sheets import contact_sheet

    vae_folder = export_run(out, sprites, config, out / "model")
    figures, clips, specs = evaluate_pipeline(load_trained(out / "model", device), sprites, config.evaluation)
    write_json(out / "quality.json", figures)
    sheet = contact_sheet(clips * 2 - 1, specs.captions()[: len(clips)])
    write_atomically(out / "sheet.png", lambda path: sheet.save(path, format="PNG"))
    vae_path = vae_folder / "quality.json"
    if not vae_path.is_file():
        measure_vae(vae_folder, sprites, config, device)
    vae_figures = json.loads(vae_path.read_text(encoding="utf-8"))
    describe(out / "model", {"legs": run_legs(out), "quality": figures, "vae_quality": vae_figures})
    return {"quality": figures, "vae_quality": vae_figures}


def copy_results(out: Path, folder: Path) -> None:
    """Copy the small files of a run: settings, figures, sheets, model card."""
    names = [SETTINGS_FILE, START_FILE, "quality.json", "sheet.png", "model/training.json", "model/README.md"]
    names += [f"{stage}/{file}" for stage in ("vae", "decoder") for file in ("quality.json", "sheet.png")]
    for name in names:
        if (out / name).is_file():
            copy_file(out / name, folder / name)
