"""Defaults of a pipeline, and the sizes that it makes without rounding."""

import dataclasses
import json
from dataclasses import asdict

import pytest

from diffsieve.errors import UserInputError
from diffsieve.pipelines.defaults import (
    DEFAULTS_FILE,
    MINI_WAN_DEFAULTS,
    MINI_WAN_FOLDER,
    check_clip_size,
    generation_defaults,
)
from diffsieve.pipelines.loading import load_pipeline
from diffsieve.pipelines.training.captions import COLOURS, MOTION_PHRASES
from diffsieve.pipelines.training.checkpoint import write_json
from tests.tiny import wan_image_pipeline, wan_pipeline, wan_vace_pipeline


@pytest.fixture(scope="module")
def pipe():
    return wan_pipeline(layers=1)


def test_defaults_are_those_of_the_call(pipe):
    defaults = generation_defaults(pipe)
    assert (defaults.steps, defaults.frames, defaults.height, defaults.width) == (50, 81, 480, 832)
    assert (defaults.guidance_scale, defaults.max_sequence_length, defaults.fps) == (5.0, 512, 16)
    assert defaults.prompts


def test_text_alone_must_be_enough():
    with pytest.raises(UserInputError, match="text-to-video pipeline, got WanImageToVideoPipeline, which also needs"):
        generation_defaults(wan_image_pipeline(layers=1))
    assert generation_defaults(wan_vace_pipeline(layers=1)).frames == 81


def test_the_prompts_of_mini_wan_are_of_its_kind():
    for prompt in MINI_WAN_DEFAULTS.prompts:
        assert any(f" {phrase} over a " in prompt for phrase in MOTION_PHRASES.values())
        assert any(prompt.endswith(f" {colour} background") for colour in COLOURS)


@pytest.mark.parametrize(
    ("frames", "height", "width"), [(1, 16, 16), (9, 32, 48), (29, 128, 16)], ids=lambda value: str(value)
)
def test_sizes_that_are_kept(pipe, frames, height, width):
    check_clip_size(pipe, frames=frames, height=height, width=width)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((8, 32, 32), "frames must be a multiple of 4 plus 1, such as 5 or 9, got 8"),
        ((0, 32, 32), "frames must be"),
        ((9, 40, 32), "height must be a multiple of 16, such as 32 or 48, got 40"),
        ((9, 32, 0), "width must be a multiple of 16, such as 16 or 32, got 0"),
        ((129, 32, 32), "frames must need at most 32 positions in this model, got 33"),
        ((9, 32, 272), "width must need at most 32 positions in this model, got 34"),
    ],
    ids=lambda value: "x".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_sizes_that_would_be_rounded_are_refused(pipe, size, message):
    frames, height, width = size
    with pytest.raises(UserInputError, match=message):
        check_clip_size(pipe, frames=frames, height=height, width=width)


def test_a_model_folder_brings_its_own_defaults(pipe, tmp_path):
    pipe.save_pretrained(tmp_path)
    write_json(tmp_path / DEFAULTS_FILE, {**asdict(MINI_WAN_DEFAULTS), "steps": 3})
    defaults = generation_defaults(load_pipeline(str(tmp_path), device="cpu"))
    assert defaults == dataclasses.replace(MINI_WAN_DEFAULTS, steps=3)


@pytest.mark.parametrize("text", ["{", "[]", '{"steps": 3}', '{"prompts": 3}'])
def test_damaged_defaults_are_named(pipe, tmp_path, text):
    pipe.save_pretrained(tmp_path)
    (tmp_path / DEFAULTS_FILE).write_text(text)
    with pytest.raises(UserInputError, match=f"{DEFAULTS_FILE} must be a JSON object with steps, frames"):
        generation_defaults(load_pipeline(str(tmp_path), device="cpu"))


def test_mini_wan_ships_its_defaults():
    assert json.loads((MINI_WAN_FOLDER / DEFAULTS_FILE).read_text()) == json.loads(
        json.dumps(asdict(MINI_WAN_DEFAULTS))
    )
