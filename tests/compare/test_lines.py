"""Lines of results: torn ones do not count, two writers of one file are refused."""

import pytest

from diffsieve.compare.lines import line_writer, read_lines
from diffsieve.errors import UserInputError


def test_lines_of_all_processes_are_read(tmp_path):
    for shard in range(2):
        with line_writer(tmp_path / f"clips-{shard}.jsonl") as lines:
            lines.append({"shard": shard, "text": "ä\n"})
            lines.append({"shard": shard})
    assert [line["shard"] for line in read_lines(tmp_path, "clips")] == [0, 0, 1, 1]
    assert read_lines(tmp_path, "clips")[0]["text"] == "ä\n"
    assert read_lines(tmp_path, "other") == []


def test_a_torn_line_is_ignored_and_then_cut_off(tmp_path):
    path = tmp_path / "clips-0.jsonl"
    path.write_text('{"a": 1}\n{"a": 2')
    assert read_lines(tmp_path, "clips") == [{"a": 1}]
    with line_writer(path) as lines:
        lines.append({"a": 3})
    assert path.read_text() == '{"a": 1}\n{"a": 3}\n'


def test_a_line_that_is_no_object_is_an_error(tmp_path):
    (tmp_path / "clips-0.jsonl").write_text('{"a": 1}\nnonsense\n')
    with pytest.raises(UserInputError, match="got something else in 2"):
        read_lines(tmp_path, "clips")


def test_two_writers_and_nan_are_refused(tmp_path):
    path = tmp_path / "clips-0.jsonl"
    with line_writer(path) as lines:
        with pytest.raises(UserInputError, match="must not be in use"), line_writer(path):
            pass
        with pytest.raises(ValueError, match="not JSON compliant"):
            lines.append({"a": float("nan")})
    assert path.read_text() == ""
