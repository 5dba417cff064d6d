"""Pictures of a pixel-space DiT through `generate`, in Python and on the command line."""

import json

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from diffsieve.cli import app
from diffsieve.compare import GenerateConfig, generate
from diffsieve.errors import DiffsieveError, UserInputError
from tests import tiny_pixels


@pytest.fixture
def config(tmp_path):
    return {"steps": 2, "device": "cpu", "out": tmp_path / "out"}


def test_a_picture_for_each_class_and_seed(config):
    seen = []
    pipe = tiny_pixels.pipeline()
    settings = GenerateConfig(**config, prompt=("objects", "0"), seed=(3, 4), height=8, width=12)
    report = generate(settings, pipe=pipe, progress=seen.append)
    names = [f"{label}-seed{seed}.png" for label in ("001-objects", "002-animals-nature") for seed in (3, 4)]
    assert sorted(path.name for path in (config["out"]).iterdir()) == sorted([*names, "report.json"])
    assert [clip["file"] for clip in report["clips"]] == names
    assert json.loads((config["out"] / "report.json").read_text()) == report
    assert report["settings"]["own_attention"] == "llsa"
    picture = Image.open(config["out"] / names[1])
    expected = pipe("objects", 8, 12, num_inference_steps=2, generator=torch.Generator().manual_seed(4)).images[0]
    assert picture.tobytes() == expected.tobytes()
    assert [(entry.item, entry.step) for entry in seen if entry.stage == "done"] == [(i, 2) for i in range(4)]
    assert len(report["clips"][0]["seconds"]["steps"]) == 2


def test_without_a_prompt(config):
    assert generate(GenerateConfig(**config), pipe=tiny_pixels.pipeline())["prompt"] == ["Animals & Nature"]
    other = {**config, "out": config["out"] / "none"}
    report = generate(GenerateConfig(**other), pipe=tiny_pixels.pipeline(num_classes=0))
    assert [clip["file"] for clip in report["clips"]] == ["001-picture-seed0.png"]


def test_files_are_not_overwritten_by_chance(config):
    generate(GenerateConfig(**config), pipe=tiny_pixels.pipeline())
    with pytest.raises(UserInputError, match="out must not hold"):
        generate(GenerateConfig(**config), pipe=tiny_pixels.pipeline())
    generate(GenerateConfig(**config), pipe=tiny_pixels.pipeline(), overwrite=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": ("dinosaurs",)}, "class_labels must be .*, got 'dinosaurs'"),
        ({"prompt": ("7",)}, "class_labels must be .*, got 7"),
        ({"method": "ba-att"}, "method must be left out for a model of pictures, .*, got 'ba-att'"),
        ({"frames": 5}, "frames must be left out for a model of pictures, got 5"),
        ({"fps": 8}, "fps must be left out for a model of pictures, got 8"),
        ({"backend": "torch"}, "backend must be left out .*, got 'torch'"),
        ({"sparsity": 0.75}, "sparsity must be left out .*, got 0.75"),
        ({"topk": 4}, "topk must be left out .*, got 4"),
        ({"negative_prompt": "blur"}, "negative_prompt must be left out"),
        ({"height": 5000}, "height must be a whole number of pixels"),
    ],
)
def test_wrong_arguments_are_named(config, options, message):
    with pytest.raises(UserInputError, match=message):
        generate(GenerateConfig(**(config | options)), pipe=tiny_pixels.pipeline())
    assert not config["out"].exists() or not list(config["out"].glob("*.png"))


def test_a_prompt_for_a_model_without_classes_is_refused(config):
    with pytest.raises(UserInputError, match="prompt must be left out for a model without classes, got 'cats'"):
        generate(GenerateConfig(**config, prompt=("cats",)), pipe=tiny_pixels.pipeline(num_classes=0))


def test_broken_weights_are_told(config):
    pipe = tiny_pixels.pipeline()
    torch.nn.init.constant_(pipe.transformer.proj_out.bias, float("nan"))
    with pytest.raises(DiffsieveError, match="the generated picture must have finite frames"):
        generate(GenerateConfig(**config), pipe=pipe)
    assert not list(config["out"].glob("*.png"))


def test_the_command(tmp_path, monkeypatch):
    tiny_pixels.pipeline().save_pretrained(tmp_path / "model")
    out = tmp_path / "out"
    monkeypatch.chdir(tmp_path)
    words = ["generate", "--model", "model", "--out", str(out), "--steps", "1", "--device", "cpu"]
    done = CliRunner().invoke(app, [*words, "--prompt", "Objects"])
    assert done.exit_code == 0, done.output
    assert Image.open(out / "001-objects-seed0.png").size == (16, 16)
    assert "model · llsa · 16 x 16 · 1 steps" in " ".join(done.stdout.split())
    wrong = CliRunner().invoke(app, [*words, "--prompt", "rockets", "--overwrite"])
    assert isinstance(wrong.exception, UserInputError) or wrong.exit_code == 1
