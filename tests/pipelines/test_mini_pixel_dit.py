"""The embedded pixel DiT: its size, its classes, its call. Skipped until its weights are in the package."""

import json

import pytest
import torch

from diffsieve import load_pipeline
from diffsieve.pipelines.defaults import EMBEDDED, MINI_PIXEL_DIT
from diffsieve.pipelines.training.pixel_dit.export import MINI_BYTES, model_card

FOLDER = EMBEDDED[MINI_PIXEL_DIT]
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="the weights of mini-pixel-dit are not in the package yet")


def test_the_folder_is_small_and_readable():
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= MINI_BYTES
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in files)
    assert json.loads((FOLDER / "model_index.json").read_text())["_class_name"] == "PixelDiTPipeline"


def test_the_card_is_made_from_the_figures():
    assert model_card(json.loads((FOLDER / "training.json").read_text())) == (FOLDER / "README.md").read_text()


def test_it_draws_by_category():
    pipe = load_pipeline(MINI_PIXEL_DIT, device="cpu")
    assert len(pipe.config.class_names) == 9
    assert pipe.transformer.config.sample_size == 128
    assert pipe.transformer.config.attention_method == "llsa"
    pipe.set_progress_bar_config(disable=True)
    image = pipe("Food & Drink", 32, 32, output_type="pt", generator=torch.Generator().manual_seed(0)).images
    assert image.shape == (1, 3, 32, 32)
    # emoji stand on white
    assert image[..., :2, :2].mean() > 0.7
