"""Ctrl-C during `generate` and `compare`."""

import os
import signal

import pytest

from diffsieve.cli.run_progress import RunProgress
from diffsieve.compare import Progress

REPORT = Progress(item=0, items=1, prompt="a cat", seed=0, run="dense", step=1, steps=4, stage="denoise")

pytestmark = pytest.mark.skipif(os.name != "posix", reason="os.kill sends a signal on POSIX alone")


def press():
    """Ctrl-C whose KeyboardInterrupt gets lost, as in a finalizer."""
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        return True
    return False


def test_an_interrupt_that_was_lost_ends_the_run_with_the_next_report():
    with RunProgress("tiny") as progress:
        progress(REPORT)
        assert press()
        with pytest.raises(KeyboardInterrupt):
            progress(REPORT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_somebody_elses_handling_stays():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with RunProgress("tiny") as progress:
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            progress(REPORT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
