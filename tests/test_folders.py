"""A folder is replaced whole or not at all, wherever the writing breaks off."""

import os

import pytest

from diffsieve import folders
from diffsieve.errors import DiffsieveError
from diffsieve.folders import replace_folder


def fill(text):
    return lambda folder: (folder / "a.txt").write_text(text)


@pytest.fixture
def out(tmp_path):
    replace_folder(tmp_path / "out", fill("old"))
    return tmp_path / "out"


def state(out):
    return os.listdir(out.parent), (out / "a.txt").read_text()


def test_the_new_one_takes_the_place_of_the_old(out):
    assert replace_folder(out, fill("new!")) == 4
    assert state(out) == (["out"], "new!")


def test_what_breaks_off_while_writing_leaves_the_old_one(out):
    def half(folder):
        fill("half")(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replace_folder(out, half)
    with pytest.raises(DiffsieveError, match="the folder out must have at most 3 bytes, got 4"):
        replace_folder(out, fill("more"), max_bytes=3)
    assert state(out) == (["out"], "old")


def test_what_breaks_off_between_the_two_renames_brings_the_old_one_back(out, monkeypatch):
    rename, calls = os.replace, []

    def broken(source, target):
        calls.append(target)
        if len(calls) == 2:
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(folders.os, "replace", broken)
    with pytest.raises(KeyboardInterrupt):
        replace_folder(out, fill("new"))
    assert state(out) == (["out"], "old")


def test_a_process_that_was_killed_between_them_is_mended_by_the_next(out):
    os.replace(out, out.with_name(".out.old"))
    with pytest.raises(DiffsieveError):
        replace_folder(out, fill("more"), max_bytes=3)
    assert state(out) == (["out"], "old")
