"""A small training run that saves at every step, and what the tests of full disks ask about its folder."""

import json

import torch

from diffsieve.pipelines.training.checkpoint import load_state, load_weights
from diffsieve.pipelines.training.pixel_dit.config import PixelTrainConfig

STEPS = 5
BROKEN_AT = 3


def settings():
    return PixelTrainConfig.from_dict(
        {
            "model": {"layers": 1, "heads": 1, "head_dim": 16, "block_size": 8, "topk": 2},
            "dit": {
                "steps": STEPS,
                "phases": [{"side": 8, "batch_size": 2}],
                "compile": False,
                "log_every": 1,
                "save_every": 1e-9,
            },
            "sampling": {"images": 2, "steps": 1},
        }
    )


def losses(out):
    lines = [json.loads(line) for line in (out / "dit" / "log.jsonl").read_text().splitlines()]
    return [[line["step"], line["losses"]["loss"]] for line in lines]


def steps_on_disk(out):
    """Steps of the state and of the averaged weights; both are read whole."""
    state = load_state(out / "dit", torch.device("cpu"))
    assert load_weights(out / "dit")
    return [state["step"], json.loads((out / "dit" / "weights.json").read_text())["step"]]


def left_over(out):
    """Names of files that belong to no complete save."""
    kept = {"state.pt", "log.jsonl", "data.json", "weights.json", "settings.json"}
    kept |= set(json.loads((out / "dit" / "weights.json").read_text())["files"])
    return sorted(path.name for path in out.rglob("*") if path.name not in kept and not path.is_dir())
