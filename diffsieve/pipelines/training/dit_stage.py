"""Train transformer and text encoder together by flow matching on the latents of the fixed autoencoder."""

from __future__ import annotations

import copy
import dataclasses
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator

from .accelerating import fast_attention
from .batches import ClipSource, tokenize
from .captions import build_tokenizer
from .checkpoint import AveragedWeights, load_module, load_weights, module_tensors, save_weights
from .config import ClipSize, DitConfig, TrainConfig
from .evaluate import assemble, generate
from .loop import Leg, StageResult, many_shapes, run_stage
from .models import build_text_encoder, build_transformer, embed_text, latent_statistics
from .muon import split_parameters
from .sheets import save_sheet
from .specs import sample_spec_batch
from .sprites import Sprites
from .vae_stage import SAMPLE_SEED, SAMPLES, load_vae, use_channels_last
from .whole_clip import encode_clip

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan, WanTransformer3DModel
    from transformers import UMT5EncoderModel

TRAIN_TIMESTEPS = 1000
_CLIP_CYCLE = 2**17  # steps after which clips repeat; also where the earlier uses of the first steps come from


def train_dit(
    config: TrainConfig,
    sprites: Sprites,
    folder: Path,
    vae_folder: Path,
    accelerator: Accelerator,
    leg: Leg,
    *,
    start_from: Path | None = None,
) -> StageResult:
    """Train transformer and text encoder; the folder gets the state and the averaged weights.

    Args:
        config: Of the run.
        sprites: On any device.
        folder: Of this stage.
        vae_folder: Of the trained autoencoder.
        accelerator: Gives device, precision and processes.
        leg: Deadline, resume, reports.
        start_from: Folder of averaged weights to begin with, where no complete state exists.
    """
    stage = config.dit
    device = accelerator.device
    vae = load_vae(config, vae_folder).to(device).requires_grad_(False)
    if device.type == "cuda":
        use_channels_last(vae.to(torch.bfloat16))
    torch.manual_seed(config.seed)
    tokenizer = build_tokenizer(sprites.names)
    modules = {
        "transformer": build_transformer(config.model).to(device),
        "text_encoder": build_text_encoder(config.model, len(tokenizer)).to(device),
    }
    if start_from is not None:
        tensors = load_weights(start_from)
        for name, module in modules.items():
            load_module(module, tensors, name)
    # second networks for the averages, never compiled
    average = {name: copy.deepcopy(module).requires_grad_(False).eval() for name, module in modules.items()}
    transformer, text_encoder = modules["transformer"], modules["text_encoder"]
    if stage.compile:
        transformer.compile_repeated_blocks(dynamic=False)
    hidden, other = split_parameters([transformer.blocks, text_encoder.encoder.block])
    seen = {id(parameter) for parameter in (*hidden, *other)}
    other += [p for module in modules.values() for p in module.parameters() if id(p) not in seen]
    source = ClipSource(sprites.to(device), 2 * config.seed + 1, accelerator.process_index, accelerator.num_processes)
    clips = ClipLatents(vae, source, stage)

    def compute_loss(step: int, progress: float) -> tuple[dict[str, torch.Tensor], int]:
        phase = stage.phase(progress)
        extra = phase.extra is not None and step % phase.extra_every == 0
        size: ClipSize = phase.extra if extra and phase.extra is not None else phase
        # extra steps count on their own, so that their clips come back too
        latents, captions = clips.batch(step // phase.extra_every if extra else step, size)
        # on the CPU, so that these choices do not wait for the device
        choice = torch.Generator().manual_seed(source.seed * 1_000_003 + step)
        long_text = extra or bool(torch.rand((), generator=choice) < phase.long_text_share)
        dropped = torch.rand(source.world, len(captions), generator=choice)[source.rank] < stage.caption_dropout
        captions = ["" if drop else text for text, drop in zip(captions, dropped.tolist(), strict=True)]
        token_ids, mask = tokenize(tokenizer, captions, stage.text_length, device)
        generator = source.generator(step)
        sigmas = sample_sigmas(len(captions), phase.shift, stage, generator)
        length = stage.long_text_length if long_text else stage.text_length
        eager = stage.compile and (extra or not long_text)
        stance = torch.compiler.set_stance("force_eager") if eager else nullcontext()
        with accelerator.autocast(), fast_attention(device), stance:
            text = embed_text(text_encoder, token_ids, mask, length)
            loss = flow_loss(transformer, latents, text, sigmas, generator)
        return {"loss": loss}, len(captions)

    def take_average(ema: AveragedWeights) -> None:
        for name, module in average.items():
            ema.copy_to(name, module)

    def save_average(ema: AveragedWeights, step: int) -> None:
        take_average(ema)
        tensors = module_tensors(average)
        save_weights(folder, {key: value.to(torch.bfloat16) for key, value in tensors.items()}, step)

    def sample(ema: AveragedWeights, progress: float, path: Path) -> None:
        take_average(ema)
        size = dataclasses.replace(config.evaluation.size, batch_size=SAMPLES)
        settings = dataclasses.replace(config.evaluation, prompts=SAMPLES, size=size)
        specs = sample_spec_batch(SAMPLES, sprites, seed=SAMPLE_SEED, split="heldout")
        decoder = load_vae(config, vae_folder).to(device)
        pipe = assemble(config.model, sprites, decoder, average["transformer"], average["text_encoder"])
        with accelerator.autocast():
            video = torch.cat(list(generate(pipe, specs.captions(), settings)))
        save_sheet(path, video * 2 - 1, specs.captions())

    with many_shapes():
        return run_stage(
            folder.name,
            folder,
            stage,
            accelerator,
            modules,
            (hidden, other),
            compute_loss,
            leg,
            save_average=save_average,
            sample=sample,
        )


class ClipLatents:
    """Normalised latents of the training clips; each clip comes back `reuse` times, `reuse_lag` steps apart.

    Which clips a step gets depends on its number alone: what is no longer (or, after a resume, not yet) in memory is
    encoded again.
    """

    def __init__(self, vae: AutoencoderKLWan, source: ClipSource, config: DitConfig) -> None:
        self._vae, self._source, self._config = vae, source, config
        self._parts: defaultdict[ClipSize, dict[int, tuple[torch.Tensor, list[str]]]] = defaultdict(dict)

    def batch(self, step: int, size: ClipSize) -> tuple[torch.Tensor, list[str]]:
        """Latents (B, C, F, h, w) in float32 and the B captions of a step."""
        reuse, lag = self._config.reuse, self._config.reuse_lag
        # a plain size: two phases with the same clips share them
        part_size = ClipSize(size.frames, size.height, size.width, size.batch_size // reuse, size.sprite_px)
        parts = [self._part((step - use * lag) % _CLIP_CYCLE, part_size) for use in range(reuse)]
        kept = self._parts[part_size]
        while len(kept) > reuse * lag:
            del kept[next(iter(kept))]
        return torch.cat([latents.float() for latents, _ in parts]), [text for _, texts in parts for text in texts]

    @torch.no_grad()
    def _part(self, number: int, size: ClipSize) -> tuple[torch.Tensor, list[str]]:
        kept = self._parts[size]
        if number in kept:
            return kept[number]
        specs = self._source.specs(number, size)
        video, _ = self._source.render(specs, size)
        if video.is_cuda:
            video = video.contiguous(memory_format=torch.channels_last_3d)
        mean, std = latent_statistics(self._vae, video)
        latents = (encode_clip(self._vae, video.to(self._vae.dtype))[0].float() - mean) / std
        kept[number] = (latents.contiguous().to(self._vae.dtype), specs.captions())
        return kept[number]


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
    load_module(transformer, tensors, "transformer")
    load_module(text_encoder, tensors, "text_encoder")
    return transformer.eval(), text_encoder.eval()
