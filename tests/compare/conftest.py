"""A tiny Wan pipeline with random weights, and the smallest comparison that still has every part."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diffsieve.compare import CompareConfig
from tests.tiny import wan_pipeline

# 9 frames of 16 x 32 are 24 tokens: 5 blocks of 5, the last one short.
SMALL = {
    "frames": 9,
    "height": 16,
    "width": 32,
    "steps": 4,
    "warmup": 1,
    "block_size": 5,
    "min_tokens": 0,
    "guidance_scale": 1.0,
    "max_sequence_length": 16,
    "prompt": ("a cat moves left",),
}


@pytest.fixture
def pipe() -> Any:
    return wan_pipeline()


@pytest.fixture
def small(tmp_path: Path) -> Callable[..., CompareConfig]:
    """Make a small configuration that writes to `tmp_path / "out"`, with changes."""
    config = CompareConfig(**SMALL, out=tmp_path / "out")
    return lambda **changes: dataclasses.replace(config, **changes)
