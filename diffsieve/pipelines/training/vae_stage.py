"""First stage: train the autoencoder on rendered clips, then fix the statistics of its latents."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator

from .batches import ClipSource
from .checkpoint import (
    AveragedWeights,
    copy_file,
    load_module,
    load_weights,
    module_tensors,
    save_weights,
    write_json,
)
from .config import ClipSize, TrainConfig, VaeConfig
from .loop import Leg, StageResult, many_shapes, run_stage
from .models import build_vae, latent_statistics
from .muon import split_parameters
from .sheets import save_sheet
from .specs import sample_spec_batch
from .sprites import Sprites
from .whole_clip import decode_clip, encode_clip

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan

STATISTICS_FILE = "latents.json"
STATISTICS_CLIPS = 256
STATISTICS_BATCH = 16
# the contact sheets drawn while training show these clips
SAMPLES = 6
SAMPLE_SEED = 78


def train_vae(
    config: TrainConfig,
    sprites: Sprites,
    folder: Path,
    accelerator: Accelerator,
    leg: Leg,
    *,
    decoder_of: Path | None = None,
) -> StageResult:
    """Train the autoencoder; the folder gets the state, the averaged weights and the latent statistics.

    Args:
        config: Of the run.
        sprites: On any device.
        folder: Of this stage.
        accelerator: Gives device, precision and processes.
        leg: Deadline, resume, reports.
        decoder_of: Folder of a trained autoencoder whose decoder alone is trained further (settings `config.decoder`):
            encoder and statistics stay as they are, so a transformer trained on its latents stays valid.
    """
    stage: VaeConfig = config.vae if decoder_of is None else config.decoder
    device = accelerator.device
    torch.manual_seed(config.seed)
    vae = build_vae(config.model) if decoder_of is None else load_vae(config, decoder_of)
    vae = vae.to(device).requires_grad_(False)
    # a second network for the averages: the compiled one must not see other modes and sizes
    average = copy.deepcopy(vae)
    if decoder_of is None:
        modules: dict[str, torch.nn.Module] = {"vae": vae}
    else:
        modules = {"post_quant_conv": vae.post_quant_conv, "decoder": vae.decoder}
    for module in modules.values():
        module.requires_grad_(True)
    fused = stage.fusion == "triton" and device.type == "cuda"
    if device.type == "cuda":
        use_channels_last(vae)
        use_channels_last(average)
        if stage.fusion == "compile":
            for module in modules.values():
                compile_res_blocks(module)
    source = ClipSource(
        sprites.to(device),
        2 * config.seed,
        accelerator.process_index,
        accelerator.num_processes,
        fast_share=stage.fast_share,
    )
    edges = (vae.encoder.conv_in, vae.encoder.conv_out, vae.quant_conv, vae.post_quant_conv, vae.decoder.conv_out)
    parameters = split_parameters(modules.values(), excluded=edges)

    def compute_loss(step: int, progress: float) -> tuple[dict[str, torch.Tensor], int]:
        size = stage.phase(progress)
        video, alpha = source.render(source.specs(step, size), size)
        with accelerator.autocast():
            losses = vae_losses(
                vae, video, alpha, stage, source.generator(step), fused=fused, frozen_encoder=decoder_of is not None
            )
        return losses, size.batch_size

    def averaged(ema: AveragedWeights) -> AutoencoderKLWan:
        for name in modules:
            ema.copy_to(name, average if name == "vae" else getattr(average, name))
        return average.requires_grad_(False)

    def save_average(ema: AveragedWeights, step: int) -> None:
        vae = averaged(ema)
        if decoder_of is None:
            mean, std = measure_latents(vae, source, stage.phases[-1], accelerator)
            write_json(folder / STATISTICS_FILE, {"latents_mean": mean, "latents_std": std})
        else:
            copy_file(decoder_of / STATISTICS_FILE, folder / STATISTICS_FILE)
        save_weights(folder, module_tensors({"vae": vae}), step)

    def sample(ema: AveragedWeights, progress: float, path: Path) -> None:
        size = stage.phase(progress)
        specs = sample_spec_batch(SAMPLES, source.sprites, seed=SAMPLE_SEED, split="heldout")
        video, _ = source.render(specs, size)
        with accelerator.autocast():
            output = reconstruct(averaged(ema), video).float()
        captions = [line for text in specs.captions() for line in (text, "  reconstruction")]
        save_sheet(path, torch.stack((video, output), dim=1).flatten(0, 1), captions)

    with many_shapes():
        return run_stage(
            folder.name,
            folder,
            stage,
            accelerator,
            modules,
            parameters,
            compute_loss,
            leg,
            save_average=save_average,
            sample=sample,
        )


def vae_losses(
    vae: AutoencoderKLWan,
    video: torch.Tensor,
    alpha: torch.Tensor,
    config: VaeConfig,
    generator: torch.Generator,
    *,
    fused: bool = False,
    frozen_encoder: bool = False,
) -> dict[str, torch.Tensor]:
    """Losses of one batch, scalars: "loss" and its terms.

    L1 and squared error weighted by `1 + alpha_weight * coverage` (the sprite is a small part of the picture), L1 of
    spatial differences, and, where the encoder is trained, the KL term to a unit Gaussian.
    """
    if video.is_cuda:
        video = video.contiguous(memory_format=torch.channels_last_3d)
    with torch.set_grad_enabled(not frozen_encoder):
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
    losses = {"l1": absolute, "l2": squared, "gradient": gradient}
    loss = absolute + squared + config.gradient_weight * gradient
    if not frozen_encoder:
        losses["kl"] = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
        loss = loss + config.kl_weight * losses["kl"]
    return {"loss": loss, **losses}


def use_channels_last(vae: AutoencoderKLWan) -> None:
    """Lay out the convolution kernels with channels innermost, as the fast GPU kernels want them."""
    for module in vae.modules():
        if isinstance(module, (torch.nn.Conv2d, torch.nn.Conv3d)):
            layout = torch.channels_last_3d if module.weight.ndim == 5 else torch.channels_last
            module.weight.data = module.weight.data.contiguous(memory_format=layout)


def compile_res_blocks(module: torch.nn.Module) -> None:
    """Compile each residual block: fuses norm, activation and causal padding into one pass over the memory.

    With static sizes: graphs for any size took four times as long to compile and ran no faster.
    """
    from diffusers.models.autoencoders.autoencoder_kl_wan import WanResidualBlock

    for part in module.modules():
        if isinstance(part, WanResidualBlock):
            part.compile(dynamic=False)


@torch.no_grad()
def measure_latents(
    vae: AutoencoderKLWan, source: ClipSource, size: ClipSize, accelerator: Accelerator
) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each latent channel over training clips."""
    total = torch.zeros(3, vae.config.z_dim, device=accelerator.device, dtype=torch.float64)
    size = ClipSize(size.frames, size.height, size.width, STATISTICS_BATCH, size.sprite_px)
    for step in range(STATISTICS_CLIPS // size.batch_size):
        video, _ = source.render(source.specs(10**5 + step, size), size)
        if video.is_cuda:
            video = video.contiguous(memory_format=torch.channels_last_3d)
        with accelerator.autocast():
            latents = encode_clip(vae, video)[0].double()
        count = torch.full_like(total[0], latents.numel() / latents.shape[1])
        total += torch.stack([count, latents.sum((0, 2, 3, 4)), latents.square().sum((0, 2, 3, 4))])
    mean = total[1] / total[0]
    std = (total[2] / total[0] - mean.square()).sqrt()
    return mean.tolist(), std.tolist()


def load_vae(config: TrainConfig, folder: Path) -> AutoencoderKLWan:
    """The averaged autoencoder of a stage folder, with its latent statistics, in float32 on the CPU."""
    vae = build_vae(config.model)
    load_module(vae, load_weights(folder), "vae")
    statistics: dict[str, Any] = json.loads((folder / STATISTICS_FILE).read_text(encoding="utf-8"))
    vae.register_to_config(**statistics)
    return vae.eval()


@torch.no_grad()
def reconstruct(vae: AutoencoderKLWan, video: torch.Tensor) -> torch.Tensor:
    """Encode and decode a clip with the posterior mean, through the normalised latents; clamped to [-1, 1]."""
    mean, std = latent_statistics(vae, video)
    latents = (encode_clip(vae, video)[0] - mean) / std
    return decode_clip(vae, latents * std + mean).clamp(-1, 1)
