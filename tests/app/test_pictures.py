"""Pictures of a pixel DiT through the handlers, the views and the endpoints: what differs from clips."""

import dataclasses
import json
import os
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from gradio_client import Client
from gradio_client.exceptions import AppError as ClientError
from PIL import Image

from diffsieve.app import controls, figures, models, snippet, views
from diffsieve.app import make_examples as module
from diffsieve.app.controls import method_controls, model_controls, sweep_controls
from diffsieve.app.errors import AppError, CancelledError
from diffsieve.app.limits import Limits
from diffsieve.app.models import Shelf, offered_models
from diffsieve.app.server import ServerConfig, serve
from diffsieve.app.snippet import python_lines
from diffsieve.compare import CompareConfig
from diffsieve.errors import UserInputError
from diffsieve.pipelines import defaults, loading
from tests import tiny_pixels
from tests.app.conftest import make_handlers, small
from tests.app.serving import EXAMPLE
from tests.app.test_handlers import files_under
from tests.tiny import wan_pipeline

LAYER = "transformer.blocks.1"
PICTURE = {
    "model": "pixels",
    "method": "llsa",
    "steps": 3,
    "width": 24,
    "height": 16,
    "block_size": None,
    "topk": None,
    "class_name": "Objects",
}


def load(model, *, device=None, dtype=None):
    return tiny_pixels.pipeline() if model == "pixels" else wan_pipeline()


def shelf():
    return Shelf({"tiny": "tiny", "pixels": "pixels"}, load=load)


@pytest.fixture
def handlers(tmp_path):
    made = make_handlers(tmp_path / "store")
    made.shelf = shelf()
    yield made
    made.store.close()


def run(handlers, tell=lambda share, text: None, **changes):
    return handlers.compare(small(**PICTURE | changes), owner="me", tell=tell)


def test_a_run_of_pictures_has_everything_that_the_page_shows(handlers):
    lines = []
    found = run(handlers, lambda share, text: lines.append(text))
    assert (found.pictures, found.what) == (True, "picture")
    assert found.clip["prompt"] == "Objects"
    for key in ("dense", "sparse", "side_by_side", "difference_map", "difference", "mask", "selections"):
        assert handlers.store.publish(found, key).is_file(), key
    with Image.open(found.file("sparse")) as image:
        assert image.size == (24, 16)
    with Image.open(found.folder / "poster.png") as poster:
        assert max(poster.size) >= 128
    assert lines[0] == "dense picture, step 1 of 3"
    assert any(line.startswith("measuring and writing pictures") for line in lines)
    assert run(handlers, topk=None).id == found.id
    assert handlers.shelf.get("pixels").pipe.transformer.blocks[0].attn.processor.__class__.__name__ == (
        "PixelDiTAttnProcessor"
    )


def test_only_the_sparse_picture_is_made_again_for_another_method(handlers):
    run(handlers)
    for changes in ({"topk": 1}, {"method": "ba-att", "block_size": 16}):
        lines = []
        run(handlers, lambda share, text, lines=lines: lines.append(text), **changes)
        assert not any("dense picture" in line for line in lines)


def test_a_spot_of_llsa_tells_detail_and_means(handlers):
    found = run(handlers)
    spot = handlers.spot_view(found.id, LAYER, 2, 1, (0, 5, 7))
    assert (spot.attended, spot.tokens) == (16, 384)  # 2 blocks of 8
    assert spot.means == ((8, 368),)
    selections = handlers.masks(found.id)
    levels = selections.finest(LAYER, 2, 1, (0, 5, 7))[0]
    (left, top), (width, height) = spot.layout.corner(0), spot.layout.panel
    pixels = np.asarray(spot.picture).astype(int)
    frame = np.asarray(Image.open(found.file("sparse"))).astype(int)
    for row, column in ((0, 0), (15, 23), *zip(*np.nonzero(levels == 0), strict=True)):
        if abs(row - 5) < 2 and abs(column - 7) < 2:
            continue  # under the outline of the query
        x, y = left + (column + 0.5) * width / 24, top + (row + 0.5) * height / 16
        light = 1.0 if levels[row, column] == 0 else 0.22
        assert np.abs(pixels[int(y), int(x)] - light * frame[row, column]).max() < 60
        assert handlers.locate(found.id, 0, x, y) == (0, row, column)
    text = views.spot_text(spot, 1)
    assert text.startswith("Head 1: the query at row 5, column 7 attended to 16 of 384 tokens (4.2%) in detail")
    assert "368 in means of 8" in text
    assert handlers.mask_view(found.id, LAYER, 2, 0).width > 200
    for token in ((1, 0, 0), (0, 16, 0), (0, 0, 24), (0, "0", 0)):
        with pytest.raises(UserInputError):
            handlers.spot_view(found.id, LAYER, 2, 1, token)


def test_without_means_a_spot_is_seen_in_detail_or_dark(handlers):
    handlers.shelf = Shelf({"pixels": "pixels"}, load=lambda *_, **__: tiny_pixels.pipeline(levels=2, enrich=False))
    found = run(handlers)
    spot = handlers.spot_view(found.id, LAYER, 2, 1, (0, 5, 7))
    assert (spot.attended, spot.means) == (16, ())
    levels = handlers.masks(found.id).finest(LAYER, 2, 1, (0, 5, 7))[0]
    assert set(np.unique(levels)) == {0, 1, 2}
    (left, top), (width, height) = spot.layout.corner(0), spot.layout.panel
    pixels, frame = np.asarray(spot.picture).astype(int), np.asarray(Image.open(found.file("sparse"))).astype(int)
    for row, column in zip(*np.nonzero(levels == 1), strict=True):
        if abs(row - 5) < 2 and abs(column - 7) < 2:
            continue  # under the outline of the query
        x, y = left + (column + 0.5) * width / 24, top + (row + 0.5) * height / 16
        assert np.abs(pixels[int(y), int(x)] - 0.22 * frame[row, column]).max() < 20
    assert views.spot_text(spot, 1).endswith("the others are dark.")


def test_ba_att_has_block_masks_for_pictures_too(handlers):
    found = run(handlers, method="ba-att", block_size=16, min_tokens=0, warmup=0.4)
    spot = handlers.spot_view(found.id, LAYER, 2, 0, (0, 0, 0))
    assert spot.means == ()
    assert 0 < spot.attended < 384
    assert "the others are dark" in views.spot_text(spot, 0)
    assert views.run_label(found) == "BA-Att 50 %"


def test_a_sweep_goes_over_top_k(handlers):
    runs = handlers.sweep(small(**PICTURE), [4, 1], owner="me", tell=lambda share, text: None)
    assert [found.report["settings"]["topk"] for found in runs] == [1, 4]
    assert runs[0].clip["sparsity"]["density_overall"] < runs[1].clip["sparsity"]["density_overall"]
    html = figures.sweep_charts(runs)
    assert "PSNR against top k" in html
    assert "top k, blocks per level" in html
    assert "sparsity" not in html


@pytest.mark.parametrize("stop_at", ["dense picture, step 2", "sparse picture, step 2", "measuring"])
def test_a_cancelled_picture_leaves_nothing_behind(handlers, stop_at):
    def tell(share, text):
        if text.startswith(stop_at):
            assert handlers.cancel("me") == 1

    with pytest.raises(CancelledError):
        run(handlers, tell)
    assert [name for name in files_under(handlers.store.root) if not name.startswith("dense/")] == []
    processors = handlers.shelf.get("pixels").pipe.transformer.attn_processors.values()
    assert {type(processor).__name__ for processor in processors} == {"PixelDiTAttnProcessor"}


def test_what_is_refused(handlers):
    for changes, message in (
        ({"class_name": "dinosaurs"}, "class must be one of Animals & Nature, Food & Drink, Objects, got 'dinosaurs'"),
        ({"width": 1024, "height": 1024}, "width x height must be at most 262,144 pixels"),
        ({"model": "/etc"}, "model must be one of tiny, pixels"),
        ({"block_size": 1024, "topk": "x"}, "top k must be a whole number"),
    ):
        with pytest.raises(UserInputError, match=message):
            run(handlers, **changes)
    picture, clip = run(handlers), handlers.compare(small(), owner="me", tell=lambda share, text: None)
    with pytest.raises(AppError, match="got a picture of 24 x 16 and a clip of 9 frames of 32 x 32"):
        handlers.pair(picture.id, clip.id)


def test_the_views_speak_of_pictures(handlers):
    found = run(handlers)
    named = [("LLSA top 2", found)]
    metrics = unescape(figures.metrics_table(named))
    assert "Distance from the dense picture, before it becomes a file" in metrics
    assert "mean MSE" not in metrics
    assert "frames" not in metrics.split("not computed")[0]
    assert figures.curves(named) == ""
    assert "most keys of a query, of all" in figures.cost_table(named)
    facts = unescape(views.facts(found))
    assert "<dt>class</dt><dd>Objects</dd>" in facts
    assert "<dt>picture</dt><dd>24 x 16 pixels</dd>" in facts
    assert "negative prompt" not in facts
    assert "of the keys of dense attention" in figures.headline(found)
    html = views.player(("dense", Path("/a.png")), ("b", Path("/b.png")), fps=None, frames=1, title="t")
    assert json.loads(unescape(html.split('data-clip="')[1].split('"')[0]))["fps"] is None


def test_the_python_lines_build_the_same_configuration(handlers):
    found = run(handlers, topk=1)
    seen = {}
    stub = {"summary": {"psnr": {"mean": 1.0}}}
    names = {"CompareConfig": CompareConfig, "compare": lambda config: seen.setdefault("config", config) and stub}
    code = python_lines(found.report).replace("from diffsieve.compare import CompareConfig, compare", "")
    exec(compile(code, "compare.py", "exec"), names | {"print": lambda *words: None})
    made, settings = dataclasses.asdict(seen["config"]), found.report["settings"]
    assert made["prompt"] == ("Objects",)
    assert made["frames"] is None
    for name in ("method", "topk", "block_size", "steps", "width", "height", "guidance_scale", "dtype"):
        assert made[name] == settings[name], name


def test_the_controls_of_a_model_of_pictures():
    offered = shelf()
    picture, clip = (model_controls(offered.get(name), Limits(picture=100)) for name in ("pixels", "tiny"))
    assert picture["class_name"]["choices"] == list(tiny_pixels.CLASSES)
    assert [picture[name]["visible"] for name in ("class_name", "prompt", "negative_prompt", "frames")] == [
        True, False, False, False,
    ]  # fmt: skip
    assert [clip[name]["visible"] for name in ("class_name", "prompt", "frames", "topk")] == [False, True, True, False]
    assert (picture["width"]["value"], picture["height"]["value"]) == (10, 10), "as large as the server allows"
    assert (picture["width"]["step"], clip["width"]["step"]) == (1, 16)
    assert picture["method"]["value"] == "llsa"
    assert (picture["topk"]["value"], picture["block_size"]["value"]) == (2, 8), "as trained"
    assert method_controls("llsa", offered.get("tiny"))["topk"]["value"] == 8
    assert method_controls("ba-att", offered.get("pixels"))["block_size"]["value"] == 128
    assert sweep_controls("llsa", 6)["value"] == "2, 4, 8, 16"
    assert (picture["min_tokens"]["value"], clip["min_tokens"]["value"]) == (None, None)


def test_an_embedded_model_begins_sparse_whatever_the_device_makes_of_its_length(monkeypatch):
    monkeypatch.setattr("diffsieve.app.controls.EMBEDDED", {"tiny": Path("tiny")})
    assert model_controls(shelf().get("tiny"), Limits())["min_tokens"] == {"visible": True, "value": 0}


def test_the_embedded_model_of_pictures_is_offered_as_soon_as_its_folder_is_there(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "mini_pixel_dit"
    known = {**defaults.EMBEDDED, defaults.MINI_PIXEL_DIT: folder}
    for place in (defaults, models, controls, snippet, loading):
        monkeypatch.setattr(place, "EMBEDDED", known)
    assert defaults.MINI_PIXEL_DIT not in offered_models()
    tiny_pixels.pipeline().save_pretrained(folder)
    offered = offered_models()
    assert list(offered) == [defaults.MINI_WAN, defaults.MINI_PIXEL_DIT]
    shelf = Shelf(offered, device="cpu")
    assert shelf.classes(defaults.MINI_PIXEL_DIT) == tuple(tiny_pixels.CLASSES), "known before it is loaded"
    assert shelf.classes(defaults.MINI_WAN) is None
    assert shelf.classes("missing") is None
    assert [shelf.pictures(name) for name in (*offered, "missing")] == [False, True, None]
    model = shelf.get(defaults.MINI_PIXEL_DIT)
    assert (model.classes, model.method) == (tuple(tiny_pixels.CLASSES), "llsa")

    # The first settings of the page: full attention against LLSA, the chosen blocks, a clicked pixel, the same lines.
    made = make_handlers(tmp_path / "store")
    made.shelf = shelf
    given = controls.model_controls(model, Limits())
    first = {name: properties["value"] for name, properties in given.items() if "value" in properties}
    request = small(**first | {"model": defaults.MINI_PIXEL_DIT})
    found = made.compare(request, owner="me", tell=lambda share, text: None)
    assert (found.clip["prompt"], views.run_label(found)) == (tiny_pixels.CLASSES[0], "LLSA top 2")
    assert 0 < found.clip["sparsity"]["density_sparse_steps"] < 1
    assert made.mask_view(found.id, LAYER, 19, 1).width > 200
    assert made.spot_view(found.id, LAYER, 19, 1, (0, 5, 7)).attended == 16
    code = snippet.python_lines(found.report)
    assert f"model={defaults.MINI_PIXEL_DIT!r},\n" in code
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(code, "compare.py", "exec"), names)
    again = names["report"]["summary"]["psnr"]["mean"]
    assert again == pytest.approx(found.clip["metrics"]["psnr"]["mean"])
    assert capsys.readouterr().out.splitlines()[-1] == f"{again} dB"
    made.store.close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "model_index.json of the model damaged must hold a JSON object, got a list"),
        ("{", "model_index.json of the model damaged must be JSON, got"),
        ("[" * 100_000, "model_index.json of the model damaged must be JSON, got"),
        ('{"class_names": 5}', "class_names in model_index.json of the model damaged must be a list of names, got 5"),
        ('{"class_names": ["a", 1]}', "class_names in model_index.json of the model damaged must be a list of names"),
    ],
    ids=["list", "text", "deep", "number", "names"],
)
def test_a_damaged_model_index_is_told_at_the_start_and_later(tmp_path, text, message):
    folder = tmp_path / "damaged"
    folder.mkdir()
    (folder / "model_index.json").write_text(text)
    for look in (lambda: offered_models([str(folder)]), lambda: Shelf({"damaged": str(folder)}).classes("damaged")):
        with pytest.raises(UserInputError, match=f"^{message}"):
            look()


def test_a_model_may_know_its_classes_by_number_alone(tmp_path):
    (tmp_path / "model_index.json").write_text('{"_class_name": "PixelDiTPipeline", "class_names": null}')
    shelf = Shelf(offered_models([str(tmp_path)]))
    assert (shelf.pictures(tmp_path.name), shelf.classes(tmp_path.name)) == (True, None)


def test_wrong_values_are_refused_before_a_model_of_pictures_is_loaded(handlers, tmp_path):
    (tmp_path / "model_index.json").write_text(
        json.dumps({"_class_name": "PixelDiTPipeline", "class_names": tiny_pixels.CLASSES})
    )
    handlers.shelf = Shelf({"pixels": str(tmp_path)}, load=lambda *_, **__: pytest.fail("must not be loaded"))
    for changes in ({"class_name": "Nothing"}, {"width": 7}, {"width": 1280, "height": 1280}, {"topk": 0}):
        with pytest.raises(UserInputError, match="must"):
            run(handlers, **changes)


def test_the_endpoints(tmp_path):
    settings = ServerConfig(folder=tmp_path / "store")
    with serve(settings, shelf=shelf(), examples=tmp_path / "none") as server:
        client = Client(server.url, verbose=False, download_files=str(tmp_path / "downloads"))
        *pictures, answer = client.predict(**PICTURE, guidance=1.0, api_name="/compare")
        for path in pictures:
            with Image.open(path) as image:
                assert image.format == "PNG"
        assert answer["report"]["clips"][0]["prompt"] == "Objects"
        masks = client.predict(answer["id"], api_name="/masks")
        assert masks["grid"] == [1, 16, 24]
        assert masks["layers"][LAYER] == [0, 1, 2]
        mask, attended, counts = client.predict(answer["id"], LAYER, 2, 1, 0, 5, 7, api_name="/attention")
        assert min(Image.open(mask).size + Image.open(attended).size) > 100
        assert counts == {"attended": 16, "tokens": 384, "means": {"8": 368}}
        swept = client.predict(**PICTURE, guidance=1.0, values="1, 4", api_name="/sweep")
        assert [run["report"]["settings"]["topk"] for run in swept["runs"]] == [1, 4]
        for changes, message in (
            ({"class_name": "<script>"}, "class must be one of"),
            ({"width": 10**9}, "width must be a whole number from 8 to 1,280"),
            ({"topk": [2]}, "top k must be a whole number"),
        ):
            with pytest.raises(ClientError, match=message):
                client.predict(**PICTURE | changes, api_name="/compare")
        client.close()


def test_examples_that_are_broken_off_leave_the_old_ones(tmp_path, monkeypatch):
    target = tmp_path / "examples"
    module.make_examples(target, pipe=wan_pipeline(), chosen=((0, 0.5),), **EXAMPLE)
    before = {name: (target / name).read_bytes() for name in files_under(target)}

    def stop(*arguments, **options):
        raise KeyboardInterrupt

    def stop_in_the_middle(source, folder, **options):
        (folder / "half").write_text("half")
        raise KeyboardInterrupt

    for name, broken in (("compare", stop), ("slim", stop), ("shutil.copytree", stop_in_the_middle)):
        with monkeypatch.context() as patch:
            patch.setattr(f"diffsieve.app.make_examples.{name}", broken)
            with pytest.raises(KeyboardInterrupt):
                module.make_examples(target, pipe=wan_pipeline(), chosen=((1, 0.5),), **EXAMPLE)
        assert {name: (target / name).read_bytes() for name in files_under(target)} == before
        assert os.listdir(tmp_path) == ["examples"]
    with monkeypatch.context() as patch:
        patch.setattr(module, "MAX_BYTES", 1000)
        with pytest.raises(Exception, match="must have at most 1000 bytes"):
            module.make_examples(target, pipe=wan_pipeline(), chosen=((1, 0.5),), **EXAMPLE)
    assert {name: (target / name).read_bytes() for name in files_under(target)} == before


def test_an_example_of_pictures(tmp_path):
    module.make_examples(tmp_path / "examples", chosen=(), pipe=wan_pipeline(), pictures=tiny_pixels.pipeline())
    made = make_handlers(tmp_path / "store", examples=tmp_path / "examples")
    (example,) = made.runs()
    assert (example.id, example.pictures, example.clip["prompt"]) == ("example-1", True, tiny_pixels.CLASSES[0])
    for key in ("dense", "sparse", "difference_map", "selections", "poster"):
        assert made.store.publish(example, key).is_file(), key
    assert made.masks(example.id).steps_of(LAYER) == [0, 19]
    assert made.spot_view(example.id, LAYER, 19, 0, (0, 0, 0)).attended == 16
    made.store.close()
