"""Shares of several processes and the end of a leg."""

import time

import pytest

from diffsieve.compare.shards import Deadline, Shard, resolve_shard
from diffsieve.errors import UserInputError


def test_shards_cover_every_item_once():
    items = list(range(11))
    parts = [Shard(i, 3).of(items) for i in range(3)]
    assert sorted(item for part in parts for item in part) == items
    assert parts[1] == [1, 4, 7, 10]
    assert Shard(4, 5).of([1, 2]) == []


def test_a_shard_comes_from_the_flag_or_from_the_launcher():
    launched = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    assert resolve_shard("0/2", launched) == Shard(0, 2)
    assert resolve_shard(None, launched) == Shard(3, 4, "cuda:1")
    assert resolve_shard(None, {}) == Shard(0, 1)


@pytest.mark.parametrize("text", ["2/2", "-1/2", "1", "a/b", "0/0", ""])
def test_a_wrong_shard_is_refused(text):
    with pytest.raises(UserInputError, match="shard must be I/N"):
        resolve_shard(text, {})


def test_a_deadline_leaves_room_for_the_longest_piece():
    assert not Deadline(None).passed
    deadline = Deadline(10.0, started=time.monotonic() - 5.0)
    assert not deadline.passed
    deadline.begin()
    deadline._last -= 6.0
    deadline.end()
    assert deadline.passed
    with pytest.raises(UserInputError, match="max_seconds must be above 0"):
        Deadline(0)
