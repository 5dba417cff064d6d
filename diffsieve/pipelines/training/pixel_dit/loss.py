"""The training loss: flow matching with noise scaled to the picture size."""

from __future__ import annotations

import torch

from ...pixel_dit import PixelDiTTransformer2DModel, noise_scale
from .config import PixelStageConfig

TRAIN_TIMESTEPS = 1000


def sample_times(count: int, config: PixelStageConfig, generator: torch.Generator) -> torch.Tensor:
    """Shares of noise (count,): uniform over 1/1000 .. 1000/1000, and logit-normal where the settings want it."""
    device = generator.device
    times = torch.randint(1, TRAIN_TIMESTEPS + 1, (count,), generator=generator, device=device) / TRAIN_TIMESTEPS
    if config.uniform_share < 1:
        normal = torch.randn(count, generator=generator, device=device).sigmoid()
        uniform = torch.rand(count, generator=generator, device=device) < config.uniform_share
        times = torch.where(uniform, times, normal)
    return times


def flow_loss(
    transformer: PixelDiTTransformer2DModel,
    pixels: torch.Tensor,
    labels: torch.Tensor | None,
    times: torch.Tensor,
    generator: torch.Generator,
) -> torch.Tensor:
    """Mean squared error of the predicted velocity `r eps - x_0` at `(1 - t) x_0 + t r eps` (arXiv 2512.16615).

    Divided by the mean square of the noise, so that picture sizes weigh alike.

    Args:
        transformer: the model.
        pixels: (B, 3, H, W) in [-1, 1].
        labels: (B,), or None where there are no classes.
        times: (B,) in (0, 1].
        generator: of the noise, on the device of the pictures.
    """
    scale = noise_scale(pixels.shape[-2], pixels.shape[-1])
    noise = scale * torch.randn(pixels.shape, generator=generator, device=pixels.device)
    t = times.view(-1, 1, 1, 1)
    velocity = transformer(pixels + t * (noise - pixels), times * TRAIN_TIMESTEPS, labels, return_dict=False)[0]
    return (velocity.float() - (noise - pixels)).square().mean() / scale**2
