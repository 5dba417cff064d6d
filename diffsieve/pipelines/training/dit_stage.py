"""Second stage: train transformer and text encoder together by flow matching on the latents of the fixed autoencoder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator

from .batches import ClipSource, tokenize
from .captions import build_tokenizer
from .checkpoint import load_weights, module_tensors, save_weights, take_module
from .config import ClipSize, DitConfig, TrainConfig
from .loop import LogEntry, StageResult, many_shapes, run_stage
from .models import build_text_encoder, build_transformer, embed_text, latent_statistics
from .muon import split_parameters
from .sprites import Sprites
from .vae_stage import compile_res_blocks, load_vae
from .whole_clip import encode_clip

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan, WanTransformer3DModel
    from transformers import UMT5EncoderModel

TRAIN_TIMESTEPS = 1000


def train_dit(
    config: TrainConfig,
    sprites: Sprites,
    folder: Path,
    vae_folder: Path,
    accelerator: Accelerator,
    *,
    max_seconds: float | None = None,
    resume: bool = False,
    start_from: Path | None = None,
    report: Callable[[LogEntry], None] | None = None,
) -> StageResult:
    """Train transformer and text encoder; the folder gets the state and the averaged weights.

    Args:
        config: Of the run.
        sprites: On any device.
        folder: Of this stage.
        vae_folder: Of the finished first stage.
        accelerator: Gives device, precision and processes.
        max_seconds: End of this leg.
        resume: Go on from the folder's checkpoint.
        start_from: Folder of averaged weights to begin with, where no complete state exists.
        report: Gets every log entry.
    """
    stage = config.dit
    device = accelerator.device
    vae = load_vae(config, vae_folder).to(device).requires_grad_(False)
    if device.type == "cuda":
        vae.to(torch.bfloat16).to(memory_format=torch.channels_last_3d)
    torch.manual_seed(config.seed)
    tokenizer = build_tokenizer(sprites.names)
    transformer = build_transformer(config.model).to(device)
    text_encoder = build_text_encoder(config.model, len(tokenizer)).to(device)
    modules = {"transformer": transformer, "text_encoder": text_encoder}
    if start_from is not None:
        tensors = load_weights(start_from)
        for name, module in modules.items():
            module.load_state_dict(take_module(tensors, name))
    if stage.compile:
        transformer.compile_repeated_blocks(dynamic=False)
        compile_res_blocks(vae)
    hidden, other = split_parameters([transformer.blocks, text_encoder.encoder.block])
    seen = {id(parameter) for parameter in (*hidden, *other)}
    other += [p for module in modules.values() for p in module.parameters() if id(p) not in seen]
    source = ClipSource(sprites.to(device), 2 * config.seed + 1, accelerator.process_index, accelerator.num_processes)
    latents_of = _encoder(vae, source)

    def compute_loss(step: int, progress: float) -> tuple[dict[str, torch.Tensor], int]:
        phase = stage.phase(progress)
        size: ClipSize = phase
        if phase.extra is not None and step % phase.extra_every == 0:
            size = phase.extra
        specs = source.specs(step, size)
        # on the CPU, so that the choice of captions does not wait for the device
        choice = torch.Generator().manual_seed(source.seed * 1_000_003 + step)
        long_text = bool(torch.rand((), generator=choice) < stage.long_text_share)
        dropped = torch.rand(64 * size.batch_size, generator=choice)[source.rank * size.batch_size :][: size.batch_size]
        captions = [
            "" if drop else text
            for text, drop in zip(specs.captions(), (dropped < stage.caption_dropout).tolist(), strict=True)
        ]
        token_ids, mask = tokenize(tokenizer, captions, stage.text_length, device)
        latents = latents_of(specs, size)
        generator = source.generator(step)
        sigmas = sample_sigmas(size.batch_size, phase.shift, stage, generator)
        length = stage.long_text_length if long_text else stage.text_length
        with accelerator.autocast():
            text = embed_text(text_encoder, token_ids, mask, length)
            loss = flow_loss(transformer, latents, text, sigmas, generator)
        return {"loss": loss}, size.batch_size

    with many_shapes():
        result = run_stage(
            "dit",
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
    if accelerator.is_main_process:
        average = {
            "transformer": build_transformer(config.model).to(device),
            "text_encoder": build_text_encoder(config.model, len(tokenizer)).to(device),
        }
        for name, module in average.items():
            result.ema.copy_to(name, module)
        tensors = module_tensors(average)
        save_weights(folder, {key: value.to(torch.bfloat16) for key, value in tensors.items()})
    accelerator.wait_for_everyone()
    return result


def _encoder(vae: AutoencoderKLWan, source: ClipSource) -> Callable[..., torch.Tensor]:
    @torch.no_grad()
    def latents_of(specs: object, size: ClipSize) -> torch.Tensor:
        video, _ = source.render(specs, size)  # type: ignore[arg-type]
        if video.is_cuda:
            video = video.contiguous(memory_format=torch.channels_last_3d)
        mean, std = latent_statistics(vae, video)
        return ((encode_clip(vae, video.to(vae.dtype))[0].float() - mean) / std).contiguous()

    return latents_of


def sample_sigmas(count: int, shift: float, config: DitConfig, generator: torch.Generator) -> torch.Tensor:
    """Noise levels (count,) in (0, 1): logit-normal, a share of them uniform, all shifted towards high noise.

    The shift is the scheduler's: sigma -> shift sigma / (1 + (shift - 1) sigma).
    """
    device = generator.device
    sigmas = torch.randn(count, generator=generator, device=device).sigmoid()
    uniform = torch.rand(count, generator=generator, device=device)
    chosen = torch.rand(count, generator=generator, device=device) < config.uniform_share
    sigmas = torch.where(chosen, uniform, sigmas)
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def flow_loss(
    transformer: WanTransformer3DModel,
    latents: torch.Tensor,
    text: torch.Tensor,
    sigmas: torch.Tensor,
    generator: torch.Generator,
) -> torch.Tensor:
    """Mean squared error of the predicted velocity `noise - latents` at `(1 - sigma) latents + sigma noise`.

    Args:
        latents: (B, C, F, h, w), normalised.
        text: (B, S, text_dim).
        sigmas: (B,) in (0, 1); the transformer sees 1000 times that, as in the pipeline.
    """
    noise = torch.randn(latents.shape, generator=generator, device=latents.device)
    sigma = sigmas.view(-1, 1, 1, 1, 1)
    noisy = latents + sigma * (noise - latents)
    velocity = transformer(
        hidden_states=noisy, timestep=sigmas * TRAIN_TIMESTEPS, encoder_hidden_states=text, return_dict=False
    )[0]
    return (velocity.float() - (noise - latents)).square().mean()


def load_networks(
    config: TrainConfig, folder: Path, vocabulary_size: int
) -> tuple[WanTransformer3DModel, UMT5EncoderModel]:
    """The averaged transformer and text encoder of a stage folder, in float32 on the CPU."""
    tensors = load_weights(folder)
    transformer = build_transformer(config.model)
    text_encoder = build_text_encoder(config.model, vocabulary_size)
    transformer.load_state_dict(take_module(tensors, "transformer"))
    text_encoder.load_state_dict(take_module(tensors, "text_encoder"))
    return transformer.eval(), text_encoder.eval()
