"""The prompt suite: where it is found, what is chosen of it, what is refused."""

import json
import sys

import pytest

from diffsieve.errors import UserInputError
from diffsieve.vbench import DIMENSIONS, load_suite
from diffsieve.vbench.suite import video_name


def test_prompts_are_chosen_by_dimension_and_counted_once(full_info):
    suite = load_suite(full_info)
    assert suite.prompts == ("a cat moves left", "a dog, in Petra's façades.", "a red cat")
    assert suite.select(("color",)).prompts == ("a red cat",)
    assert suite.prompts_of("temporal_flickering") == suite.prompts[:2]
    part = suite.select(("motion_smoothness", "temporal_flickering"), 1)
    assert part.prompts == ("a dog, in Petra's façades.",)
    assert suite.select((), 3) == suite
    assert video_name(suite.prompts[1], 4) == "a dog, in Petra's façades.-4.mp4"
    assert len(set(DIMENSIONS)) == 16


def test_the_package_is_found_in_another_environment(tmp_path, monkeypatch, full_info):
    package = tmp_path / "there" / "vbench"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (package / "VBench_full_info.json").write_bytes(full_info.read_bytes())
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    assert len(load_suite(python=sys.executable).prompts) == 3
    monkeypatch.setenv("PYTHONPATH", "")
    with pytest.raises(UserInputError, match="the package vbench is not in that of"):
        load_suite(python=sys.executable)
    with pytest.raises(UserInputError, match="cannot be run"):
        load_suite(python=str(tmp_path / "python"))
    with pytest.raises(UserInputError, match="is not in this environment"):
        load_suite()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("nonsense", "cannot be read"),
        ("{}", "must be a list of prompts"),
        ("[]", "must be a list of prompts"),
        ('[{"prompt_en": "a", "dimension": ["beauty"]}]', "must be a list of prompts"),
        (json.dumps([{"prompt_en": "a/b", "dimension": ["color"]}]), "prompts that can name a file"),
    ],
    ids=["no-json", "no-list", "empty", "dimension", "slash"],
)
def test_other_files_are_refused(tmp_path, content, message):
    path = tmp_path / "info.json"
    path.write_text(content)
    with pytest.raises(UserInputError, match=message):
        load_suite(path)


def test_wrong_choices_are_refused(full_info):
    suite = load_suite(full_info)
    with pytest.raises(UserInputError, match="dimension must be one of"):
        suite.select(("beauty",))
    with pytest.raises(UserInputError, match="limit must be from 1 to 3"):
        suite.select((), 4)
