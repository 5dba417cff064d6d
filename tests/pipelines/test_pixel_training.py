"""Training of the pixel DiT: data order, loss, a whole run, killed and resumed runs, fine-tuning to larger pictures."""

import json
import math
import shutil
import stat
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from diffsieve import PixelDiTPipeline, UserInputError, load_pipeline
from diffsieve.errors import DiffsieveError
from diffsieve.pipelines.training.checkpoint import load_weights
from diffsieve.pipelines.training.pixel_dit.config import (
    SHAPES,
    ImagePhase,
    PixelModelConfig,
    PixelStageConfig,
    PixelTrainConfig,
)
from diffsieve.pipelines.training.pixel_dit.export import model_card
from diffsieve.pipelines.training.pixel_dit.images import ImageSet, load_images
from diffsieve.pipelines.training.pixel_dit.loss import flow_loss, sample_times
from diffsieve.pipelines.training.pixel_dit.run import train_pixel_dit
from diffsieve.pipelines.training.pixel_dit.sampling import contact_sheet
from diffsieve.pipelines.training.pixel_dit.stage import build_transformer, load_transformer
from diffsieve.pipelines.training.pixel_dit.stream import ImageStream, augmented

CPU = torch.device("cpu")
PHASES = [{"side": 8, "batch_size": 4, "until": 0.5}, {"side": 16, "batch_size": 2}]


def settings(steps=4, *, seed=0, model=None, **dit):
    return PixelTrainConfig.from_dict(
        {
            "seed": seed,
            "model": {"layers": 1, "heads": 1, "head_dim": 16, "block_size": 8, "topk": 2, "rope_extent": 16}
            | (model or {}),
            "dit": {"steps": steps, "phases": PHASES, "compile": False, "log_every": 1, "save_every": 1000.0} | dit,
            "sampling": {"images": 4, "batch_size": 3, "steps": 2},
            "reserve_seconds": 0.5,
        }
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    generator = np.random.default_rng(0)
    for name, count in (("blobs", 4), ("bars", 3)):
        (folder / name).mkdir()
        for i in range(count):
            Image.fromarray(generator.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(folder / name / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    return out, train_pixel_dit(out, data, settings(), copy_to=out.parent / "copy")


def losses(folder):
    lines = [json.loads(line) for line in (folder / "dit" / "log.jsonl").read_text().splitlines()]
    return [(line["step"], line["losses"]["loss"]) for line in lines]


def same_weights(one, other):
    first, second = load_weights(one), load_weights(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


class Stop(Exception):  # noqa: N818 - stands for a kill
    pass


def killed(out, data, config, at_step, **arguments):
    def report(entry):
        if entry.step == at_step:
            raise Stop

    with pytest.raises(Stop):
        train_pixel_dit(out, data, config, report=report, **arguments)


def numbered(count):
    pixels = torch.arange(count, dtype=torch.uint8)[:, None, None, None].expand(-1, 3, 4, 4).contiguous()
    return ImageSet(pixels, torch.arange(count) % 2, ("a", "b"), (), "0")


def test_every_picture_comes_once_in_an_epoch_over_all_processes():
    streams = [ImageStream(numbered(12), 5, CPU, rank, 2) for rank in range(2)]
    seen = [streams[rank].positions(step, 3).tolist() for step in range(4) for rank in range(2)]
    flat = [number for part in seen for number in part]
    assert sorted(flat[:12]) == sorted(flat[12:]) == list(range(12))
    assert flat[:12] != flat[12:]
    assert ImageStream(numbered(12), 5, CPU, 1, 2).positions(3, 3).tolist() == seen[-1]
    assert ImageStream(numbered(12), 6, CPU).positions(0, 12).tolist() != flat[:12]
    assert sorted(ImageStream(numbered(3), 0, CPU).positions(0, 6).tolist()) == [0, 0, 1, 1, 2, 2]


def test_batches_hold_pictures_with_their_labels():
    stream = ImageStream(numbered(10), 0, CPU)
    pixels, labels = stream.batch(1, ImagePhase(side=2, batch_size=4))
    numbers = ((pixels[:, 0, 0, 0] + 1) * 127.5).round().long()
    assert pixels.shape == (4, 3, 2, 2)
    assert torch.equal(labels, numbers % 2)
    assert numbers.tolist() == stream.positions(1, 4).tolist()


def test_augmentation_mirrors_and_shifts_within_reach():
    pixels = torch.arange(16.0).view(1, 1, 1, 16).expand(64, 3, 16, 16)
    config = PixelStageConfig(flip_share=1.0)
    assert torch.equal(augmented(pixels, config, torch.Generator().manual_seed(0)), pixels.flip(-1))
    moved = augmented(pixels, PixelStageConfig(shift=0.125), torch.Generator().manual_seed(0))
    offsets = moved[:, 0, 3, 8] - 8
    assert set(offsets.tolist()) == {-2, -1, 0, 1, 2}
    assert moved.min() == 0
    assert moved.max() == 15
    assert torch.equal(moved[0, 0], moved[0, 2])
    assert augmented(pixels, PixelStageConfig(), torch.Generator()) is pixels


def test_the_loss_of_a_model_that_predicts_zero():
    """The target is r eps - x_0; its mean square over r^2 is 1 + E[x_0^2] / r^2."""
    model = build_transformer(settings().model, 16, 0)
    pixels = torch.full((64, 3, 128, 128), 0.5)
    generator = torch.Generator().manual_seed(0)
    times = sample_times(64, PixelStageConfig(), generator)
    with torch.no_grad():
        loss = flow_loss(_Zero(), pixels, None, times, generator)
        small = flow_loss(model, pixels[:, :, :16, :16], None, times, generator)
    assert float(loss) == pytest.approx(1 + 0.25 / 4, rel=0.01)
    assert float(small) == pytest.approx(1 + 0.25, rel=0.05)


class _Zero(torch.nn.Module):
    def forward(self, x, times, labels, return_dict):
        # the share of noise that the model is told is that of its input
        expected = (1 - times / 1000) ** 2 * 0.25 + (2 * times / 1000) ** 2
        assert torch.allclose(x.square().mean((1, 2, 3)), expected, rtol=0.05)
        return (torch.zeros_like(x),)


def test_times_are_thousandths():
    times = sample_times(20_000, PixelStageConfig(), torch.Generator().manual_seed(0))
    assert (times * 1000).round().div(1000).sub(times).abs().max() < 1e-6
    assert 0.001 <= times.min() < 0.002
    assert times.max() == 1
    assert times.mean().item() == pytest.approx(0.5, abs=0.01)
    normal = sample_times(20_000, PixelStageConfig(uniform_share=0.0), torch.Generator().manual_seed(0))
    assert normal.std() < times.std() - 0.05


def test_a_run_leaves_a_pipeline_a_sheet_and_a_card(finished, data):
    out, summary = finished
    assert summary["finished"]
    assert summary["step"] == 4
    assert summary["classes"] == ["bars", "blobs"]
    pipe = load_pipeline(str(out / "model"), device="cpu")
    assert type(pipe) is PixelDiTPipeline
    assert pipe("blobs", num_inference_steps=1).images[0].size == (16, 16)
    assert (pipe.config.guidance_scale, pipe.config.guidance_interval) == (2.5, [0.2, 0.9])
    card = (out / "model" / "README.md").read_text()
    assert "| 8 x 8 | 2 | 8 | " in card
    assert "| 16 x 16 | 2 | 4 | " in card
    assert model_card(json.loads((out / "model" / "training.json").read_text())) == card
    assert Image.open(out / "sheet.png").size[1] > 2 * 16
    files = [path for path in (out / "model").rglob("*") if path.is_file()]
    assert summary["bytes"] == sum(path.stat().st_size for path in files)
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o644}
    line = json.loads((out / "dit" / "log.jsonl").read_text().splitlines()[-1])
    assert line["details"]["side"] == 16
    assert line["details"]["tokens_per_second"] == pytest.approx(line["samples_per_second"] * 256)


def test_the_export_holds_the_averaged_weights_in_bfloat16(finished):
    out, _ = finished
    pipe = PixelDiTPipeline.from_pretrained(out / "model")
    saved = load_weights(out / "dit")
    for key, value in pipe.transformer.state_dict().items():
        assert torch.equal(value, saved[f"transformer.{key}"].float()), key


def test_a_run_is_copied_out_without_its_state(finished):
    out, _ = finished
    copy = out.parent / "copy"
    assert not list(copy.rglob("state.pt"))
    assert same_weights(out / "dit", copy / "dit")
    for name in ("settings.json", "sheet.png", "dit/log.jsonl", "dit/data.json", "model/model_index.json"):
        assert (copy / name).read_bytes() == (out / name).read_bytes()


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_killed_run_resumes_to_the_same_loss_curve_bit_for_bit(tmp_path, data, optimizer):
    config = settings(6, seed=3, optimizer=optimizer, save_every=1e-9, flip_share=0.5, shift=0.1)
    train_pixel_dit(tmp_path / "whole", data, config)
    killed(tmp_path / "cut", data, config, at_step=4)
    assert json.loads((tmp_path / "cut" / "dit" / "weights.json").read_text())["step"] == 3
    train_pixel_dit(tmp_path / "cut", data, resume=True)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert [step for step, _ in losses(tmp_path / "cut")] == [1, 2, 3, 4, 5, 6]
    assert same_weights(tmp_path / "whole" / "dit", tmp_path / "cut" / "dit")


def test_a_process_killed_while_it_saves_loses_nothing(tmp_path, data, monkeypatch):
    """Disk full in the middle of a save: the file before it stays, and the run goes on from there."""
    config = settings(4, save_every=1e-9)
    train_pixel_dit(tmp_path / "whole", data, config)
    real, calls = torch.save, []

    def save(value, file):
        calls.append(file)
        if len(calls) == 3:
            file.write(b"half")
            raise OSError(28, "No space left on device")
        real(value, file)

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(OSError, match=r"No space left.*state\.pt"):
        train_pixel_dit(tmp_path / "cut", data, config)
    assert not list((tmp_path / "cut").rglob(".*.part"))
    monkeypatch.undo()
    train_pixel_dit(tmp_path / "cut", data, resume=True)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert same_weights(tmp_path / "whole" / "dit", tmp_path / "cut" / "dit")


@pytest.mark.parametrize("kind", ["model", "run", "stage"])
def test_weights_of_small_pictures_begin_a_run_on_larger_ones(tmp_path, data, finished, kind):
    source, _ = finished
    start = {"model": source / "model", "run": source, "stage": source / "dit"}[kind]
    still = {"muon_lr": 0.0, "adam_lr": 0.0, "weight_decay": 0.0, "adam_weight_decay": 0.0}
    config = settings(1, phases=[{"side": 32, "batch_size": 1}], model={"attention_method": "full"}, **still)
    train_pixel_dit(tmp_path, data, config, start_from=start)
    assert same_weights(tmp_path / "dit", source / "dit")
    pipe = PixelDiTPipeline.from_pretrained(tmp_path / "model")
    assert pipe.transformer.config.sample_size == 32
    assert pipe.transformer.config.attention_method == "full"
    legs = json.loads((tmp_path / "model" / "training.json").read_text())["legs"]
    assert [leg["side"] for leg in legs] == [8, 16, 32]


def test_legs_of_one_picture_size_are_told_apart(tmp_path, data):
    phases = [
        {"side": 8, "batch_size": 4, "until": 0.25},
        {"side": 8, "batch_size": 2, "until": 0.75},
        {"side": 16, "batch_size": 1, "until": 0.875},
        {"side": 8, "batch_size": 3},
    ]
    train_pixel_dit(tmp_path, data, settings(8, phases=phases))
    legs = json.loads((tmp_path / "model" / "training.json").read_text())["legs"]
    assert [(leg["side"], leg["steps"], leg["images"]) for leg in legs] == [(8, 2, 8), (8, 4, 8), (16, 1, 1), (8, 1, 3)]
    seconds = json.loads((tmp_path / "dit" / "log.jsonl").read_text().splitlines()[-1])["seconds"]
    assert sum(leg["seconds"] for leg in legs) == pytest.approx(seconds, abs=2)
    assert {leg["processes"] for leg in legs} == {1}


def test_the_start_does_not_overwrite_a_resumed_run(tmp_path, data, finished, caplog):
    config = settings(6, save_every=1e-9)
    train_pixel_dit(tmp_path / "whole", data, config, start_from=finished[0])
    killed(tmp_path / "cut", data, config, at_step=4, start_from=finished[0])
    train_pixel_dit(tmp_path / "cut", data, resume=True, start_from=finished[0])
    assert "holds no checkpoint" not in caplog.text
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


def test_a_run_killed_before_its_first_save_resumes_from_its_start(tmp_path, data, finished, caplog):
    config = settings(3)
    train_pixel_dit(tmp_path / "whole", data, config, start_from=finished[0])
    killed(tmp_path / "cut", data, config, at_step=1, start_from=finished[0])
    assert not (tmp_path / "cut" / "dit" / "state.pt").exists()
    train_pixel_dit(tmp_path / "cut", data, resume=True)
    assert "holds no checkpoint to go on from, so a new run begins there" in caplog.text
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


def test_a_new_run_takes_nothing_from_the_start_of_one_before(tmp_path, data, finished):
    config = settings(1)
    train_pixel_dit(tmp_path / "whole", data, config)
    killed(tmp_path / "cut", data, config, at_step=1, start_from=finished[0])
    train_pixel_dit(tmp_path / "cut", data, config)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    legs = json.loads((tmp_path / "cut" / "model" / "training.json").read_text())["legs"]
    assert [leg["side"] for leg in legs] == [8]


def test_a_paused_leg_goes_on_with_its_schedule(tmp_path, data):
    config = settings(None, seconds=3.0)
    first = train_pixel_dit(tmp_path, data, config, max_seconds=1.5, pause=True)
    assert not first["finished"]
    assert "model" not in first
    second = train_pixel_dit(tmp_path, data, max_seconds=60, pause=True, resume=True)
    assert second["finished"]
    assert second["seconds"] == pytest.approx(3.0, abs=0.7)


def test_the_schedule_is_fitted_to_the_leg(tmp_path, data):
    entries = []
    summary = train_pixel_dit(tmp_path, data, settings(None, seconds=1000.0), max_seconds=4.0, report=entries.append)
    assert summary["finished"]
    assert summary["seconds"] < 4
    assert entries[-1].progress == 1
    assert {entry.details["side"] for entry in entries} == {8, 16}
    assert all(math.isfinite(entry.losses["loss"]) for entry in entries)


def test_a_corrupt_picture_is_named_skipped_and_counted(tmp_path, data, caplog):
    folder = tmp_path / "pictures"
    shutil.copytree(data, folder)
    (folder / "bars" / "bad.png").write_bytes(b"no picture")
    summary = train_pixel_dit(tmp_path / "run", folder, settings(1))
    assert summary["pictures"] == 7
    assert [name for name, _ in summary["skipped"]] == ["bars/bad.png"]
    assert "1 unreadable pictures were skipped: bars/bad.png" in caplog.text


def test_pictures_without_classes(tmp_path, data):
    folder = tmp_path / "pictures"
    folder.mkdir()
    for i, path in enumerate(data.rglob("*.png")):
        shutil.copy(path, folder / f"{i}.png")
    summary = train_pixel_dit(tmp_path / "run", folder, settings(1))
    assert summary["classes"] == []
    pipe = PixelDiTPipeline.from_pretrained(tmp_path / "run" / "model")
    assert len(pipe(num_images=2, num_inference_steps=1).images) == 2


def test_samples_are_drawn_while_training(tmp_path, data):
    train_pixel_dit(tmp_path, data, settings(2, sample_every=1e-9))
    sheets = sorted((tmp_path / "dit" / "samples").iterdir())
    assert [path.name for path in sheets] == ["0000001.png", "0000002.png"]


def test_mixed_precision_of_the_launcher_is_used(tmp_path, data, monkeypatch):
    from accelerate.state import AcceleratorState

    train_pixel_dit(tmp_path / "single", data, settings(3))
    AcceleratorState._reset_state(reset_partial_state=True)  # one process has one precision
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    try:
        train_pixel_dit(tmp_path / "mixed", data, settings(3, sample_every=1e-9))
        assert AcceleratorState().mixed_precision == "bf16"
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    for (_, one), (_, other) in zip(losses(tmp_path / "single"), losses(tmp_path / "mixed"), strict=True):
        assert one == pytest.approx(other, rel=0.02)
    assert losses(tmp_path / "single") != losses(tmp_path / "mixed")


def test_gradient_checkpointing_gives_the_same_losses(tmp_path, data):
    train_pixel_dit(tmp_path / "plain", data, settings(2))
    train_pixel_dit(tmp_path / "checkpointed", data, settings(2, gradient_checkpointing=True))
    for (_, one), (_, other) in zip(losses(tmp_path / "plain"), losses(tmp_path / "checkpointed"), strict=True):
        assert one == pytest.approx(other, rel=1e-5)


@pytest.mark.slow
@pytest.mark.compiler
def test_compiled_training_follows_eager(tmp_path, data):
    train_pixel_dit(tmp_path / "eager", data, settings(2))
    train_pixel_dit(tmp_path / "compiled", data, settings(2, compile=True))
    for (_, one), (_, other) in zip(losses(tmp_path / "eager"), losses(tmp_path / "compiled"), strict=True):
        assert one == pytest.approx(other, rel=1e-3)


def test_training_learns(tmp_path, data):
    """One step after another on the same few pictures: the loss falls well below that of predicting nothing."""
    config = settings(60, phases=[{"side": 8, "batch_size": 14}], warmup=0.05, adam_lr=3e-3, muon_lr=0.02)
    train_pixel_dit(tmp_path, data, config)
    curve = [loss for _, loss in losses(tmp_path)]
    assert sum(curve[-10:]) / 10 < 0.85 * curve[0]


@pytest.mark.parametrize(
    ("shape", "classes", "millions"), [("S", 1000, 33), ("B", 1000, 130), ("L", 1000, 458), (None, 9, 5.5)]
)
def test_the_published_shapes_and_the_embedded_one(shape, classes, millions):
    """DiT-S, B and L have 33, 130 and 458 M parameters (Peebles and Xie 2023, table 1)."""
    with torch.device("meta"):
        model = build_transformer(PixelModelConfig(**SHAPES.get(shape, {})), 128, classes)
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_seconds": -1.0}, "max_seconds must be positive"),
        ({"pause": True}, "pause needs max_seconds"),
        ({"max_seconds": 1e-6}, "max_seconds must leave time for dit"),
    ],
)
def test_wrong_arguments_are_named(tmp_path, data, arguments, message):
    with pytest.raises(UserInputError, match=message):
        train_pixel_dit(tmp_path / "run", data, settings(None), **arguments)


def test_bad_data_is_named(tmp_path):
    with pytest.raises(UserInputError, match="which does not exist"):
        train_pixel_dit(tmp_path / "run", tmp_path / "none", settings())
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserInputError, match="data must hold pictures"):
        train_pixel_dit(tmp_path / "run", tmp_path / "empty", settings())
    assert not (tmp_path / "run").exists()


def test_an_occupied_folder_and_other_settings_are_refused(finished, data):
    out, _ = finished
    with pytest.raises(UserInputError, match="out must not hold a run unless it is resumed"):
        train_pixel_dit(out, data, settings())
    with pytest.raises(UserInputError, match="settings must be left out or equal"):
        train_pixel_dit(out, data, settings(9), resume=True)


def test_a_resumed_run_keeps_its_pictures(tmp_path, data):
    config = settings(4, save_every=1e-9)
    killed(tmp_path / "run", data, config, at_step=2)
    folder = tmp_path / "fewer"
    shutil.copytree(data, folder)
    (folder / "bars" / "0.png").unlink()
    with pytest.raises(UserInputError, match=r"data must be the pictures that the run .* \(7 of them\), got 6"):
        train_pixel_dit(tmp_path / "run", folder, resume=True)


def test_a_start_of_another_architecture_is_named(tmp_path, data, finished):
    source, _ = finished
    with pytest.raises(UserInputError, match=r"start_from must fit .* has the shape"):
        train_pixel_dit(tmp_path / "a", data, settings(model={"heads": 2}), start_from=source)
    with pytest.raises(UserInputError, match=r"start_from must fit .* has the shape none instead of"):
        train_pixel_dit(tmp_path / "b", data, settings(model={"layers": 2}), start_from=source)
    with pytest.raises(UserInputError, match="start_from must be a pipeline folder"):
        train_pixel_dit(tmp_path / "c", data, settings(), start_from=tmp_path)
    broken = tmp_path / "broken"
    shutil.copytree(source / "model", broken)
    weights = broken / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(UserInputError, match="start_from must hold readable weights"):
        train_pixel_dit(tmp_path / "d", data, settings(), start_from=broken)


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, data):
    config = settings(8, adam_lr=1e30, clip_norm=1e30, optimizer="adamw")
    with pytest.raises(DiffsieveError, match="must be finite"):
        train_pixel_dit(tmp_path, data, config)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("dit.phases=[]", "phases must end at rising shares up to 1"),
        ("model.levels=9", r'levels must be an int in \[1, 4\], "auto" or "paper", got 9'),
        ("model.levels=0", r'levels must be an int in \[1, 4\], "auto" or "paper", got 0'),
        ("model.levels=most", r'levels must be an int in \[1, 4\], "auto" or "paper", got \'most\''),
        ("model.levels=1.5", r"model.levels must be int or str, got 1.5"),
        ("model.levels=true", r"model.levels must be int or str, got True"),
        ('dit.phases=[{"side": 0}]', r"side must be in \[1, 1024\] pixels, got 0"),
        ('dit.phases=[{"side": 2048}]', "got 2048"),
        ('dit.phases=[{"batch_size": 0}]', "batch_size must be in"),
        ("dit.optimizer=sgd", "optimizer must be one of muon, adamw, got 'sgd'"),
        ("dit.shift=1", r"shift must be in \[0, 1\)"),
        ("dit.adam_beta2=1", r"adam_beta2 must be in \[0, 1\)"),
        ("sampling.guidance_interval=[1]", "guidance_interval must be two shares"),
        ("model.layerz=3", "unknown keys"),
    ],
)
def test_wrong_settings_are_named(override, message):
    with pytest.raises(UserInputError, match=message):
        PixelTrainConfig.load(None, [override])


@pytest.mark.parametrize("levels", [2, "auto", "paper"])
def test_the_model_gets_the_levels_of_its_settings(levels):
    config = PixelTrainConfig.load(None, [f"model.levels={levels}"])
    model = build_transformer(replace(config.model, layers=1), 16, 2)
    assert model.config["levels"] == levels


def test_a_contact_sheet_has_a_column_for_each_class():
    pictures = torch.zeros(5, 3, 8, 8, dtype=torch.uint8)
    sheet = contact_sheet(pictures, [0, 1, 0, 1, 0], ("a", "b"))
    assert sheet.size == (2 * 12 + 4, 14 + 3 * 12 + 4)
    assert sheet.getpixel((5, 14 + 5)) == (0, 0, 0)
    assert contact_sheet(pictures, [], (), columns=5).size == (5 * 12 + 4, 12 + 4)
    with pytest.raises(UserInputError, match=r"pictures must be \(N, 3, H, W\) uint8"):
        contact_sheet(pictures.float(), [], ())


def test_the_averaged_transformer_of_a_stage(finished, data):
    out, _ = finished
    config = settings()
    model = load_transformer(config, out / "dit", len(load_images(data, 4).classes))
    assert not model.training
