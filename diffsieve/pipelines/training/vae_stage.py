"""First stage: train the autoencoder on rendered clips, then fix the statistics of its latents."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator

from .batches import ClipSource
from .checkpoint import load_weights, module_tensors, save_weights, take_module, write_json
from .config import ClipSize, TrainConfig, VaeConfig
from .loop import LogEntry, StageResult, many_shapes, run_stage
from .models import build_vae, latent_statistics
from .muon import split_parameters
from .sprites import Sprites
from .whole_clip import decode_clip, encode_clip

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan

logger = logging.getLogger(__name__)

STATISTICS_FILE = "latents.json"
STATISTICS_CLIPS = 256


def train_vae(
    config: TrainConfig,
    sprites: Sprites,
    folder: Path,
    accelerator: Accelerator,
    *,
    max_seconds: float | None = None,
    resume: bool = False,
    report: Callable[[LogEntry], None] | None = None,
) -> StageResult:
    """Train the autoencoder; the folder gets the state, the averaged weights and the latent statistics.

    Args:
        config: Of the run.
        sprites: On any device.
        folder: Of this stage.
        accelerator: Gives device, precision and processes.
        max_seconds: End of this leg.
        resume: Go on from the folder's checkpoint.
        report: Gets every log entry.
    """
    stage = config.vae
    device = accelerator.device
    fused = stage.fast and device.type == "cuda"
    torch.manual_seed(config.seed)
    vae = build_vae(config.model).to(device)
    if device.type == "cuda":
        use_channels_last(vae)
    source = ClipSource(sprites.to(device), 2 * config.seed, accelerator.process_index, accelerator.num_processes)
    edges = (vae.encoder.conv_in, vae.encoder.conv_out, vae.quant_conv, vae.post_quant_conv, vae.decoder.conv_out)
    hidden, other = split_parameters([vae], excluded=edges)

    def compute_loss(step: int, progress: float) -> tuple[dict[str, torch.Tensor], int]:
        size = stage.phase(progress)
        video, alpha = source.render(source.specs(step, size), size)
        with accelerator.autocast():
            losses = vae_losses(vae, video, alpha, stage, source.generator(step), fused=fused)
        return losses, size.batch_size

    modules = {"vae": vae}
    with many_shapes():
        result = run_stage(
            "vae",
            folder,
            stage,
            accelerator,
            modules,
            hidden,
            other,
            compute_loss,
            max_seconds=max_seconds,
            resume=resume,
            report=report,
        )
    # the complete state is saved: the live network can take the averaged weights now
    result.ema.copy_to("vae", vae)
    mean, std = measure_latents(vae, source, stage.phases[-1], accelerator, fused=fused)
    if accelerator.is_main_process:
        save_weights(folder, module_tensors({"vae": vae}))
        write_json(folder / STATISTICS_FILE, {"latents_mean": mean, "latents_std": std})
    accelerator.wait_for_everyone()
    return result


def vae_losses(
    vae: AutoencoderKLWan,
    video: torch.Tensor,
    alpha: torch.Tensor,
    config: VaeConfig,
    generator: torch.Generator,
    *,
    fused: bool = False,
) -> dict[str, torch.Tensor]:
    """Losses of one batch, scalars: "loss" and its terms.

    L1 and squared error weighted by `1 + alpha_weight * coverage` (the sprite is a small part of the picture), L1 of spatial
    differences, and the KL term to a unit Gaussian.
    """
    if video.is_cuda:
        video = video.contiguous(memory_format=torch.channels_last_3d)
    mean, log_variance = encode_clip(vae, video, fused=fused)
    mean, log_variance = mean.float(), log_variance.float()
    noise = torch.randn(mean.shape, generator=generator, device=mean.device)
    spread = mean.detach().std()
    latents = mean + (log_variance.exp() + (config.latent_noise * spread) ** 2).sqrt() * noise
    error = decode_clip(vae, latents, fused=fused).float() - video
    weight = 1 + config.alpha_weight * alpha
    weight = weight / weight.mean()
    absolute, squared = (weight * error.abs()).mean(), (weight * error.square()).mean()
    gradient = error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean()
    kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
    loss = absolute + squared + config.gradient_weight * gradient + config.kl_weight * kl
    return {"loss": loss, "l1": absolute, "l2": squared, "gradient": gradient, "kl": kl}


def use_channels_last(vae: AutoencoderKLWan) -> None:
    """Lay out the convolution kernels with channels innermost, as the fast GPU kernels want them."""
    for module in vae.modules():
        if isinstance(module, (torch.nn.Conv2d, torch.nn.Conv3d)):
            layout = torch.channels_last_3d if module.weight.ndim == 5 else torch.channels_last
            module.weight.data = module.weight.data.contiguous(memory_format=layout)


@torch.no_grad()
def measure_latents(
    vae: AutoencoderKLWan, source: ClipSource, size: ClipSize, accelerator: Accelerator, *, fused: bool = False
) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each latent channel over training clips."""
    total = torch.zeros(3, vae.config.z_dim, device=accelerator.device, dtype=torch.float64)
    for step in range(max(1, STATISTICS_CLIPS // size.batch_size)):
        video, _ = source.render(source.specs(10**5 + step, size), size)
        if video.is_cuda:
            video = video.contiguous(memory_format=torch.channels_last_3d)
        with accelerator.autocast():
            latents = encode_clip(vae, video, fused=fused)[0].double()
        count = torch.full_like(total[0], latents.numel() / latents.shape[1])
        total += torch.stack([count, latents.sum((0, 2, 3, 4)), latents.square().sum((0, 2, 3, 4))])
    mean = total[1] / total[0]
    std = (total[2] / total[0] - mean.square()).sqrt()
    return mean.tolist(), std.tolist()


def load_vae(config: TrainConfig, folder: Path) -> AutoencoderKLWan:
    """The averaged autoencoder of a stage folder, with its latent statistics, in float32 on the CPU."""
    import json

    vae = build_vae(config.model)
    vae.load_state_dict(take_module(load_weights(folder), "vae"))
    statistics: dict[str, Any] = json.loads((folder / STATISTICS_FILE).read_text(encoding="utf-8"))
    vae.register_to_config(**statistics)
    return vae.eval()


@torch.no_grad()
def reconstruct(vae: AutoencoderKLWan, video: torch.Tensor) -> torch.Tensor:
    """Encode and decode a clip with the posterior mean, through the normalised latents; clamped to [-1, 1]."""
    mean, std = latent_statistics(vae, video)
    latents = (encode_clip(vae, video)[0] - mean) / std
    return decode_clip(vae, latents * std + mean).clamp(-1, 1)
