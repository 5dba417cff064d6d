"""The embedded model as it ships: size, stock classes, default clip."""

import json
import math

import pytest
from diffusers import WanPipeline

from diffsieve.pipelines.defaults import MINI_WAN_DEFAULTS, MINI_WAN_FOLDER, check_clip_size, generation_defaults
from diffsieve.processors.crossover import crossover


@pytest.fixture(scope="module")
def pipe():
    return WanPipeline.from_pretrained(MINI_WAN_FOLDER)


def tokens_of(pipe, frames, height, width):
    """Tokens of self-attention of a clip."""
    latents = [(frames - 1) // pipe.vae_scale_factor_temporal + 1]
    latents += [pixels // pipe.vae_scale_factor_spatial for pixels in (height, width)]
    return math.prod(n // patch for n, patch in zip(latents, pipe.transformer.config.patch_size, strict=True))


def test_it_is_small_and_holds_no_pickle():
    files = [path for path in MINI_WAN_FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 40_000_000
    assert {path.suffix for path in files} <= {".json", ".md", ".safetensors"}


def test_stock_classes_load_it(pipe):
    index = json.loads((MINI_WAN_FOLDER / "model_index.json").read_text())
    named = {name: value[1] for name, value in index.items() if isinstance(value, list) and value[1] is not None}
    assert named == {
        "scheduler": "UniPCMultistepScheduler",
        "text_encoder": "UMT5EncoderModel",
        "tokenizer": "PreTrainedTokenizerFast",
        "transformer": "WanTransformer3DModel",
        "vae": "AutoencoderKLWan",
    }
    assert generation_defaults(pipe) == MINI_WAN_DEFAULTS


def test_the_default_clip_is_long_enough_to_run_sparse(pipe):
    frames, height, width = (getattr(MINI_WAN_DEFAULTS, name) for name in ("frames", "height", "width"))
    check_clip_size(pipe, frames=frames, height=height, width=width)
    tokens = tokens_of(pipe, frames, height, width)
    assert 4_000 <= tokens <= 5_000
    assert tokens >= crossover("cpu").tokens
    assert (frames - 1) // pipe.vae_scale_factor_temporal + 1 >= 7  # time is a real axis
    assert 12 <= MINI_WAN_DEFAULTS.steps <= 14


def test_a_clip_of_more_than_16_000_tokens_fits(pipe):
    check_clip_size(pipe, frames=41, height=320, width=320)
    assert tokens_of(pipe, 41, 320, 320) > 16_000


def test_it_knows_every_word_of_its_prompts(pipe):
    unknown = pipe.tokenizer.unk_token_id
    for prompt in MINI_WAN_DEFAULTS.prompts:
        assert unknown not in pipe.tokenizer(prompt).input_ids
    assert unknown in pipe.tokenizer("a zeppelin moves up over a purple background").input_ids
