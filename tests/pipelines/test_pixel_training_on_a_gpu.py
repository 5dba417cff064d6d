"""Training of the pixel DiT on a CUDA GPU: bfloat16, compiled blocks, the kernels of LLSA, both optimisers."""

import json

import numpy as np
import pytest
from PIL import Image

from diffsieve import PixelDiTPipeline
from diffsieve.pipelines.training.pixel_dit.config import PixelTrainConfig
from diffsieve.pipelines.training.pixel_dit.run import train_pixel_dit

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    generator = np.random.default_rng(0)
    for name in ("bars", "blobs"):
        (folder / name).mkdir()
        for i in range(8):
            Image.fromarray(generator.integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(folder / name / f"{i}.png")
    return folder


def settings(steps, *, method="llsa", **dit):
    # heads of 64 channels and 1,024 tokens and more, which the kernels take
    return PixelTrainConfig.from_dict(
        {
            "model": {"layers": 2, "heads": 2, "attention_method": method},
            "dit": {"steps": steps, "phases": [{"side": 32, "batch_size": 8}], "log_every": 1, "sample_every": 0.0}
            | dit,
            "sampling": {"images": 4, "batch_size": 4, "steps": 2},
        }
    )


def curve(folder):
    lines = [json.loads(line) for line in (folder / "dit" / "log.jsonl").read_text().splitlines()]
    return np.array([line["losses"]["loss"] for line in lines])


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("method", ["llsa", "full", "topk"])
def test_compiled_training_follows_eager(tmp_path, data, method, optimizer):
    config = {"method": method, "optimizer": optimizer}
    train_pixel_dit(tmp_path / "eager", data, settings(6, **config, compile=False))
    train_pixel_dit(tmp_path / "compiled", data, settings(6, **config))
    np.testing.assert_allclose(curve(tmp_path / "compiled"), curve(tmp_path / "eager"), rtol=0.02)


def test_gradient_checkpointing_follows_plain_training(tmp_path, data):
    train_pixel_dit(tmp_path / "plain", data, settings(4))
    train_pixel_dit(tmp_path / "checkpointed", data, settings(4, gradient_checkpointing=True))
    np.testing.assert_allclose(curve(tmp_path / "checkpointed"), curve(tmp_path / "plain"), rtol=0.02)


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(tmp_path, data):
    """Sums on a GPU come in any order, so curves are close and not equal."""
    phases = [{"side": 32, "batch_size": 8, "until": 0.5}, {"side": 64, "batch_size": 4}]
    config = settings(8, phases=phases)
    train_pixel_dit(tmp_path / "whole", data, config)
    # no time: pauses at the first entry of the log
    paused = train_pixel_dit(tmp_path / "legs", data, config, max_seconds=1e-3, pause=True)
    assert not paused["finished"]
    train_pixel_dit(tmp_path / "legs", data, resume=True)
    np.testing.assert_allclose(curve(tmp_path / "legs"), curve(tmp_path / "whole"), rtol=0.02)


def test_training_learns_and_its_model_draws(tmp_path, data):
    summary = train_pixel_dit(tmp_path, data, settings(120, log_every=10, muon_lr=0.02, adam_lr=2e-3))
    losses = curve(tmp_path)
    assert np.isfinite(losses).all()
    assert losses[-3:].mean() < 0.9 * losses[0]
    pipe = PixelDiTPipeline.from_pretrained(summary["model"])
    pipe.to("cuda")
    pipe.set_progress_bar_config(disable=True)
    image = pipe(["bars", 1], num_inference_steps=2, output_type="np").images
    assert image.shape == (2, 32, 32, 3)
    assert np.isfinite(image).all()
