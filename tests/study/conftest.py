"""A tiny Wan pipeline and the smallest study that still has every part."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diffsieve.study import CaptureConfig, StudyConfig
from tests.tiny import wan_pipeline

# 9 frames of 32 x 32 are 48 tokens: 3 blocks of 16.
SMALL = {
    "frames": 9,
    "height": 32,
    "width": 32,
    "steps": 5,
    "guidance_scale": 3.0,
    "max_sequence_length": 16,
    "prompt": ("a cat moves left",),
    "seed": (0,),
}


@pytest.fixture
def pipe() -> Any:
    return wan_pipeline()


@pytest.fixture(autouse=True)
def every_test_without_weights(no_weights):
    """A user's weights would add a metric."""


@pytest.fixture
def captures(tmp_path: Path) -> Callable[..., CaptureConfig]:
    config = CaptureConfig(**SMALL, out=tmp_path / "captures")
    return lambda **changes: dataclasses.replace(config, **changes)


@pytest.fixture
def study(tmp_path: Path) -> Callable[..., StudyConfig]:
    config = StudyConfig(**SMALL, block_size=16, sparsities=(0.34, 0.6), out=tmp_path / "study")
    return lambda **changes: dataclasses.replace(config, **changes)
