"""A small prompt suite, a tiny pipeline, and the stand-in for the package vbench."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diffsieve.vbench import VBenchConfig
from tests.tiny import wan_pipeline

ENTRIES = [
    {"prompt_en": "a cat moves left", "dimension": ["subject_consistency", "temporal_flickering"]},
    {"prompt_en": "a dog, in Petra's façades.", "dimension": ["temporal_flickering"]},
    {
        "prompt_en": "a red cat",
        "dimension": ["color"],
        "auxiliary_info": {"color": {"color": "red"}},
    },
    {"prompt_en": "a cat moves left", "dimension": ["motion_smoothness"]},
]


@pytest.fixture
def full_info(tmp_path: Path) -> Path:
    path = tmp_path / "VBench_full_info.json"
    path.write_text(json.dumps(ENTRIES), encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def stand_in(monkeypatch, tmp_path, no_weights):
    """Other interpreters find the stand-in; its metadata gives it a version. Weights are hidden."""
    place = Path(__file__).parent / "stand_in"
    info = tmp_path / "site" / "vbench-0.1.5.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vbench\nVersion: 0.1.5\n")
    monkeypatch.setenv("PYTHONPATH", f"{place}:{info.parent}")


@pytest.fixture
def pipe() -> Any:
    return wan_pipeline()


@pytest.fixture
def config(tmp_path: Path, full_info: Path) -> Callable[..., VBenchConfig]:
    def make(**changes: Any) -> VBenchConfig:
        values: dict[str, Any] = {
            "full_info": full_info,
            "videos": 2,
            "frames": 9,
            "height": 16,
            "width": 32,
            "steps": 3,
            "guidance_scale": 1.0,
            "max_sequence_length": 16,
            "out": tmp_path / "out",
        }
        if changes.get("method") != "dense":
            values |= {"warmup": 1, "block_size": 8, "min_tokens": 0}
        return VBenchConfig(**values | changes)

    return make
