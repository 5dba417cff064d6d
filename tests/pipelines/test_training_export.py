"""The embedded model: its card says what was measured, its folder is small, and it continues in training."""

import json
import re
from pathlib import Path

import pytest
import torch

from diffsieve.errors import DiffsieveError
from diffsieve.pipelines.defaults import MINI_WAN_DEFAULTS, MINI_WAN_FOLDER
from diffsieve.pipelines.training.checkpoint import load_module, load_weights
from diffsieve.pipelines.training.config import ModelConfig, TrainConfig
from diffsieve.pipelines.training.evaluate import assemble
from diffsieve.pipelines.training.export import MAX_BYTES, describe, export_pipeline, model_card
from diffsieve.pipelines.training.models import build_text_encoder, build_transformer, build_vae
from diffsieve.pipelines.training.sprites import Sprites, load_subjects
from diffsieve.pipelines.training.start import take_over
from tests.shapes import shape_sprites
from tests.tiny_training import tiny_settings

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "h200" / "mini_wan_quality.json"


@pytest.fixture(scope="module")
def training():
    return json.loads((MINI_WAN_FOLDER / "training.json").read_text())


def test_the_card_is_made_from_the_figures(training):
    assert (MINI_WAN_FOLDER / "README.md").read_text() == model_card(training)


def test_the_card_tells_where_the_subjects_are_listed(training):
    card = " ".join(model_card(training).split())
    told = re.search(
        r"The subjects are the (\d+) names in the groups of `(\S+)`, such as (\w+), (\w+) and (\w+)\.", card
    )
    groups = json.loads((Path(__file__).parents[2] / told[2]).read_text())
    names = [name for group in groups.values() for name in group]
    assert len(names) == int(told[1])
    assert set(told.groups()[2:]) <= set(names)


def test_the_figures_are_the_measured_ones(training):
    assert training["quality"] == json.loads(RESULT.read_text())
    card = (MINI_WAN_FOLDER / "README.md").read_text()
    rates = [f"{training['quality'][name]:.1%}" for name in ("subject", "motion", "colour")]
    assert f"| {' | '.join(rates)} |" in card


def test_the_default_clip_was_measured_and_trained(training):
    settings = training["quality"]["settings"]
    size = [MINI_WAN_DEFAULTS.frames, MINI_WAN_DEFAULTS.height, MINI_WAN_DEFAULTS.width]
    assert [settings["size"][name] for name in ("frames", "height", "width")] == size
    assert settings["steps"] == MINI_WAN_DEFAULTS.steps
    assert settings["guidance_scale"] == MINI_WAN_DEFAULTS.guidance_scale
    assert settings["max_sequence_length"] == MINI_WAN_DEFAULTS.max_sequence_length
    assert size in [seen for leg in training["legs"] if leg["stage"] == "dit" for seen in leg["sizes"]]


def test_the_folder_is_small():
    assert sum(path.stat().st_size for path in MINI_WAN_FOLDER.rglob("*") if path.is_file()) <= MAX_BYTES


def test_training_can_begin_with_the_embedded_model(tmp_path):
    names = tuple(load_subjects())
    sprites = Sprites(torch.zeros(len(names), 4, 2, 2), names)
    take_over(MINI_WAN_FOLDER, tmp_path, sprites)
    config = TrainConfig()
    vocabulary = load_weights(tmp_path / "start")["text_encoder.shared.weight"].shape[0]
    load_module(build_vae(config.model), load_weights(tmp_path / "vae"), "vae")
    load_module(build_transformer(config.model), load_weights(tmp_path / "start"), "transformer")
    load_module(build_text_encoder(config.model, vocabulary), load_weights(tmp_path / "start"), "text_encoder")
    assert len(json.loads((tmp_path / "start.json").read_text())["legs"]) >= 2


def tiny_pipeline(model: ModelConfig):
    sprites = shape_sprites()
    parts = build_vae(model), build_transformer(model), build_text_encoder(model, 64)
    return assemble(model, sprites, *parts)


def test_a_model_that_is_too_large_replaces_nothing(tmp_path, monkeypatch):
    out = tmp_path / "model"
    export_pipeline(tiny_pipeline(tiny_settings().model), out)
    before = sorted(path.stat().st_mtime_ns for path in out.rglob("*"))
    monkeypatch.setattr("diffsieve.pipelines.training.export.MAX_BYTES", 1000)
    with pytest.raises(DiffsieveError, match="must have at most 1000 bytes"):
        export_pipeline(tiny_pipeline(tiny_settings().model), out)
    assert sorted(path.stat().st_mtime_ns for path in out.rglob("*")) == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_card_names_the_sizes_of_the_legs(tmp_path, training):
    legs = [
        {"stage": "dit", "steps": 5, "seconds": 2, "processes": 1, "sizes": [[25, 128, 128]]},
        {"stage": "dit", "steps": 7, "seconds": 3, "processes": 2, "sizes": [[25, 128, 128], [41, 320, 320]]},
    ]
    describe(tmp_path, {**training, "legs": legs})
    card = (tmp_path / "README.md").read_text()
    assert "(25 x 128 x 128, 41 x 320 x 320)" in " ".join(card.split())
    assert "| 25 x 128 x 128, 41 x 320 x 320 | 7 | 3 | 2 |" in card
