"""From prompts to a table, with the stand-in in the place of VBench; each way to fail shows."""

import dataclasses
import json
import sys

import pytest

from diffsieve.compare.shards import Deadline, Shard
from diffsieve.errors import UserInputError
from diffsieve.eval import temporal_flickering
from diffsieve.vbench import ScoreConfig, generate_suite, score_table, score_videos

PROMPTS = ("a cat moves left", "a dog, in Petra's façades.", "a red cat")
NAMES = {f"{prompt}-{i}.mp4" for prompt in PROMPTS for i in range(2)}


def lines_of(out):
    return [json.loads(line) for path in out.glob("videos-*.jsonl") for line in path.read_text().splitlines()]


def scoring(out, **changes):
    return dataclasses.replace(ScoreConfig(folder=out, python=sys.executable, device="cpu"), **changes)


def test_folders_hold_the_videos_alone_and_the_manifest_the_rest(pipe, config):
    settings = config(with_dense=True, sparsity=0.6)
    result = generate_suite(settings, pipe=pipe)
    assert result == {"out": str(settings.out), "done": 6, "missing": 0, "other_shards_missing": 0}
    for run in ("dense", "sparse"):
        assert {path.name for path in (settings.out / run).iterdir()} == NAMES
    lines = lines_of(settings.out)
    assert {(line["prompt"], line["index"], line["seed"]) for line in lines} == {
        (prompt, i, i) for prompt in PROMPTS for i in range(2)
    }
    for line in lines:
        assert 10 < line["metrics"]["psnr"] < 100
        assert line["metrics"]["lpips[alex]"] is None
        assert line["reasons"]["lpips[alex]"]
        assert 0 < line["sparsity"]["density_sparse_steps"] < line["sparsity"]["density_overall"] < 1
        assert set(line["seconds"]) == {"dense", "sparse"}


def test_dense_and_sparse_folders_share_the_noise(pipe, config, tmp_path):
    dense = config(method="dense", out=tmp_path / "dense-only", limit=1)
    both = config(with_dense=True, out=tmp_path / "both", limit=1)
    for settings in (dense, both):
        generate_suite(settings, pipe=pipe)
    name = next((dense.out / "dense").iterdir()).name
    assert (dense.out / "dense" / name).read_bytes() == (both.out / "dense" / name).read_bytes()
    assert not (dense.out / "sparse").exists()


def test_llsa_says_what_it_computed(pipe, config):
    given = {"warmup": None, "min_tokens": None, "sparsity": None, "frames": 17, "width": 64}
    settings = config(method="llsa", topk=1, limit=1, videos=1, **given)
    assert generate_suite(settings, pipe=pipe)["done"] == 1
    (line,) = lines_of(settings.out)
    assert 0 < line["sparsity"]["density_overall"] < 1
    assert line["sparsity"]["notes"]


def test_generation_goes_on_over_legs_and_shards(pipe, config):
    settings = config(method="dense")
    assert generate_suite(settings, pipe=pipe, deadline=Deadline(1e-9))["missing"] == 6
    assert generate_suite(settings, pipe=pipe, shard=Shard(0, 2))["other_shards_missing"] == 3
    lost = settings.out / "dense" / "a cat moves left-0.mp4"
    lost.unlink()
    told = []
    assert generate_suite(settings, pipe=pipe, progress=told.append)["done"] == 6
    assert len(told) == 4
    assert lost.is_file()
    with pytest.raises(UserInputError, match="steps must be 3 to resume"):
        generate_suite(config(method="dense", steps=4), pipe=pipe)


def test_scores_are_vbenchs_and_the_table_holds_them(pipe, config):
    settings = config(with_dense=True, sparsity=0.6)
    generate_suite(settings, pipe=pipe)
    told = []
    result = score_videos(scoring(settings.out, dimensions=("temporal_flickering", "color")), progress=told.append)
    assert result["failures"] == []
    assert result["vbench"] == "0.1.5"
    assert told == [f"{run}: {name}" for run in ("dense", "sparse") for name in ("temporal_flickering", "color")]
    files = [settings.out / "dense" / f"a red cat-{i}.mp4" for i in range(2)]
    assert result["scores"]["dense"]["color"] == pytest.approx(sum(path.stat().st_size for path in files) / 2e6)
    record = json.loads((settings.out / "scores/sparse/temporal_flickering.json").read_text())
    clips = [settings.out / "sparse" / f"{prompt}-{i}.mp4" for prompt in PROMPTS[:2] for i in range(2)]
    assert record["in_process"] == pytest.approx(sum(temporal_flickering(clip).mean for clip in clips) / 4)
    assert record["videos"] == record["expected_videos"] == 4

    assert score_videos(scoring(settings.out, dimensions=("color",)), progress=told.append)["scores"]
    assert len(told) == 4, "what has a score is not scored again"
    table = score_table([settings.out])
    dense, sparse = table["rows"]
    assert dense["scores"] == result["scores"]["dense"]
    assert sparse["metrics"]["psnr"]["n"] == 6
    assert (dense["density"], dense["metrics"]) == (1.0, {})
    assert sparse["density"] < 1
    assert any("2 videos of each prompt" in note for note in table["notes"])
    assert any("static filter" in note for note in table["notes"])


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("exit", "exit code 7"),
        ("raise", "exit code 1: NotImplementedError: UnImplemented dimension!"),
        ("silent", "exit code 4"),
        ("nan", "must be a finite number, got nan"),
        ("skip", "left 1 of 2 videos out, such as a cat moves left-1.mp4"),
        ("form", "no result of its own form"),
    ],
)
def test_every_failure_of_vbench_shows(pipe, config, monkeypatch, fault, message):
    settings = config(method="dense", dimensions=("subject_consistency",))
    generate_suite(settings, pipe=pipe)
    monkeypatch.setenv("STAND_IN", fault)
    result = score_videos(scoring(settings.out))
    assert result["scores"] == {}
    (failure,) = result["failures"]
    assert failure.startswith("dense, subject_consistency: ")
    assert message in failure
    assert not (settings.out / "scores/dense/subject_consistency.json").exists()
    monkeypatch.setenv("STAND_IN", "")
    assert score_videos(scoring(settings.out))["failures"] == []


def test_one_failed_dimension_leaves_the_others(pipe, config, monkeypatch):
    settings = config(method="dense")
    generate_suite(settings, pipe=pipe)
    monkeypatch.setenv("STAND_IN", "color")
    result = score_videos(scoring(settings.out, dimensions=("color", "motion_smoothness")))
    assert len(result["failures"]) == 1
    assert set(result["scores"]["dense"]) == {"motion_smoothness"}


def test_color_may_leave_videos_out(pipe, config, monkeypatch):
    settings = config(method="dense", dimensions=("color",))
    generate_suite(settings, pipe=pipe)
    monkeypatch.setenv("STAND_IN", "skip")
    assert score_videos(scoring(settings.out))["failures"] == []
    assert any("found the object in 1 of 2 videos" in note for note in score_table([settings.out])["notes"])


def test_what_cannot_be_scored_is_refused(pipe, config, tmp_path, monkeypatch):
    with pytest.raises(UserInputError, match="must be the settings of a run"):
        score_videos(scoring(tmp_path))
    settings = config(method="dense", dimensions=("color",))
    generate_suite(settings, pipe=pipe, shard=Shard(0, 2))
    with pytest.raises(UserInputError, match=r"got none for a red cat-1\.mp4 and 0 others"):
        score_videos(scoring(settings.out))
    generate_suite(settings, pipe=pipe)
    with pytest.raises(UserInputError, match="must have prompts among the generated videos, got scene"):
        score_videos(scoring(settings.out, dimensions=("scene",)))
    (settings.out / "dense" / "notes.txt").write_text("")
    with pytest.raises(UserInputError, match=r"the videos alone, got notes\.txt"):
        score_videos(scoring(settings.out))
    (settings.out / "dense" / "notes.txt").unlink()
    (settings.out / "dense" / ".x.mp4.diffsieve-part").write_text("")
    assert score_videos(scoring(settings.out))["failures"] == []
    monkeypatch.setenv("PYTHONPATH", "")
    with pytest.raises(UserInputError, match=r"fails: .*vbench"):
        score_videos(scoring(settings.out, again=True))


def test_settings_that_make_no_sense_are_refused(config):
    with pytest.raises(UserInputError, match="videos must be from 1 to 25"):
        config(videos=0)
    with pytest.raises(UserInputError, match="with_dense must go with a sparse method"):
        config(with_dense=True, method="dense")
    with pytest.raises(UserInputError, match="method must be one of ba-att, llsa, dense, got 'auto'"):
        config(method="auto", sparsity=None)
