"""Checkpoints: whole or not at all, averaged weights, sets of shards."""

import json
import os
import stat
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

from diffsieve.errors import UserInputError
from diffsieve.pipelines.training.checkpoint import (
    AveragedWeights,
    copy_weights,
    load_module,
    load_state,
    load_weights,
    module_tensors,
    save_state,
    save_weights,
    write_atomically,
)


class InterruptedWriteError(Exception):
    """Stands for a kill in the middle of a write."""


def test_an_interrupted_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def half(temporary):
        temporary.write_text("ne")
        raise InterruptedWriteError

    with pytest.raises(InterruptedWriteError):
        write_atomically(path, half)
    assert path.read_text() == "old"
    assert [item.name for item in tmp_path.iterdir()] == ["a.txt"], "half of a file would keep a full disk full"
    write_atomically(path, lambda temporary: temporary.write_text("new"))
    assert path.read_text() == "new"
    assert [item.name for item in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.skipif(os.name != "posix", reason="needs a limit on the size of files")
@pytest.mark.parametrize("what", ["state", "weights", "folder"])
def test_a_full_disk_is_told_and_leaves_the_old_files(tmp_path, what):
    """A process that may write no file above 20,000 bytes stands for a full disk: the system refuses in the middle."""
    code = f"""
        import resource, sys
        from pathlib import Path
        import torch
        from safetensors.torch import save_file
        from diffsieve.folders import replace_folder
        from diffsieve.pipelines.training.checkpoint import save_state, save_weights
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        folder = Path(sys.argv[1])
        def save(size):
            tensors = {{"a": torch.zeros(size)}}
            if {what!r} == "state":
                save_state(folder, tensors)
            elif {what!r} == "weights":
                save_weights(folder, tensors, size)
            else:
                replace_folder(folder / "model", lambda part: save_file(tensors, part / "a.safetensors"))
        save(10)
        before = sorted((path.name, path.stat().st_size) for path in folder.rglob("*"))
        try:
            save(100_000)
        except OSError as error:
            print(error)
        assert sorted((path.name, path.stat().st_size) for path in folder.rglob("*")) == before
    """
    run = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    ended = subprocess.run(run, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "File too large" in ended.stdout
    assert {"state": "state.pt", "weights": "weights-", "folder": "model cannot be written"}[what] in ended.stdout


@pytest.mark.parametrize("fail_at", [0, 1, 2, 3], ids=["first-shard", "second-shard", "third-shard", "index"])
def test_a_set_of_shards_is_complete_at_every_moment(tmp_path, monkeypatch, fail_at):
    old = {name: torch.full((4,), 1.0) for name in "abc"}
    save_weights(tmp_path, old, 1, max_bytes=16)
    calls = iter(range(9))
    replace = __import__("os").replace

    def failing(source, target):
        if next(calls) == fail_at:
            raise InterruptedWriteError
        replace(source, target)

    monkeypatch.setattr("os.replace", failing)
    with pytest.raises(InterruptedWriteError):
        save_weights(tmp_path, {name: torch.full((4,), 2.0) for name in "abc"}, 2, max_bytes=16)
    assert all(torch.equal(value, old[name]) for name, value in load_weights(tmp_path).items())


def test_shards_are_small_readable_by_all_and_replaced(tmp_path):
    tensors = {name: torch.randn(8) for name in "abcde"}
    save_weights(tmp_path, tensors, 1, max_bytes=64)
    save_weights(tmp_path, tensors, 2, max_bytes=64)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) == 3
    assert all("0000002" in path.name for path in shards)
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o644 for path in tmp_path.iterdir())
    loaded = load_weights(tmp_path)
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_a_copied_set_equals_its_source(tmp_path):
    for step in (1, 2):
        save_weights(tmp_path / "a", {"x": torch.full((3,), float(step))}, step)
        copy_weights(tmp_path / "a", tmp_path / "b")
        assert torch.equal(load_weights(tmp_path / "b")["x"], torch.full((3,), float(step)))
    assert len(list((tmp_path / "b").iterdir())) == 2


def test_missing_weights_are_named(tmp_path):
    with pytest.raises(UserInputError, match=r"no weights\.json"):
        load_weights(tmp_path)
    save_weights(tmp_path, {"x": torch.zeros(1)}, 1)
    next(tmp_path.glob("*.safetensors")).unlink()
    with pytest.raises(UserInputError, match="is missing"):
        load_weights(tmp_path)


def test_weights_of_another_size_are_refused():
    tensors = module_tensors({"net": nn.Linear(2, 3)})
    load_module(nn.Linear(2, 3), tensors, "net")
    with pytest.raises(UserInputError, match="must fit the model settings: size mismatch for weight"):
        load_module(nn.Linear(2, 4), tensors, "net")
    with pytest.raises(UserInputError, match="must hold a other"):
        load_module(nn.Linear(2, 3), tensors, "other")


def test_a_state_of_another_format_is_refused(tmp_path):
    assert load_state(tmp_path, torch.device("cpu")) is None
    save_state(tmp_path, {"step": 3})
    assert load_state(tmp_path, torch.device("cpu"))["step"] == 3
    torch.save({"format": 0}, tmp_path / "state.pt")
    with pytest.raises(UserInputError, match="format"):
        load_state(tmp_path, torch.device("cpu"))


def test_the_average_follows_its_formula():
    layer = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        layer.weight.fill_(0.0)
    average = AveragedWeights({"layer": layer}, decay=0.25)
    expected = 0.0
    for n in range(1, 6):
        with torch.no_grad():
            layer.weight.fill_(float(n))
        average.update()
        decay = min(0.25, (1 + n) / (10 + n))
        expected = decay * expected + (1 - decay) * n
    target = nn.Linear(1, 1, bias=False)
    average.copy_to("layer", target)
    assert float(target.weight.detach()) == pytest.approx(expected, rel=1e-6)
    again = AveragedWeights({"layer": nn.Linear(1, 1, bias=False)}, decay=0.25)
    again.load_state_dict(json.loads(json.dumps({"updates": 5})) | {"average": average.state_dict()["average"]})
    again.copy_to("layer", layer)
    assert torch.equal(layer.weight, target.weight)
