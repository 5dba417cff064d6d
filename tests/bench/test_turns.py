"""Turns of several processes at one GPU."""

import subprocess
import sys
import threading
from pathlib import Path

from turns import turn

HELD = """
import sys
from pathlib import Path
from turns import turn

with turn(Path(sys.argv[1])):
    print("in", flush=True)
    sys.stdin.read()
"""


def test_one_waits_for_the_other_and_for_one_that_is_killed(tmp_path):
    file, entered = tmp_path / "turns", threading.Event()

    def enter():
        with turn(file):
            entered.set()

    other = subprocess.Popen(
        [sys.executable, "-c", HELD, str(file)],
        env={"PYTHONPATH": str(Path(__file__).parents[2] / "benchmarks")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert other.stdout.readline() == b"in\n"
        waiting = threading.Thread(target=enter)
        waiting.start()
        assert not entered.wait(0.5)
    finally:
        other.kill()
        other.communicate()
    waiting.join(60)
    assert entered.is_set()


def test_no_file_does_not_wait(tmp_path):
    with turn(None), turn(None):
        pass
