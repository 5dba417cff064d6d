"""Messages about files say why, whatever kind of error came."""

import errno
from pathlib import Path

import pytest

from diffsieve.compare.folder import make_output
from diffsieve.errors import UserInputError, os_reason
from diffsieve.processors.calibration import write_orders


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "file"), "No space left on device"),
        (OSError("the share went away"), "the share went away"),
        (BlockingIOError(), "BlockingIOError"),
    ],
)
def test_an_error_without_the_words_of_the_system_is_told_too(tmp_path, monkeypatch, error, reason):
    assert os_reason(error) == reason

    def fails(*_arguments, **_options):
        raise error

    monkeypatch.setattr(Path, "write_text", fails)
    monkeypatch.setattr(Path, "mkdir", fails)
    for write in (lambda: write_orders(tmp_path / "orders.json", {}), lambda: make_output(tmp_path / "out")):
        with pytest.raises(UserInputError, match=f": {reason}$"):
            write()
