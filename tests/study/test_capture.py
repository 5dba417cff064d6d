"""Captured files: what attention saw, chosen layers and steps, resumed, refused when damaged."""

import dataclasses
import importlib
import json

import pytest
import torch

from diffsieve.compare.clip import generate_clip
from diffsieve.compare.prepare import prepare, resolve_place
from diffsieve.compare.shards import Deadline, Shard
from diffsieve.errors import UserInputError
from diffsieve.processors import observe_attention
from diffsieve.study import capture, captured_files, read_captured
from tests import tiny_pixels
from tests.tiny import HEADS


def test_files_hold_what_attention_saw(pipe, captures):
    config = captures(both_branches=True)
    result = capture(config, pipe=pipe)
    files = captured_files(config.out)
    # The last step of the warm-up (1 of 5), the first sparse one, the middle and the last; 3 layers, 2 branches.
    assert result == {"out": str(config.out), "files": 24, "clips": 1, "missing": 0}
    assert len(files) == 24
    seen = {}
    with observe_attention(pipe, lambda call: seen.setdefault((call.layer, call.step, call.call), call)):
        ready = prepare(resolve_place(config, pipe), pipe=pipe, attention=None)
        generate_clip(pipe, ready.config, prompt="a cat moves left", seed=0)
    for path in files:
        captured = read_captured(path)
        call = seen[captured.layer, captured.step, captured.call]
        assert torch.equal(captured.query, call.query)
        assert torch.equal(captured.key, call.key)
        assert torch.equal(captured.value, call.value)
        assert (captured.sigma, captured.timestep) == (call.sigma, call.timestep)
        assert (captured.num_steps, captured.num_layers, captured.grid_thw) == (5, 3, (3, 4, 4))
        assert captured.scale == pytest.approx(12**-0.5)
        assert captured.query.shape == (1, HEADS, 48, 12)
    assert {read_captured(path).step for path in files} == {0, 1, 3, 4}
    record = json.loads((files[0].parent / "capture.json").read_text(encoding="utf-8"))
    assert sorted(record["files"]) == sorted(path.name for path in files)


def test_layers_steps_and_the_first_branch_are_chosen(pipe, captures):
    config = captures(layers=(-1,), steps_kept=(3,))
    assert capture(config, pipe=pipe)["files"] == 1
    (path,) = captured_files(config.out)
    captured = read_captured(path)
    assert (captured.layer, captured.number, captured.step, captured.call) == ("transformer.blocks.2", 2, 3, 0)


def test_finished_clips_are_kept_and_the_rest_made_later(pipe, captures):
    config = captures(seed=(0, 1), layers=(1,))
    late = capture(config, pipe=pipe, deadline=Deadline(1e-9))
    assert (late["clips"], late["missing"]) == (0, 2)
    assert capture(config, pipe=pipe, shard=Shard(1, 2))["clips"] == 1
    before = {path: path.stat().st_mtime_ns for path in captured_files(config.out)}
    told = []
    assert capture(config, pipe=pipe, progress=told.append)["clips"] == 2
    assert len(told) == 1
    assert before.items() <= {path: path.stat().st_mtime_ns for path in captured_files(config.out)}.items()


def test_the_folder_of_another_prompt_is_not_taken_for_this_one(pipe, captures):
    start = "a cat that moves very slowly over the fence"  # names of folders hold 40 characters of it
    config = captures(layers=(1,), steps_kept=(1,), prompt=(f"{start}, left",))
    capture(config, pipe=pipe)
    with pytest.raises(UserInputError, match=r"prompt must be 'a cat .*, left', whose captures are in .*, right'"):
        capture(captures(layers=(1,), steps_kept=(1,), prompt=(f"{start}, right",)), pipe=pipe)


def test_a_later_leg_may_run_on_another_gpu(pipe, captures, monkeypatch):
    config = captures(layers=(1,), steps_kept=(1,))
    capture(config, pipe=pipe)
    monkeypatch.setattr(
        importlib.import_module("diffsieve.study.capture"),  # the package has a function of that name
        "resolve_place",
        lambda config, pipe: dataclasses.replace(resolve_place(config, pipe), device="cuda:1"),
    )
    assert capture(dataclasses.replace(config, seed=(0, 1)), pipe=pipe)["clips"] == 2


def test_refusals(pipe, captures, tmp_path):
    with pytest.raises(UserInputError, match="step must be from 0 to 4"):
        capture(captures(steps_kept=(5,)), pipe=pipe)
    with pytest.raises(UserInputError, match="sparsity, backend must be left out for method dense"):
        captures(sparsity=0.5, backend="torch")
    with pytest.raises(UserInputError, match="layers must name layers"):
        capture(captures(layers=(9,)), pipe=pipe)
    config = captures(layers=(1,), steps_kept=(1,))
    capture(config, pipe=pipe)
    with pytest.raises(UserInputError, match=r"layers must be \[1\]"):
        capture(captures(layers=(2,), steps_kept=(1,)), pipe=pipe)
    with pytest.raises(UserInputError, match=r"layers must be \[1\]"):
        capture(captures(layers=(2,), steps_kept=(1,), prompt=("another",)), pipe=pipe)
    (path,) = captured_files(config.out)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(UserInputError, match="cannot be read as a captured attention call"):
        read_captured(path)
    with pytest.raises(UserInputError, match="finished clip"):
        captured_files(tmp_path)


def test_a_model_of_pictures_is_refused(captures):
    with pytest.raises(UserInputError, match="model must be a text-to-video pipeline, got PixelDiTPipeline"):
        capture(captures(), pipe=tiny_pixels.pipeline())
