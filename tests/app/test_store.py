"""The folder of runs: whole or absent, kept, cleaned by age and size, private, one server at a time."""

import json
import os
import stat

import pytest

from diffsieve.app.errors import AppError
from diffsieve.app.store import Bounds, Store, run_digest
from diffsieve.errors import UserInputError

FILES = {"dense": "dense.mp4"}


def add(store, run_id, *, size=10, age=0.0):
    with store.new_run(run_id) as work:
        (work / "clip").mkdir(parents=True)
        (work / "clip" / "dense.mp4").write_bytes(b"x" * size)
        report = {
            "created": f"2026-01-01T00:00:{59 - int(age):02d}+00:00",
            "clips": [{"folder": "clip", "files": FILES}],
        }
        (work / "report.json").write_text(json.dumps(report))
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
        add(store, run_id, size=800, age=3.0 - number)
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
    report = {"created": "2020-01-01T00:00:00+00:00", "clips": [{"folder": "clip", "files": FILES}]}
    (folder / "report.json").write_text(json.dumps(report))
    add(store, "own")
    assert [(run.id, run.example) for run in store.runs()] == [("own", False), ("example-1", True)]
    with pytest.raises(AppError, match="examples are always kept"):
        store.keep("example-1", False)


def test_a_damaged_run_is_left_out(store):
    add(store, "good")
    add(store, "bad")
    (store.root / "runs" / "bad" / "report.json").write_text("{")
    assert ids(store) == ["good"]


def test_only_files_of_the_report_are_published(store):
    add(store, "a")
    run = store.find("a")
    assert store.publish(run, "dense").parent == store.served / "runs" / "a"
    assert store.publish(run, "../../secret") is None
    assert store.publish(run, "poster") is None


def test_the_digest_is_of_the_values():
    assert run_digest({"a": 1, "b": 2}) == run_digest({"b": 2, "a": 1}) != run_digest({"a": 1, "b": 3})
