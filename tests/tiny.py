"""Tiny pipelines of real diffusers classes, random weights, for tests of everything that runs inside a pipeline.

A clip of 9 frames at 32x32 has 3 x 8 x 8 latents: with patch (1, 2, 2) a token grid of (3, 4, 4), 48 tokens. Use blocks
of 8 tokens, `min_tokens=0` and `output_type="latent"`.
"""

from functools import lru_cache
from typing import Any

import torch
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
    WanVACEPipeline,
    WanVACETransformer3DModel,
    WanVideoToVideoPipeline,
)
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

SIZE, FRAMES = 32, 9
GRID = (3, 4, 4)
TOKENS = 48
HEADS = 2

_WORDS = ("<pad>", "</s>", "<unk>", "a", "cat", "dog", "moves", "left", "right", "bad")


def tokenizer() -> PreTrainedTokenizerFast:
    model = Tokenizer(WordLevel({word: i for i, word in enumerate(_WORDS)}, unk_token="<unk>"))
    model.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=16
    )


def text_encoder() -> UMT5EncoderModel:
    torch.manual_seed(0)
    config = UMT5Config(vocab_size=len(_WORDS), d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    return UMT5EncoderModel(config).eval()


def vae() -> AutoencoderKLWan:
    torch.manual_seed(1)
    return AutoencoderKLWan(
        base_dim=3,
        z_dim=16,
        dim_mult=[1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        scale_factor_temporal=4,
        scale_factor_spatial=4,
    ).eval()


def transformer(layers: int = 3, in_channels: int = 16, start: int = 2, **overrides: Any) -> WanTransformer3DModel:
    """A `WanTransformer3DModel` with 2 heads of 12 channels; `start` is the state of the generator of its weights."""
    torch.manual_seed(start)
    return WanTransformer3DModel(**_sizes(layers) | {"in_channels": in_channels} | overrides).eval()


def scheduler() -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(shift=3.0)


def wan_pipeline(layers: int = 3, two: bool = False, **overrides: Any) -> WanPipeline:
    """Text to video; `two` adds a second transformer for the low noise levels, as in Wan 2.2."""
    second = transformer(layers, start=3) if two else None
    parts = _common() | {
        "transformer": transformer(layers, **overrides),
        "transformer_2": second,
        "boundary_ratio": 0.85 if two else None,
    }
    return _quiet(WanPipeline(**parts))


def wan_image_pipeline(layers: int = 3, two: bool = False) -> WanImageToVideoPipeline:
    """Image to video without an image encoder (Wan 2.2): the image comes in as latent channels."""
    parts = _common() | {
        "image_processor": None,
        "image_encoder": None,
        "transformer": transformer(layers, in_channels=36),
        "transformer_2": transformer(layers, in_channels=36, start=3) if two else None,
        "boundary_ratio": 0.85 if two else None,
    }
    return _quiet(WanImageToVideoPipeline(**parts))


def wan_video_pipeline(layers: int = 3) -> WanVideoToVideoPipeline:
    """Video to video."""
    return _quiet(WanVideoToVideoPipeline(**_common(), transformer=transformer(layers)))


def wan_vace_pipeline(layers: int = 3, two: bool = False) -> WanVACEPipeline:
    """VACE with two control blocks."""
    parts = _common() | {
        "transformer": _vace_transformer(layers, start=4),
        "transformer_2": _vace_transformer(layers, start=5) if two else None,
        "boundary_ratio": 0.85 if two else None,
    }
    return _quiet(WanVACEPipeline(**parts))


def generate(pipe: Any, steps: int = 5, guidance: float = 3.0, **options: Any) -> torch.Tensor:
    """Run one generation of a pipeline of this module; latents (1, 16, 3, 8, 8), the same noise every time."""
    arguments: dict[str, Any] = {
        "prompt": "a cat moves left",
        "negative_prompt": "bad",
        "height": SIZE,
        "width": SIZE,
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "generator": torch.Generator("cpu").manual_seed(0),
        "max_sequence_length": 16,
        "output_type": "latent",
    }
    if isinstance(pipe, WanVideoToVideoPipeline):
        arguments["video"] = [_picture(i) for i in range(FRAMES)]
    else:
        arguments["num_frames"] = FRAMES
    if isinstance(pipe, WanImageToVideoPipeline):
        arguments["image"] = _picture(0)
    return pipe(**arguments | options).frames


def _vace_transformer(layers: int, start: int) -> WanVACETransformer3DModel:
    torch.manual_seed(start)
    return WanVACETransformer3DModel(
        **_sizes(layers), in_channels=16, vace_layers=[0, layers - 1], vace_in_channels=2 * 16 + 16
    ).eval()


def _sizes(layers: int) -> dict[str, Any]:
    return {
        "patch_size": (1, 2, 2),
        "num_attention_heads": HEADS,
        "attention_head_dim": 12,
        "out_channels": 16,
        "text_dim": 16,
        "freq_dim": 16,
        "ffn_dim": 32,
        "num_layers": layers,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "rope_max_seq_len": 32,
    }


def _common() -> dict[str, Any]:
    return {"tokenizer": tokenizer(), "text_encoder": text_encoder(), "vae": vae(), "scheduler": scheduler()}


def _quiet(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe


@lru_cache
def _picture(frame: int) -> Image.Image:
    return Image.radial_gradient("L").resize((SIZE, SIZE)).rotate(10 * frame).convert("RGB")
