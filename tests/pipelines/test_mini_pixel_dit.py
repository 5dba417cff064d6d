"""The embedded pixel DiT as it ships: size, card, defaults, what it draws, and that saving it changes nothing."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from diffsieve import PixelDiTPipeline, load_pipeline
from diffsieve.cli import app
from diffsieve.pipelines.defaults import EMBEDDED, MINI_PIXEL_DIT, generation_defaults
from diffsieve.pipelines.training.pixel_dit.config import SamplingConfig
from diffsieve.pipelines.training.pixel_dit.export import MINI_BYTES, model_card

FOLDER = EMBEDDED[MINI_PIXEL_DIT]
RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "cpu" / "mini_pixel_dit.json"
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
CLASSES = (
    "Activities",
    "Animals & Nature",
    "Flags",
    "Food & Drink",
    "Objects",
    "People & Body",
    "Smileys & Emotion",
    "Symbols",
    "Travel & Places",
)


@pytest.fixture(scope="module")
def pipe():
    loaded = load_pipeline(MINI_PIXEL_DIT, device="cpu")
    loaded.set_progress_bar_config(disable=True)
    return loaded


def draw(pipe, classes, seed, **arguments):
    """(B, 3, H, W) in [0, 1]: a picture of each class, all from the same noise."""
    generators = [torch.Generator().manual_seed(seed) for _ in classes]
    return pipe(classes, generator=generators, output_type="pt", **arguments).images


def test_the_folder_is_small_and_readable_and_holds_no_pickle():
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= MINI_BYTES
    assert {path.suffix for path in files} == {".json", ".md", ".safetensors"}
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in files)
    assert json.loads((FOLDER / "model_index.json").read_text())["_class_name"] == "PixelDiTPipeline"
    assert {tensor.dtype for tensor in load_file(FOLDER / WEIGHTS).values()} == {torch.bfloat16}


def test_it_keeps_the_two_levels_that_it_was_trained_with(pipe):
    assert {block.attn.options["levels"] for block in pipe.transformer.blocks} == {2}


def test_the_card_is_made_from_the_figures_and_names_source_and_licence():
    training = json.loads((FOLDER / "training.json").read_text())
    card = (FOLDER / "README.md").read_text()
    assert model_card(training) == card
    assert [leg["side"] for leg in training["legs"]] == [32, 64, 128]
    for words in ("Fluent Emoji", "@lobehub/fluent-emoji-3d", "emoji-datasource-google", "MIT", "Apache-2.0"):
        assert words in card


def test_no_file_names_a_place_on_the_machine_that_made_it():
    for path in FOLDER.rglob("*"):
        if path.suffix in (".json", ".md"):
            assert not re.search(r"""(^|[\s"'(=])(/|~/|[A-Z]:\\)\w""", path.read_text()), path


def test_the_defaults_are_those_of_its_training(pipe):
    sampling = SamplingConfig()
    assert tuple(pipe.config.class_names) == CLASSES
    given = generation_defaults(pipe)
    assert (given.steps, given.height, given.width, given.frames) == (20, 128, 128, 1)
    assert (given.steps, given.guidance_scale) == (sampling.steps, sampling.guidance_scale)
    assert tuple(pipe.config.guidance_interval) == sampling.guidance_interval
    config = pipe.transformer.config
    assert (config.sample_size, config.attention_method, config.token_order) == (128, "llsa", "hilbert")
    training = json.loads((FOLDER / "training.json").read_text())
    assert training["parameters"] == sum(parameter.numel() for parameter in pipe.transformer.parameters())
    assert training["sampling"]["guidance_scale"] == given.guidance_scale


def test_saving_and_loading_changes_no_bit(pipe, tmp_path):
    pipe.save_pretrained(tmp_path)
    again = PixelDiTPipeline.from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    before, after = pipe.transformer.state_dict(), again.transformer.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    call = {"height": 32, "width": 32, "num_inference_steps": 3}
    assert torch.equal(draw(pipe, ["Flags"], 0, **call), draw(again, ["Flags"], 0, **call))


def test_the_command_draws_with_it_at_once(tmp_path):
    call = ["generate", "--model", MINI_PIXEL_DIT, "--prompt", "Flags", "--seed", "3", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, [*call, "--height", "32", "--width", "32", "--steps", "2", "--device", "cpu"])
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["settings"]["own_attention"] == "llsa"
    assert report["settings"]["guidance_scale"] == SamplingConfig().guidance_scale
    assert (tmp_path / "out" / report["clips"][0]["file"]).stat().st_size > 500


def test_the_recorded_run_on_a_cpu_had_the_defaults_and_fits_two_cores():
    record = json.loads(RECORD.read_text())
    assert record["cores"] == 2
    for run in record["runs"]:
        settings = {"width": 128, "height": 128, "steps": 20, "guidance_scale": 2.5, "dtype": "float32"}
        assert run["settings"] == settings
        assert len(run["seconds_steps"]) == 20
        # Others were at work meanwhile, which lengthens the wall time: of both cores, the work alone must fit.
        assert run["cpu_seconds"] / 2 < record["goal_seconds"] == 90


@pytest.mark.slow
def test_a_smiley_is_yellow_on_white_and_a_flag_is_not(pipe):
    # Eight steps without guidance show what the classes are, in a fraction of the time.
    smiley, flag = draw(pipe, ["Smileys & Emotion", "Flags"], 1006, num_inference_steps=8, guidance_scale=1.0)
    assert smiley.shape == flag.shape == (3, 128, 128)
    ends = (slice(8), slice(-8, None))
    assert min(float(smiley[:, rows, columns].mean()) for rows in ends for columns in ends) > 0.9
    # of what is drawn, white left out
    shares = [float((yellow(picture) & drawn(picture)).sum() / drawn(picture).sum()) for picture in (smiley, flag)]
    assert shares[0] > 0.5
    assert shares[1] < 0.2
    assert float((smiley - flag).abs().mean()) > 0.1


def drawn(picture):
    """(3, H, W) in [0, 1] -> (H, W): what is not white."""
    return picture.amin(0) < 0.9


def yellow(picture):
    """(3, H, W) in [0, 1] -> (H, W): the yellow to orange of the faces."""
    red, green, blue = picture
    return (red > 0.8) & (green > 0.4) & (green < 0.9) & (blue < 0.5)
