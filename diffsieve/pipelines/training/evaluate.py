"""Measure a pipeline on held-out prompts with the judge, and draw its contact sheet."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch

from .captions import build_tokenizer
from .config import EvaluationConfig, ModelConfig
from .judge import judge_clips
from .models import build_scheduler
from .specs import SpecBatch, sample_spec_batch
from .sprites import Sprites
from .vae_stage import reconstruct

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan, WanPipeline, WanTransformer3DModel
    from transformers import UMT5EncoderModel

# clips of the evaluation start here, far from the first ones of the data preview
_HELD_OUT_SEED = 77
JUDGE_NAME = "nearest of all sprites by the judge of diffsieve.pipelines.training.judge"


def assemble(
    config: ModelConfig,
    sprites: Sprites,
    vae: AutoencoderKLWan,
    transformer: WanTransformer3DModel,
    text_encoder: UMT5EncoderModel,
) -> WanPipeline:
    """The stock pipeline of the trained parts."""
    from diffusers import WanPipeline

    return WanPipeline(
        tokenizer=build_tokenizer(sprites.names),
        text_encoder=text_encoder,
        vae=vae,
        scheduler=build_scheduler(config),
        transformer=transformer,
    )


def held_out_specs(count: int, sprites: Sprites) -> SpecBatch:
    """The fixed list of held-out clips that models are measured on."""
    return sample_spec_batch(count, sprites, seed=_HELD_OUT_SEED, split="heldout")


def generate(pipe: WanPipeline, prompts: list[str], config: EvaluationConfig) -> Iterator[torch.Tensor]:
    """Clips of the prompts, in batches (B, 3, T, H, W) in [0, 1]; prompt i starts from the noise of seed `seed + i`."""
    pipe.set_progress_bar_config(disable=True)
    size = config.size
    for start in range(0, len(prompts), size.batch_size):
        chunk = prompts[start : start + size.batch_size]
        # noise from CPU generators is the same on every device
        generators = [torch.Generator().manual_seed(config.seed + start + i) for i in range(len(chunk))]
        frames = pipe(
            prompt=chunk,
            num_frames=size.frames,
            height=size.height,
            width=size.width,
            num_inference_steps=config.steps,
            guidance_scale=config.guidance_scale,
            max_sequence_length=config.max_sequence_length,
            generator=generators,
            output_type="pt",
        ).frames
        yield frames.transpose(1, 2).float()


def evaluate_pipeline(
    pipe: WanPipeline,
    sprites: Sprites,
    config: EvaluationConfig,
    *,
    report: Callable[[int, int], None] | None = None,
) -> tuple[dict[str, Any], torch.Tensor, SpecBatch]:
    """Generate one clip for each held-out prompt and judge it.

    Args:
        pipe: On its device.
        sprites: Pictures for the judge.
        config: Prompts, size, steps, guidance.
        report: Called with (clips done, clips in all).

    Returns:
        Figures for a JSON file (shares in [0, 1]), the first 16 clips in [0, 1] on the CPU, and the specs.
    """
    device = pipe.transformer.device
    specs = held_out_specs(config.prompts, sprites)
    sprites = sprites.to(device)
    clips: list[torch.Tensor] = []
    started = time.monotonic()
    for video in generate(pipe, specs.captions(), config):
        clips.append(video)
        if report is not None:
            report(len(clips) * config.size.batch_size, config.prompts)
    seconds = time.monotonic() - started
    video = torch.cat(clips)
    verdict = judge_clips(video, specs, sprites)
    right = verdict.subject.tolist()
    figures = {
        "judge": JUDGE_NAME,
        "split": "held-out triples of subject, motion and colour",
        "prompts": config.prompts,
        **verdict.rates(),
        "wrong_subject": [text for text, hit in zip(specs.captions(), right, strict=True) if not hit],
        "settings": asdict(config),
        "scheduler": type(pipe.scheduler).__name__,
        "flow_shift": pipe.scheduler.config.get("flow_shift", pipe.scheduler.config.get("shift")),
        "dtype": str(pipe.transformer.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "versions": {name: version(name) for name in ("torch", "diffusers", "transformers")},
        "seconds": seconds,
    }
    return figures, video[:16].cpu(), specs


@torch.no_grad()
def evaluate_vae(
    vae: AutoencoderKLWan, sprites: Sprites, config: EvaluationConfig
) -> tuple[dict[str, Any], torch.Tensor, SpecBatch]:
    """The judge's ceiling: how many held-out clips it gets right after encoding and decoding, and on the originals.

    Returns:
        Figures (shares in [0, 1], PSNR in dB), the first 8 pairs of original and reconstruction in [0, 1] (a pair after
        the other), and the specs.
    """
    from .batches import ClipSource

    sprites = sprites.to(vae.device)
    source = ClipSource(sprites, _HELD_OUT_SEED, split="heldout")
    size = config.size
    specs = held_out_specs(config.prompts, sprites)
    originals, outputs, errors, sprite_errors = [], [], [], []
    for start in range(0, config.prompts, size.batch_size):
        video, alpha = source.render(specs[start : start + size.batch_size], size)
        output = reconstruct(vae, video.to(vae.dtype)).float()
        squared = ((output - video) / 2).square()
        errors.append(squared.mean((1, 2, 3, 4)))
        sprite_errors.append((squared * alpha).sum((1, 2, 3, 4)) / (3 * alpha.sum((1, 2, 3, 4))))
        originals.append(video * 0.5 + 0.5)
        outputs.append(output * 0.5 + 0.5)
    original, output = torch.cat(originals), torch.cat(outputs)
    figures: dict[str, Any] = {"clips": config.prompts}
    for label, video in (("original", original), ("reconstruction", output)):
        rates = judge_clips(video, specs, sprites).rates()
        figures.update({f"{label}_{name}": rate for name, rate in rates.items()})
    figures["psnr_db"] = float((-10 * torch.cat(errors).log10()).mean())
    figures["psnr_sprite_db"] = float((-10 * torch.cat(sprite_errors).log10()).mean())
    pairs = torch.stack((original[:8], output[:8]), dim=1).flatten(0, 1)
    return figures, pairs.clamp(0, 1).cpu(), specs
