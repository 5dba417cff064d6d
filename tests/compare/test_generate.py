"""Clips from prompts, dense and sparse."""

import dataclasses
import json

import pytest

from diffsieve.compare import GenerateConfig, generate
from diffsieve.errors import UserInputError
from tests.compare.conftest import SMALL


@pytest.fixture
def config(tmp_path):
    return GenerateConfig(**SMALL, out=tmp_path / "out")


def test_sparse_clips_and_a_report(pipe, config):
    config = dataclasses.replace(config, prompt=("a cat", "a dog"))
    seen = []
    report = generate(config, pipe=pipe, progress=seen.append)
    names = ["001-a-cat-seed0.mp4", "002-a-dog-seed0.mp4"]
    assert sorted(path.name for path in config.out.iterdir()) == [*names, "report.json"]
    assert [clip["file"] for clip in report["clips"]] == names
    assert all(clip["sparsity"]["steps_dense"] == 1 for clip in report["clips"])
    assert json.loads((config.out / "report.json").read_text(encoding="utf-8")) == report
    assert {report.run for report in seen} == {"sparse"}


def test_dense_leaves_the_pipeline_as_it_is(pipe, tmp_path):
    settings = {name: value for name, value in SMALL.items() if name not in ("warmup", "block_size", "min_tokens")}
    report = generate(GenerateConfig(**settings, method="dense", out=tmp_path / "out"), pipe=pipe)
    assert report["clips"][0]["sparsity"] is None
    assert report["settings"]["attention"] is None


def test_files_are_not_overwritten_by_chance(pipe, config):
    generate(config, pipe=pipe)
    with pytest.raises(UserInputError, match="out must not hold 001-a-cat-moves-left-seed0"):
        generate(config, pipe=pipe)
    generate(config, pipe=pipe, overwrite=True)
