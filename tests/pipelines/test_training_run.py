"""Whole training runs at tiny size: stages, interruption, continuation, export and measurement."""

import dataclasses
import json
import math
import stat

import pytest
import torch

from diffsieve.errors import DiffsieveError, UserInputError
from diffsieve.pipelines.training.batches import FAST_MOTIONS, ClipSource
from diffsieve.pipelines.training.captions import MOTIONS
from diffsieve.pipelines.training.checkpoint import load_weights
from diffsieve.pipelines.training.config import ClipSize, TrainConfig
from diffsieve.pipelines.training.run import load_trained, train_mini_wan
from tests.shapes import shape_sprites
from tests.tiny_training import LARGE, SIZE, tiny_settings, write_sprites


@pytest.fixture(scope="module")
def sprites_path(tmp_path_factory):
    return write_sprites(tmp_path_factory.mktemp("sprites") / "sprites.npz")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, sprites_path):
    """Folder and summary of a complete run."""
    out = tmp_path_factory.mktemp("finished") / "run"
    return out, train_mini_wan(out, sprites_path, tiny_settings(), copy_to=out.parent / "copy")


def same_weights(one, other):
    first, second = load_weights(one), load_weights(other)
    assert first.keys() == second.keys()
    return all(torch.equal(first[name], second[name]) for name in first)


def log_steps(folder):
    return [json.loads(line)["step"] for line in (folder / "log.jsonl").read_text().splitlines()]


class Stop(Exception):  # noqa: N818 - stands for a kill
    pass


def interrupted(out, sprites_path, config, at_step, **arguments):
    """Run until the log reaches a step, with a save after every step before it."""

    def report(entry):
        if entry.step == at_step:
            raise Stop

    with pytest.raises(Stop):
        train_mini_wan(out, sprites_path, config, report=report, **arguments)


def test_a_run_leaves_a_pipeline_figures_and_a_card(finished):
    out, summary = finished
    assert summary["finished"]
    assert [summary[name]["step"] for name in ("vae", "dit")] == [4, 4]
    assert 0 <= summary["quality"]["subject"] <= 1
    assert json.loads((out / "quality.json").read_text()) == summary["quality"]
    card = (out / "model" / "README.md").read_text()
    assert "5 x 32 x 32, 9 x 48 x 48" in card
    assert f"{summary['quality']['subject']:.1%}" in card
    assert json.loads((out / "model" / "training.json").read_text())["vae_quality"] == summary["vae_quality"]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o644 for path in (out / "model").rglob("*") if path.is_file())


def test_a_run_is_copied_out_without_its_states(finished):
    out, _ = finished
    copy = out.parent / "copy"
    assert not list(copy.rglob("state.pt"))
    for stage in ("vae", "dit"):
        assert same_weights(out / stage, copy / stage)
    for name in ("settings.json", "quality.json", "sheet.png", "vae/latents.json", "dit/log.jsonl"):
        assert (copy / name).read_bytes() == (out / name).read_bytes()


def test_the_exported_pipeline_is_stock_and_generates(finished):
    from diffusers import WanPipeline

    pipe = WanPipeline.from_pretrained(finished[0] / "model")
    pipe.set_progress_bar_config(disable=True)
    video = pipe(
        "a ring moves up over a red background",
        num_frames=5,
        height=32,
        width=32,
        num_inference_steps=2,
        output_type="pt",
        generator=torch.Generator().manual_seed(0),
    ).frames
    assert video.shape == (1, 5, 3, 32, 32)
    assert video.isfinite().all()


def test_the_export_holds_the_averaged_weights_in_bfloat16(finished):
    out, _ = finished
    pipe = load_trained(out / "model", torch.device("cpu"))
    tensors = load_weights(out / "dit") | load_weights(out / "vae")
    for name in ("transformer", "text_encoder", "vae"):
        for key, value in getattr(pipe, name).state_dict().items():
            assert torch.equal(value, tensors[f"{name}.{key}"].bfloat16().float()), key


def test_an_occupied_folder_is_refused(finished, sprites_path):
    with pytest.raises(UserInputError, match="out must not hold a run of vae, dit"):
        train_mini_wan(finished[0], sprites_path, tiny_settings())


def test_a_finished_run_resumes_without_a_step(finished, sprites_path, caplog):
    out, summary = finished
    before = load_weights(out / "dit")
    again = train_mini_wan(out, sprites_path, resume=True)
    assert "holds no checkpoint" not in caplog.text
    assert again["dit"]["step"] == summary["dit"]["step"]
    assert again["quality"]["subject"] == summary["quality"]["subject"]
    assert all(torch.equal(value, before[name]) for name, value in load_weights(out / "dit").items())


def test_other_settings_for_a_resumed_run_are_refused(finished, sprites_path):
    with pytest.raises(UserInputError, match="settings must be left out or equal"):
        train_mini_wan(finished[0], sprites_path, tiny_settings(5), resume=True)


@pytest.mark.parametrize("stage", ["vae", "decoder", "dit"])
def test_a_killed_stage_resumes_to_the_same_weights(tmp_path, finished, sprites_path, stage):
    source, _ = finished
    saving = {stage: {"save_every": 1e-9}}
    arguments = {"stage": stage} | ({} if stage == "vae" else {"start_from": source})
    config = tiny_settings(6, seed=5, **saving)
    train_mini_wan(tmp_path / "whole", sprites_path, config, **arguments)
    interrupted(tmp_path / "cut", sprites_path, config, at_step=4, **arguments)
    # killed in step 4, so the state is that of step 3; the log knows more
    assert log_steps(tmp_path / "cut" / stage) == [1, 2, 3, 4]
    assert json.loads((tmp_path / "cut" / stage / "weights.json").read_text())["step"] == 3
    load_weights(tmp_path / "cut" / stage)
    train_mini_wan(tmp_path / "cut", sprites_path, resume=True, **arguments)
    assert log_steps(tmp_path / "cut" / stage) == [1, 2, 3, 4, 5, 6]
    assert same_weights(tmp_path / "whole" / stage, tmp_path / "cut" / stage)


def test_a_killed_leg_can_be_finished_from_its_copy(tmp_path, finished, sprites_path):
    source, _ = finished
    config = tiny_settings(6, dit={"save_every": 1e-9})
    places = {"stage": "dit", "start_from": source / "model", "copy_to": tmp_path / "copy"}
    interrupted(tmp_path / "run", sprites_path, config, at_step=4, **places)
    summary = train_mini_wan(tmp_path / "copy", sprites_path, stage="finish", start_from=source / "model")
    assert summary["quality"]["prompts"] == 2
    pipe = load_trained(tmp_path / "copy" / "model", torch.device("cpu"))
    saved = load_weights(tmp_path / "run" / "dit")
    for key, value in pipe.transformer.state_dict().items():
        assert torch.equal(value, saved[f"transformer.{key}"].float()), key


@pytest.mark.parametrize("kind", ["model", "run"])
def test_continuing_leaves_encoder_and_statistics_alone(tmp_path, finished, sprites_path, kind):
    source, _ = finished
    start = source / "model" if kind == "model" else source
    config = tiny_settings(seed=1)
    summary = train_mini_wan(tmp_path, sprites_path, config, stage="continue", start_from=start)
    assert summary["finished"]
    assert (tmp_path / "decoder" / "latents.json").read_bytes() == (tmp_path / "vae" / "latents.json").read_bytes()
    before, after = load_weights(source / "vae"), load_weights(tmp_path / "decoder")
    for key, value in after.items():
        part = key.split(".")[1]
        expected = before[key].bfloat16().float() if kind == "model" else before[key]
        if part in ("encoder", "quant_conv"):
            assert torch.equal(value, expected), key
    changed = {key.split(".")[1] for key in after if not torch.equal(after[key], before[key].bfloat16().float())}
    assert {"decoder", "post_quant_conv"} <= changed
    old = load_trained(source / "model", torch.device("cpu")).vae
    new = load_trained(tmp_path / "model", torch.device("cpu")).vae
    assert all(torch.equal(old.state_dict()[f"encoder.{k}"], v) for k, v in new.encoder.state_dict().items())
    assert list(new.config.latents_mean) == list(old.config.latents_mean)
    legs = json.loads((tmp_path / "model" / "training.json").read_text())["legs"]
    assert [leg["stage"] for leg in legs] == ["vae", "dit", "decoder", "dit"]
    assert legs[-1]["sizes"] == [[SIZE["frames"], 32, 32], [LARGE["frames"], 48, 48]]


def test_the_transformer_begins_with_the_given_weights(tmp_path, finished, sprites_path):
    still = {"muon_lr": 0.0, "adam_lr": 0.0, "weight_decay": 0.0, "steps": 1}
    config = tiny_settings(dit=still)
    train_mini_wan(tmp_path, sprites_path, config, stage="dit", start_from=finished[0] / "model")
    assert same_weights(tmp_path / "dit", finished[0] / "dit")


@pytest.mark.parametrize("stage", ["dit", "decoder"])
def test_a_stage_without_an_autoencoder_is_refused(tmp_path, sprites_path, stage):
    with pytest.raises(UserInputError, match=r"no weights\.json; train that stage first"):
        train_mini_wan(tmp_path, sprites_path, tiny_settings(), stage=stage)


def test_a_start_that_does_not_fit_is_refused(tmp_path, finished, sprites_path):
    with pytest.raises(UserInputError, match="start_from must be a pipeline folder"):
        train_mini_wan(tmp_path / "a", sprites_path, tiny_settings(), stage="dit", start_from=tmp_path)
    wide = tiny_settings(model={"ffn_dim": 48})
    with pytest.raises(UserInputError, match="weights of the transformer must fit the model settings"):
        train_mini_wan(tmp_path / "b", sprites_path, wide, stage="dit", start_from=finished[0])


def test_a_pipeline_of_other_subjects_is_refused(tmp_path, finished):
    import numpy as np

    sprites = shape_sprites()
    pixels = (sprites.rgba * 255).round().numpy().astype(np.uint8)
    names = np.array([f"other {name}" for name in sprites.names])
    path = tmp_path / "sprites.npz"
    np.savez(path, rgba_dx=np.diff(pixels, axis=-1, prepend=np.uint8(0)), names=names)
    with pytest.raises(UserInputError, match="sprites must be those"):
        train_mini_wan(tmp_path / "run", path, tiny_settings(), stage="dit", start_from=finished[0] / "model")


def test_a_poor_autoencoder_stops_the_run(tmp_path, sprites_path):
    with pytest.raises(DiffsieveError, match="must let the judge see at least 100%"):
        train_mini_wan(tmp_path, sprites_path, tiny_settings(vae={"min_ceiling": 1.0}))
    assert load_weights(tmp_path / "vae")
    assert not (tmp_path / "dit").exists()


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, sprites_path):
    config = tiny_settings(8, vae={"adam_lr": 1e30, "clip_norm": 1e30, "save_every": 1e-9})
    with pytest.raises(DiffsieveError, match="must be finite"):
        train_mini_wan(tmp_path, sprites_path, config, stage="vae")


def test_the_schedules_are_fitted_to_the_leg(tmp_path, finished, sprites_path):
    timed = {"steps": None, "seconds": 1000.0}
    config = tiny_settings(decoder=timed, dit={**timed, "seconds": 3000.0}, reserve_seconds=0.5)
    arguments = {"stage": "continue", "start_from": finished[0], "max_seconds": 8.5}
    entries = []
    summary = train_mini_wan(tmp_path, sprites_path, config, report=entries.append, **arguments)
    assert summary["finished"]
    # a quarter for the decoder, after its set-up, and what is left for the transformer
    assert 0.3 < summary["decoder"]["seconds"] < 2.7
    assert summary["decoder"]["seconds"] + summary["dit"]["seconds"] < 8.6
    assert entries[-1].progress == 1.0
    assert entries[-1].learning_rate < 0.5
    assert all(math.isfinite(entry.losses["loss"]) for entry in entries)


def test_a_paused_leg_goes_on_with_its_schedule(tmp_path, sprites_path, caplog):
    config = tiny_settings(vae={"steps": None, "seconds": 2.0})
    arguments = {"stage": "vae", "pause": True, "resume": True}
    first = train_mini_wan(tmp_path, sprites_path, config, max_seconds=1.2, **arguments)
    assert "holds no checkpoint to go on from, so a new run begins there" in caplog.text
    assert not first["finished"]
    assert 0 < first["vae"]["seconds"] < 2
    assert load_weights(tmp_path / "vae")
    second = train_mini_wan(tmp_path, sprites_path, max_seconds=60, **arguments)
    assert second["finished"]
    assert second["vae"]["seconds"] == pytest.approx(2.0, abs=0.7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stage": "everything"}, "stage must be one of all, continue, vae, decoder, dit, finish"),
        ({"max_seconds": -1.0}, "max_seconds must be positive"),
        ({"pause": True}, "pause needs max_seconds"),
        ({"stage": "finish"}, "out must hold a trained run"),
        ({"stage": "vae", "max_seconds": 1e-6}, "max_seconds must leave time for vae"),
    ],
    ids=["stage", "seconds", "pause", "finish", "no-time"],
)
def test_wrong_arguments_are_named(tmp_path, sprites_path, arguments, message):
    config = tiny_settings(vae={"steps": None})
    with pytest.raises(UserInputError, match=message):
        train_mini_wan(tmp_path / "run", sprites_path, config, **arguments)


def test_missing_sprites_name_the_command(tmp_path):
    with pytest.raises(UserInputError, match="diffsieve data sprites"):
        train_mini_wan(tmp_path / "run", tmp_path / "none.npz")
    assert not (tmp_path / "run").exists()


def test_other_precisions_are_refused(tmp_path, sprites_path, monkeypatch):
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    try:
        with pytest.raises((UserInputError, ValueError), match="precision"):
            train_mini_wan(tmp_path, sprites_path, tiny_settings())
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("stage", ["decoder", "dit"])
def test_samples_are_drawn_while_training(tmp_path, finished, sprites_path, stage):
    from PIL import Image

    config = tiny_settings(2, **{stage: {"sample_every": 1e-9}})
    train_mini_wan(tmp_path, sprites_path, config, stage=stage, start_from=finished[0])
    sheets = sorted((tmp_path / stage / "samples").iterdir())
    assert [path.name for path in sheets] == ["0000001.png", "0000002.png"]
    assert min(Image.open(sheets[0]).size) > 100


def test_mixed_precision_of_the_launcher_is_used(tmp_path, finished, sprites_path, monkeypatch):
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # one process has one precision
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    sampling = {"sample_every": 1e-9}
    config = tiny_settings(2, decoder=sampling, dit=sampling)
    try:
        summary = train_mini_wan(tmp_path, sprites_path, config, stage="continue", start_from=finished[0])
        assert AcceleratorState().mixed_precision == "bf16"
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    assert summary["finished"]
    assert len(list((tmp_path / "dit" / "samples").iterdir())) == 2


def test_finishing_again_measures_with_other_settings(tmp_path, finished, sprites_path):
    import shutil

    shutil.copytree(finished[0], tmp_path / "run")
    config = TrainConfig.load(None, ["evaluation.prompts=1", "evaluation.steps=1"])
    small = dataclasses.replace(config.evaluation, size=tiny_settings().evaluation.size)
    config = dataclasses.replace(config, evaluation=small)
    summary = train_mini_wan(tmp_path / "run", sprites_path, config, stage="finish")
    assert summary["quality"]["prompts"] == 1
    assert json.loads((tmp_path / "run" / "settings.json").read_text())["evaluation"]["prompts"] == 2


def test_a_share_of_fast_motion():
    size = ClipSize(batch_size=40)
    sprites = shape_sprites()
    fast = torch.tensor([MOTIONS.index(name) for name in FAST_MOTIONS])

    def shares(source):
        batches = [source.specs(step, size) for step in range(4)]
        assert all(len(batch) == 40 for batch in batches)
        return [float(torch.isin(batch.motion, fast).float().mean()) for batch in batches]

    assert sum(shares(ClipSource(sprites, 1))) / 4 < 0.4
    # half of them chosen, and about a quarter of the other half
    assert all(0.5 <= share < 0.85 for share in shares(ClipSource(sprites, 1, fast_share=0.5)))
    one, other = ClipSource(sprites, 1, 0, 2, fast_share=0.5), ClipSource(sprites, 1, 1, 2, fast_share=0.5)
    assert not set(one.specs(3, size).seed.tolist()) & set(other.specs(3, size).seed.tolist())
