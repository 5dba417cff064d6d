"""The study of pixel DiT's attention: its nine variants, their budget of keys, and its steps at a tiny size."""

import importlib.util
import json
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from diffsieve.eval.features import FeatureNetwork
from page_tables import pixel_dit

TRAINED_ON = ("--gpu", "a GPU", "--python", "3.12", "--torch", "2.11.0+cu130", "--triton", "3.6.0")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "pixel_dit_study.py"


@pytest.fixture
def study():
    location = importlib.util.spec_from_file_location("pixel_dit_study", SCRIPT)
    module = importlib.util.module_from_spec(location)
    location.loader.exec_module(module)
    return module


@pytest.fixture
def data(tmp_path):
    generator = np.random.default_rng(0)
    for i in range(6):
        folder = tmp_path / "pictures" / ("bars" if i % 2 else "blobs")
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    return tmp_path / "pictures"


@pytest.fixture
def call(study, data, tmp_path, monkeypatch):
    """Run the script with 8 x 8 and 16 x 16 pixels in the place of 64 and 128, and one layer; returns its exit code."""
    variants = study.variants
    monkeypatch.setattr(study, "variants", lambda side: variants(side * 8))
    monkeypatch.setattr(study, "BATCH", {8: 2, 16: 2})
    monkeypatch.setattr(study, "SAMPLED_TOGETHER", {8: 2, 16: 2})

    def run(command, *words, side=16):
        sizes = ["--side", str(side), "--layers", "1", "--steps", "1", "--samples", "4", "--images", "4"]
        words = [command, "--work", str(tmp_path / "work"), "--data", str(data), *sizes, *words]
        monkeypatch.setattr(sys, "argv", ["pixel_dit_study.py", *words])
        try:
            study.main()
        except SystemExit as end:
            return end.code
        return 0

    return run


@pytest.mark.parametrize("side", [64, 128])
def test_nine_variants_differ_from_the_reference_in_one_thing(study, side):
    variants = study.variants(side)
    assert len(variants) == 9
    reference = variants["llsa"]
    assert reference == {"levels": {64: 1, 128: 2}[side]}
    for name in ("llsa disjoint", "llsa without enrichment", "llsa Morton", "llsa raster"):
        (changed,) = variants[name].items() - reference.items()
        assert changed[0] in ("disjoint", "enrich", "token_order")
    (other,) = [settings for name, settings in variants.items() if name.endswith(("1 level", "2 levels"))]
    assert other == {"levels": {64: 2, 128: 1}[side]}
    keys = {name: study.keys_per_query(side, settings) for name, settings in variants.items()}
    assert keys["full"] == side**2
    assert keys["llsa"] == keys["llsa Morton"] == {64: 128 + 256, 128: 2 * 128 + 64}[side]
    assert keys["llsa"] <= keys["top-k equal keys"] < keys["llsa"] + 16


def test_a_variant_is_trained_sampled_measured_and_reported(study, call, tmp_path, monkeypatch):
    assert call("run", "--variants", "full,llsa") == 0
    for name in ("full", "llsa"):
        folder = tmp_path / "work" / "16" / name
        with np.load(folder / "samples.npz") as samples:
            assert samples["pictures"].shape == (4, 3, 16, 16)
        assert json.loads((folder / "samples.json").read_text())["steps"] == 1
        before = (folder / "samples.npz").stat().st_mtime_ns
        assert call("run", "--variants", name) == 0
        assert (folder / "samples.npz").stat().st_mtime_ns == before, "what is finished is skipped"
    network = FeatureNetwork("means", 3, lambda x: x.float().mean((2, 3)), "none")
    monkeypatch.setattr("diffsieve.eval.features.load_features", lambda **_: network)
    assert call("measure") == 0
    assert call("report", "--out", str(tmp_path / "out"), *TRAINED_ON) == 0
    report = json.loads((tmp_path / "out" / "pixel_dit_study.json").read_text())
    assert report["gpu"] == "a GPU"
    assert report["versions"] == {"python": "3.12", "torch": "2.11.0+cu130", "triton": "3.6.0"}
    assert str(tmp_path) not in json.dumps(report)
    assert report["commands"] == [
        f"python benchmarks/pixel_dit_study.py {command} --work outputs/pixel-dit-study "
        "--side 16 --layers 1 --images 4 --steps 1 --samples 4"
        for command in ("run", "measure")
    ]
    rows = report["sides"]["16"]
    assert rows.keys() == {"full", "llsa"}
    assert rows["llsa"]["images"] == 4
    assert rows["llsa"]["finished"]
    assert rows["llsa"]["distance"]["name"] == "fd[means]"
    assert rows["llsa"]["distance"]["value"] > 0
    assert rows["full"]["model"]["attention_method"] == "full"
    Image.open(tmp_path / "out" / "pixel-dit-study-16.png").verify()


def test_a_report_does_not_take_this_machine_for_that_of_the_runs(call, tmp_path):
    told = TRAINED_ON[:4]
    assert call("report", "--out", str(tmp_path / "out"), *told) == (
        "report must be told on what the variants were trained: give --torch, --triton"
    )
    assert not (tmp_path / "out").exists()


def test_other_seeds_and_rows_of_earlier_calls_are_kept(call, tmp_path):
    out = tmp_path / "out"

    def rows(*words):
        assert call("report", "--out", str(out), *TRAINED_ON, *words) == 0
        return json.loads((out / "pixel_dit_study.json").read_text())["sides"]["16"]

    assert call("run", "--variants", "full") == 0
    first = rows()["full"]
    assert call("run", "--variants", "full,llsa", "--seed", "1") == 0
    assert call("report", "--out", str(tmp_path / "other"), *TRAINED_ON) == (
        "a row of seed 0 must be there before that of seed 1: 16 llsa"
    )
    assert not (tmp_path / "other").exists()
    assert call("train", "--variants", "llsa") == 0
    both = rows()
    assert both["full"].pop("other_seeds")["1"]["seed"] == 1
    assert both["full"] == first
    assert "samples" in both["llsa"]["other_seeds"]["1"]
    assert "samples" not in both["llsa"]
    commands = json.loads((out / "pixel_dit_study.json").read_text())["commands"]
    repeated = [command for command in commands if "--seed" in command]
    assert len(repeated) == 2
    assert all(command.endswith('--seed 1 --variants "full"') for command in repeated)

    (tmp_path / "work").rename(tmp_path / "gone")
    assert call("train", "--variants", "full") == 0
    kept = rows()
    assert kept["llsa"] == both["llsa"], "there is no run of it any more"
    assert kept["full"].pop("other_seeds")["1"]["seed"] == 1
    assert kept["full"] == first, "a run without samples takes no place of one with samples"


def test_rows_of_another_gpu_are_not_mixed(call, tmp_path):
    assert call("train", "--variants", "llsa") == 0
    assert call("report", "--out", str(tmp_path), *TRAINED_ON) == 0
    before = (tmp_path / "pixel_dit_study.json").read_bytes()
    ended = call("report", "--out", str(tmp_path), "--gpu", "another GPU", *TRAINED_ON[2:])
    assert str(ended).endswith("must be trained on the same: its gpu is a GPU, got another GPU")
    assert (tmp_path / "pixel_dit_study.json").read_bytes() == before


def test_a_large_size_begins_with_the_weights_of_the_small_one(call, tmp_path):
    assert call("train", "--variants", "llsa", side=8) == 0
    assert call("train", "--variants", "llsa 1 level,llsa raster") == 0
    assert call("report", "--out", str(tmp_path), *TRAINED_ON) == 0
    rows = json.loads((tmp_path / "pixel_dit_study.json").read_text())["sides"]["16"]
    assert rows["llsa 1 level"]["began_at_64"]
    assert not rows["llsa raster"]["began_at_64"], "there are no such weights"


def test_a_variant_that_fails_costs_no_other(study, call, tmp_path, monkeypatch):
    train = study.train_one

    def fail(name, arguments):
        if name == "full":
            raise RuntimeError("broken")
        return train(name, arguments)

    monkeypatch.setitem(study.STEPS, "train", (fail,))
    assert call("train", "--variants", "full,llsa") == 1
    assert (tmp_path / "work" / "16" / "llsa" / "model").is_dir()


def test_variants_are_shared_between_processes(study, call, monkeypatch):
    seen = []
    monkeypatch.setattr(study, "attempt", lambda name, arguments: seen.append(name) or 0)
    monkeypatch.setattr(
        study.subprocess, "run", lambda words, check: seen.append(words[-3]) or study.argparse.Namespace(returncode=0)
    )
    for shard in ("0/2", "1/2"):
        assert call("run", "--shard", shard) == 0
    assert sorted(seen) == sorted(study.variants(16))
    assert (
        call("run", "--variants", "none") == "variants must be among: " + ", ".join(study.variants(16)) + "; got none"
    )


def test_what_is_compiled_before_a_turn_leaves_nothing_and_changes_nothing(study, call, tmp_path, monkeypatch):
    assert call("run", "--variants", "llsa") == 0
    folder = tmp_path / "work" / "16" / "llsa"
    alone = (folder / "samples.npz").read_bytes(), (folder / "dit" / "log.jsonl").read_text().count("\n")
    (tmp_path / "work").rename(tmp_path / "alone")
    prepare, order = study.prepare, []

    @contextmanager
    def turn(file):
        order.append(file)
        yield

    monkeypatch.setattr(study, "turn", turn)
    monkeypatch.setattr(study, "prepare", lambda *words: order.append("prepare") or prepare(*words))
    assert call("run", "--variants", "llsa", "--turns", str(tmp_path / "turns")) == 0
    assert order == ["prepare", None, None, tmp_path / "turns", tmp_path / "turns"]
    assert ((folder / "samples.npz").read_bytes(), (folder / "dit" / "log.jsonl").read_text().count("\n")) == alone
    assert [path.name for path in (tmp_path / "work" / "16").iterdir()] == ["llsa"]
    assert call("run", "--variants", "llsa", "--turns", str(tmp_path / "turns")) == 0
    assert order.count("prepare") == 1, "nothing is left to do"


def test_no_time_leaves_the_rest_for_another_call(call):
    assert call("run", "--variants", "llsa", "--max-seconds", "5") == 3


def test_the_table_says_what_is_not_measured(monkeypatch):
    report = pixel_dit.result("h200/pixel_dit_study.json")
    del report["sides"]["128"]["llsa"]["distance"], report["sides"]["128"]["llsa raster"]
    monkeypatch.setattr(pixel_dit, "result", lambda name: report)
    lines = pixel_dit.pixel_dit_study_table().splitlines()
    assert "| 128 | llsa raster | - | - | - | - | - | - | - |" in lines
    assert any(line.startswith("| 128 | llsa | - | - | 0.0") for line in lines)
