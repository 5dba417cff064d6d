"""A place without weights, whatever the machine holds, and clips that are cheap to make."""

from pathlib import Path

import pytest
import torch


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Point both weight caches at empty folders; returns the parent of `diffsieve` and `torch`."""
    home = tmp_path / "caches"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.setenv("TORCH_HOME", str(home / "torch"))
    return home


@pytest.fixture
def clip_pair(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Seven frames of 40 x 36 in uint8, and a noisy copy."""
    reference = torch.randint(0, 256, (7, 3, 40, 36), generator=generator, dtype=torch.uint8)
    noise = torch.randint(-20, 21, reference.shape, generator=generator)
    return reference, (reference + noise).clamp(0, 255).to(torch.uint8)
