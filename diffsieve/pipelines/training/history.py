"""Which legs of training a run's weights went through, for the model card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .config import ClipStageConfig, TrainConfig
from .loop import LOG_FILE

SETTINGS_FILE = "settings.json"
START_FILE = "start.json"
TRAINING_STAGES = ("vae", "decoder", "dit")


def read_settings(out: Path) -> TrainConfig:
    """The settings that a run was started with."""
    return TrainConfig.from_dict(json.loads((out / SETTINGS_FILE).read_text(encoding="utf-8")))


def run_legs(out: Path) -> list[dict[str, Any]]:
    """The legs that a run started from and its own, oldest first; see `model_card` for what a leg holds."""
    legs: list[dict[str, Any]] = []
    if (out / START_FILE).is_file():
        legs += json.loads((out / START_FILE).read_text(encoding="utf-8"))["legs"]
    config = read_settings(out)
    for name in TRAINING_STAGES:
        log = out / name / LOG_FILE
        lines = log.read_text(encoding="utf-8").splitlines() if log.is_file() else []
        if lines:
            last = json.loads(lines[-1])
            stage: ClipStageConfig = getattr(config, name)
            legs.append(
                {
                    "stage": name,
                    "steps": last["step"],
                    "seconds": round(last["seconds"]),
                    "processes": last["processes"],
                    "sizes": [list(size) for size in stage.sizes(last["progress"])],
                }
            )
    return legs
