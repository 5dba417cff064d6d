"""Settings of a training run: defaults, files, overrides, and what is refused."""

import json
from pathlib import Path

import pytest

import diffsieve.pipelines.training as training
from diffsieve.errors import UserInputError
from diffsieve.pipelines.training.config import ClipSize, DitConfig, Phase, TrainConfig, VaeConfig

SHIPPED = sorted(Path(training.__path__[0]).glob("*continuation*.json"))


def test_a_configuration_survives_its_dictionary():
    config = TrainConfig()
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"vea": {}}, "unknown keys"),
        ({"dit": {"muon": 1}}, "unknown keys"),
        ({"dit": 3}, "mapping"),
        ({"dit": {"steps": "many"}}, "steps must be int"),
        ({"dit": {"steps": 0}}, "steps must be positive, got 0"),
        ({"dit": {"compile": 1}}, "compile must be bool"),
        ({"dit": {"phases": []}}, "phases"),
        ({"dit": {"phases": [{"until": 0.5, "batch_size": 32}]}}, "phases must end at rising shares up to 1"),
        ({"dit": {"phases": [{"frames": 24}]}}, "frames must be 1 \\+ 4"),
        ({"dit": {"phases": [{"height": 100}]}}, "height must be a positive multiple of 16"),
        ({"dit": {"phases": [{"batch_size": 30}]}}, "multiple of reuse"),
        ({"dit": {"phases": [{"batch_size": 1024}]}}, "batch_size must be in"),
        ({"dit": {"phases": [{"extra_every": 2}]}}, "extra and extra_every go together"),
        ({"dit": {"phases": [{"sprite_px": [3]}]}}, "sprite_px"),
        ({"dit": {"caption_dropout": 2.0}}, "caption_dropout must be in"),
        ({"dit": {"text_length": 600}}, "long_text_length must be at least"),
        ({"dit": {"warmup": 0.9}}, "warmup"),
        ({"dit": {"ema_decay": 1.0}}, "ema_decay"),
        ({"vae": {"fusion": "magic"}}, "fusion must be one of compile, triton, none, got 'magic'"),
        ({"vae": {"fast_share": -1.0}}, "fast_share"),
        ({"evaluation": {"prompts": 0}}, "prompts must be at least 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_wrong_setting_is_named(values, message):
    with pytest.raises(UserInputError, match=message):
        TrainConfig.from_dict(values)


@pytest.mark.parametrize("suffix", [".json", ".toml"], ids=str)
def test_a_file_and_overrides_are_merged(tmp_path, suffix):
    path = tmp_path / f"settings{suffix}"
    path.write_text('{"dit": {"muon_lr": 0.5}}' if suffix == ".json" else "[dit]\nmuon_lr = 0.5\n")
    config = TrainConfig.load(path, ["dit.seconds=7", "vae.fusion=none", "seed=3"])
    assert (config.dit.muon_lr, config.dit.seconds, config.vae.fusion, config.seed) == (0.5, 7.0, "none", 3)
    assert config.dit.adam_lr == DitConfig().adam_lr


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [("a.json", "{", "valid JSON"), ("a.toml", "=", "valid TOML"), ("a.yaml", "", "must be a .json or .toml")],
    ids=["json", "toml", "suffix"],
)
def test_a_broken_file_is_refused(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserInputError, match=message):
        TrainConfig.load(tmp_path / name)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(UserInputError, match="readable"):
        TrainConfig.load(tmp_path / "none.toml")


@pytest.mark.parametrize("text", ["dit.seconds", "seed.deep=3"], ids=["no-value", "no-part"])
def test_a_wrong_override_is_refused(text):
    with pytest.raises(UserInputError):
        TrainConfig.load(None, ["seed=1", text])


def test_overrides_of_the_decoder_keep_its_own_defaults():
    changed = TrainConfig.load(None, ["decoder.seconds=5"]).decoder
    assert changed.phases[0].height == 192
    assert changed.fast_share == TrainConfig().decoder.fast_share > 0


def test_the_learning_rate_rises_holds_and_falls():
    stage = VaeConfig(warmup=0.1, hold=0.5)
    rates = [stage.learning_rate_factor(progress) for progress in (0.0, 0.05, 0.1, 0.5, 0.75, 1.0)]
    assert rates == [0.05, 0.5, 1.0, 1.0, 0.5, 0.0]


def test_phases_and_their_sizes():
    large = ClipSize(frames=41, height=320, width=320, batch_size=4)
    stage = DitConfig(
        phases=(Phase(height=128, width=128, until=0.5), Phase(until=0.8), Phase(extra=large, extra_every=4))
    )
    assert [stage.phase(progress).height for progress in (0.0, 0.5, 1.0)] == [128, 192, 192]
    assert stage.sizes() == [(25, 128, 128), (25, 192, 192), (41, 320, 320)]
    assert stage.sizes(0.5) == [(25, 128, 128)]
    assert large.latent_grid == (11, 40, 40)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_shipped_continuations_are_valid(path):
    config = TrainConfig.load(path)
    assert config.seed != TrainConfig().seed, "a continued run must see other clips"
    phase = config.dit.phases[-1]
    frames, height, width = phase.extra.latent_grid
    assert frames * height * width >= 16_000
    assert 0 < phase.long_text_share < 1


def test_there_are_shipped_continuations():
    assert [path.name for path in SHIPPED] == ["continuation.json", "continuation_large.json"]
