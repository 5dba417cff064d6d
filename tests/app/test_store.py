"""The folder of runs: whole or absent, kept, cleaned by age and size, private, one server at a time."""

import json
import os
import stat

import pytest

from diffsieve.app.errors import AppError
from diffsieve.app.store import Bounds, Store, run_digest
from diffsieve.app.views import run_title
from diffsieve.errors import UserInputError

FILES = {"dense": "dense.mp4"}


def report(created="2026-01-01T00:00:00+00:00"):
    """What the lists of runs need of a report."""
    clip = {"folder": "clip", "files": FILES, "prompt": "a cat", "seed": 0, "metrics": {"psnr": {"mean": 30.0}}}
    return {"created": created, "settings": {"method": "ba-att", "steps": 4, "sparsity": 0.5}, "clips": [clip]}


def add(store, run_id, *, size=10, age=0.0):
    with store.new_run(run_id) as work:
        (work / "clip").mkdir(parents=True)
        (work / "clip" / "dense.mp4").write_bytes(b"x" * size)
        (work / "report.json").write_text(json.dumps(report(f"2026-01-01T00:00:{59 - int(age):02d}+00:00")))
    folder = store.root / "runs" / run_id
    os.utime(folder, (folder.stat().st_mtime - age,) * 2)


@pytest.fixture
def store(tmp_path):
    made = Store(tmp_path / "store", Bounds(age=30, size=2000, kept=2), tmp_path / "examples")
    made.open()
    yield made
    made.close()


def ids(store):
    return [run.id for run in store.runs()]


def test_the_folder_is_private(store):
    assert stat.S_IMODE(store.root.stat().st_mode) == 0o700
    assert stat.S_IMODE(store.served.stat().st_mode) == 0o700


def test_one_server_for_a_folder(store):
    with pytest.raises(UserInputError, match="folder must not be in use by another server"):
        Store(store.root).open()


def test_a_folder_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserInputError, match=r"folder must be writable, got .*: "):
        Store(tmp_path / "file").open()


def test_an_unfinished_run_vanishes(store):
    def fail():
        with store.new_run("bad") as work:
            work.mkdir()
            (work / "half").write_text("")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert ids(store) == []
    assert not list((store.root / "work").iterdir())


def test_what_a_killed_server_left_is_removed(store, tmp_path):
    store.close()
    (store.root / "work" / "dead").mkdir()
    again = Store(store.root, examples=tmp_path / "examples")
    again.open()
    assert not list((store.root / "work").iterdir())
    again.close()


def test_old_runs_go_and_kept_ones_stay(store):
    add(store, "new")
    add(store, "old", age=40)
    add(store, "kept", age=50)
    store.keep("kept", True)
    os.utime(store.root / "runs" / "kept", (0, 0))
    served = store.publish(store.find("old"), "dense")
    assert served.read_bytes() == b"x" * 10
    store.clean()
    assert ids(store) == ["new", "kept"]
    assert not served.exists()
    store.keep("kept", False)
    os.utime(store.root / "runs" / "kept", (0, 0))
    store.clean()
    assert ids(store) == ["new"]


def test_old_runs_go_when_a_server_starts(store, tmp_path):
    add(store, "new")
    add(store, "old", age=40)
    store.close()
    again = Store(store.root, Bounds(age=30), tmp_path / "examples")
    again.open()
    assert ids(again) == ["new"]
    again.close()


def test_the_oldest_go_where_all_are_too_large(store):
    for number, run_id in enumerate(("a", "b", "c")):
        add(store, run_id, size=700, age=3.0 - number)
    (store.dense_clips / "x.npz").write_bytes(b"x" * 500)
    os.utime(store.dense_clips / "x.npz", (0, 0))
    store.clean()
    assert ids(store) == ["c", "b"]
    assert not list(store.dense_clips.iterdir())


def test_no_more_runs_can_be_kept_than_the_bound(store):
    for run_id in ("a", "b", "c"):
        add(store, run_id)
    store.keep("a", True)
    store.keep("b", True)
    with pytest.raises(AppError, match="at most 2 runs can be kept"):
        store.keep("c", True)
    assert store.keep("b", True).kept


def test_examples_are_offered_and_never_touched(store, tmp_path):
    folder = tmp_path / "examples" / "example-1"
    folder.mkdir(parents=True)
    (folder / "report.json").write_text(json.dumps(report("2020-01-01T00:00:00+00:00")))
    add(store, "own")
    assert [(run.id, run.example) for run in store.runs()] == [("own", False), ("example-1", True)]
    with pytest.raises(AppError, match="examples are always kept"):
        store.keep("example-1", False)


def changed(*path, value=None):
    """A whole report with another value at a path, or without it."""
    damaged = part = report()
    for key in path[:-1]:
        part = part[key]
    if value is None:
        del part[path[-1]]
    else:
        part[path[-1]] = value
    return json.dumps(damaged)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "Expecting property name"),
        (f"{'[' * 100_000}", "recursion"),
        ("[]", "created must be a text, got nothing"),
        ("null", "created must be a text, got nothing"),
        (changed("created"), "created must be a text, got nothing"),
        (changed("created", value=3), "created must be a text, got 3"),
        (changed("clips", value=[]), "clips.0.folder must be a text, got nothing"),
        (changed("clips", 0, "files", value={"dense": 1}), "clips.0.files must be an object of texts, got {"),
        (changed("clips", 0, "prompt"), "clips.0.prompt must be a text, got nothing"),
        (changed("clips", 0, "metrics", value="none"), "clips.0.metrics.psnr.mean must be a number or null"),
        (changed("settings", "sparsity", value="half"), "settings.sparsity must be a number, got 'half'"),
        (changed("settings", "method", value="other"), "settings.method must be one of ba-att, llsa, got 'other'"),
        (changed("settings", "method", value="llsa"), "settings.attention.topk must be a number or numbers"),
    ],
)  # fmt: skip
def test_a_damaged_run_is_left_out_and_named_once(text, told, store, caplog):
    add(store, "good")
    add(store, "bad")
    (store.root / "runs" / "bad" / "report.json").write_text(text)
    assert ids(store) == ids(store) == ["good"]
    assert store.get("bad") is None
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert lines[0].startswith(f"{store.root / 'runs' / 'bad'} is no finished run and is not listed: ")
    assert told in lines[0]


def test_what_needs_no_more_is_listed(store):
    add(store, "without psnr")
    path = store.root / "runs" / "without psnr" / "report.json"
    path.write_text(path.read_text().replace('"mean": 30.0', '"mean": null'))
    assert [run_title(run) for run in store.runs()] == ["BA-Att 50 % · a cat · seed 0 · 4 steps · no PSNR"]


def test_only_files_of_the_report_are_published(store):
    add(store, "a")
    run = store.find("a")
    assert store.publish(run, "dense").parent == store.served / "runs" / "a"
    assert store.publish(run, "../../secret") is None
    assert store.publish(run, "poster") is None


def test_the_digest_is_of_the_values():
    assert run_digest({"a": 1, "b": 2}) == run_digest({"b": 2, "a": 1}) != run_digest({"a": 1, "b": 3})
