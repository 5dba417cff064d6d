"""Every family of models that the page can offer, from a folder of its own and through all handlers, on a CPU."""

import numpy as np
import pytest
from PIL import Image

from diffsieve.app import figures, views
from diffsieve.app.handlers import Handlers
from diffsieve.app.limits import Limits
from diffsieve.app.models import Shelf, offered_models
from diffsieve.app.snippet import python_lines
from diffsieve.app.store import Store
from diffsieve.errors import UserInputError
from tests import tiny_pixels
from tests.app.conftest import small
from tests.tiny import wan_image_pipeline, wan_pipeline, wan_vace_pipeline, wan_video_pipeline

PICTURE = {"width": 24, "height": 16, "steps": 3, "class_name": "Objects", "block_size": None, "topk": None}
# The pipeline, what is asked for, a layer of it, and the token whose query is looked at.
FAMILIES = {
    "wan-two-transformers": (lambda: wan_pipeline(two=True), {}, "transformer.blocks.1", (1, 3, 0)),
    "wan-vace": (wan_vace_pipeline, {}, "transformer.vace_blocks.1", (1, 3, 0)),
    "wan-vace-llsa": (
        wan_vace_pipeline, {"method": "llsa", "topk": 2, "block_size": 4}, "transformer.vace_blocks.1", (1, 3, 0),
    ),
    "pixel-dit-llsa": (tiny_pixels.pipeline, {"method": "llsa"} | PICTURE, "transformer.blocks.1", (0, 5, 7)),
    "pixel-dit-ba-att": (tiny_pixels.pipeline, PICTURE | {"block_size": 16}, "transformer.blocks.1", (0, 5, 7)),
}  # fmt: skip


def handlers_of(pipe, tmp_path):
    """Save a pipeline and offer its folder as `--model` does."""
    folder = tmp_path / "my-model"
    pipe.save_pretrained(folder)
    offered = offered_models([str(folder)])
    store = Store(tmp_path / "store", examples=tmp_path / "no-examples")
    store.open()
    return Handlers(Shelf({"my-model": offered["my-model"]}, device="cpu"), store, Limits.for_device("cpu"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_goes_through_every_part_of_the_page(family, tmp_path, monkeypatch):
    make, changes, layer, token = FAMILIES[family]
    handlers = handlers_of(make(), tmp_path)
    lines = []
    request = small(**{"model": "my-model"} | changes)
    run = handlers.compare(request, owner="me", tell=lambda share, text: lines.append(text))
    assert lines[-1] == "done"
    assert run.report["settings"]["model"] == "my-model"
    assert 0 < run.clip["sparsity"]["density_sparse_steps"] < 1
    assert run.clip["metrics"]["psnr"]["mean"] < 100
    table = figures.metrics_table([("sparse", run)])
    assert "PSNR" in table
    assert figures.headline(run)
    assert figures.cost_table([("sparse", run)])
    assert "my-model" in views.facts(run)

    masks = handlers.masks(run.id)
    assert layer in masks.layer_names()
    step = masks.steps_of(layer)[-1]
    assert handlers.mask_view(run.id, layer, step, 1).width > 200
    spot = handlers.spot_view(run.id, layer, step, 1, token)
    assert 0 < spot.attended < spot.tokens == np.prod(masks.grid_thw)
    x, y = spot.layout.corner(spot.layout.shown.index(token[0]))
    width, height = spot.layout.panel
    click = (x + (token[2] + 0.5) * width / masks.grid_thw[2], y + (token[1] + 0.5) * height / masks.grid_thw[1])
    assert handlers.locate(run.id, token[0], *click) == token

    for key in ("dense", "sparse", "side_by_side", "report", "poster"):
        assert handlers.store.publish(run, key).is_file(), key
    with Image.open(run.folder / "poster.png") as poster:
        assert max(poster.size) >= 128

    # The Python lines, which name the folder without its path and say so, make the same again.
    assert "model='my-model',  # the folder of the model, with its path" in python_lines(run.report)
    code = python_lines(run.report).replace("'my-model'", repr(str(tmp_path / "my-model")))
    monkeypatch.chdir(tmp_path)
    names = {"print": lambda *words: None}
    exec(compile(code, "compare.py", "exec"), names)
    again = names["report"]["clips"][0]
    assert again["metrics"]["psnr"]["mean"] == pytest.approx(run.clip["metrics"]["psnr"]["mean"], abs=1e-6)
    assert again["sparsity"]["density_overall"] == run.clip["sparsity"]["density_overall"]
    handlers.store.close()


@pytest.mark.parametrize("make", [wan_image_pipeline, wan_video_pipeline], ids=["image-to-video", "video-to-video"])
def test_a_model_that_needs_a_picture_or_a_clip_is_refused_in_one_sentence(make, tmp_path):
    handlers = handlers_of(make(), tmp_path)
    with pytest.raises(UserInputError, match=r"^model must be a text-to-video pipeline, got Wan"):
        handlers.compare(small(model="my-model"), owner="me", tell=lambda share, text: None)
    handlers.store.close()
