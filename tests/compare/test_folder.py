"""The output folder: refused before any work, never cleared beyond our own files, resumed only with equal settings."""

import json
import os

import pytest

from diffsieve.compare import folder as folders
from diffsieve.errors import UserInputError


def started(out, settings=None, prompt=("a cat", "a dog"), seed=(0, 1)):
    folders.start(out, settings or {"steps": 4, "versions": {"torch": "2.11"}}, prompt, seed)
    return folders.read_settings(out)


def check(out, *, resume=False, overwrite=False):
    return folders.check_output(out, resume=resume, overwrite=overwrite)


def test_new_and_empty_folders_are_free_and_stay_untouched(tmp_path):
    assert check(tmp_path / "a" / "b") is None
    assert check(tmp_path, resume=True) is None
    assert list(tmp_path.iterdir()) == []


def test_an_occupied_folder_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    for choice in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(UserInputError, match="out must be a new or empty folder"):
            check(tmp_path, **choice)


def test_an_earlier_run_needs_a_choice(tmp_path):
    started(tmp_path)
    with pytest.raises(UserInputError, match="resume continues it, overwrite replaces it"):
        check(tmp_path)
    assert check(tmp_path, resume=True)["prompt"] == ["a cat", "a dog"]
    assert check(tmp_path, overwrite=True)["seed"] == [0, 1]
    with pytest.raises(UserInputError, match="not both"):
        check(tmp_path, resume=True, overwrite=True)


def test_settings_of_something_else_are_refused(tmp_path):
    for text in ('{"schema": "other"}', "[]", "{"):
        (tmp_path / folders.SETTINGS).write_text(text)
        with pytest.raises(UserInputError, match="another settings"):
            check(tmp_path, resume=True)


def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "deeper"):
        with pytest.raises(UserInputError, match="out must be a folder"):
            check(out)


def test_a_folder_without_permission_is_refused(tmp_path, monkeypatch):
    # Root may write anywhere, so the answer of the system is given instead of the permission.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UserInputError, match="out must be writable"):
        check(tmp_path / "new")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 5}, "steps must be 4 to resume the run in .*, got 5"),
        ({"versions": {"torch": "2.14"}}, "versions.torch must be '2.11' to resume .*, got '2.14'"),
        ({"novelty": 1}, "novelty must be None to resume"),
    ],
    ids=["number", "nested", "new"],
)
def test_changed_settings_are_named(tmp_path, settings, message):
    earlier = started(tmp_path)
    with pytest.raises(UserInputError, match=message):
        folders.check_same_settings(earlier, settings, tmp_path)


def test_equal_settings_pass_in_the_form_that_json_keeps(tmp_path):
    earlier = started(tmp_path, {"layers": (0, 1), "steps": 4})
    folders.check_same_settings(earlier, {"layers": (0, 1)}, tmp_path)


def test_prompts_and_seeds_may_be_added_but_not_lost(tmp_path):
    earlier = started(tmp_path)
    folders.check_same_clips(earlier, ("a cat", "a dog", "a fox"), (2, 1, 0), tmp_path)
    with pytest.raises(UserInputError, match="prompt must begin with"):
        folders.check_same_clips(earlier, ("a dog", "a cat"), (0, 1), tmp_path)
    with pytest.raises(UserInputError, match="seed must hold"):
        folders.check_same_clips(earlier, ("a cat", "a dog"), (0,), tmp_path)


def test_clearing_removes_only_files_of_the_run(tmp_path):
    earlier = started(tmp_path, prompt=("a cat",), seed=(0, 1))
    ours, both = (tmp_path / folders.item_name(0, "a cat", seed) for seed in (0, 1))
    for folder in (ours, both):
        folder.mkdir()
        (folder / "dense.mp4").write_text("")
        (folder / ".sparse.mp4.diffsieve-part").write_text("")
    (both / "notes.txt").write_text("mine")
    (tmp_path / "mine.txt").write_text("mine")
    folders.clear(tmp_path, earlier, ["dense.mp4"])
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == [
        both.name,
        f"{both.name}/notes.txt",
        "mine.txt",
    ]


@pytest.mark.parametrize(
    ("prompt", "name"),
    [
        ("A cat moves up!", "001-a-cat-moves-up-seed7"),
        ("Überraschung: naïve", "001-uberraschung-naive-seed7"),
        ("../../etc/passwd", "001-etc-passwd-seed7"),
        ("猫", "001-seed7"),
        ("word " * 40, "001-word-word-word-word-word-word-word-word-seed7"),
    ],
    ids=["plain", "accents", "path", "no-latin", "long"],
)
def test_names_of_items_are_safe(prompt, name):
    assert folders.item_name(0, prompt, 7) == name


def test_a_record_counts_only_with_all_its_files(tmp_path):
    assert folders.read_record(tmp_path) is None
    (tmp_path / folders.RECORD).write_text(json.dumps({"files": {"dense": "dense.mp4"}}))
    assert folders.read_record(tmp_path) is None
    (tmp_path / "dense.mp4").write_text("")
    assert folders.read_record(tmp_path) == {"files": {"dense": "dense.mp4"}}


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"files": []}'])
def test_a_damaged_record_does_not_count(tmp_path, text):
    (tmp_path / folders.RECORD).write_text(text)
    assert folders.read_record(tmp_path) is None


def test_settings_that_lack_a_part_are_refused(tmp_path):
    (tmp_path / folders.SETTINGS).write_text(json.dumps({"schema": folders.SETTINGS_SCHEMA, "settings": {}}))
    with pytest.raises(UserInputError, match="out must hold a comparison of this version"):
        folders.read_settings(tmp_path)


def test_a_folder_serves_one_run_at_a_time(tmp_path):
    first = folders.exclusive(tmp_path)
    first.__enter__()
    with pytest.raises(UserInputError, match="out must not be in use by another run"), folders.exclusive(tmp_path):
        pass
    first.__exit__(None, None, None)
    with folders.exclusive(tmp_path):
        assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path, monkeypatch):
    def refuse(self, **_):
        raise PermissionError(1, "Operation not permitted", str(self))

    monkeypatch.setattr(type(tmp_path), "mkdir", refuse)  # as on a file system that root, too, cannot write on
    with pytest.raises(UserInputError, match=r"out must be a folder .*, got .*/new: Operation not permitted"):
        folders.make_output(tmp_path / "new")
