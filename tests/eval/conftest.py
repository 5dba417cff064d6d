"""Clips that are cheap to make."""

import pytest
import torch


@pytest.fixture
def clip_pair(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Seven frames of 40 x 36 in uint8, and a noisy copy."""
    reference = torch.randint(0, 256, (7, 3, 40, 36), generator=generator, dtype=torch.uint8)
    noise = torch.randint(-20, 21, reference.shape, generator=generator)
    return reference, (reference + noise).clamp(0, 255).to(torch.uint8)
