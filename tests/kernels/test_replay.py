"""Repeated calls launch the same kernels with the same arguments at the new tensors, or are not repeated."""

import importlib.util
import os

import pytest

from tests.kernels.own_process import run_script

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton has no build for this platform"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1 replaces the compiler"),
]


@pytest.fixture(scope="module")
def launched() -> dict:
    return run_script("launched_llsa.py")


def test_a_repeated_call_launches_what_a_whole_call_does(launched):
    assert len(launched["same"]) == 10
    for case, found in launched["same"].items():
        assert all(found.values()), (case, found)


def test_a_misaligned_tensor_gets_its_own_kernel(launched):
    assert launched["other kernel when misaligned"]


def test_tensors_that_were_one_when_recorded_may_be_several(launched):
    assert launched["one tensor first, three then"]


def test_what_launches_alone_do_not_repeat_is_called_again(launched):
    assert launched["not repeated"] == dict.fromkeys(("operation", "copy", "lists of unknown origin", "profiler"), True)


def test_calls_are_forgotten_when_there_are_too_many(launched):
    assert launched["forgotten"]


def test_a_recorded_call_leaves_no_tensor_to_the_garbage_collector(launched):
    assert launched["frees what it recorded"]


def test_a_repeated_backward_takes_no_memory_that_no_kernel_uses(launched):
    """Before, copies that were not made had room: 1.51 at 262,144 tokens on an H200."""
    for case, ratio in launched["memory"].items():
        assert 1 < ratio < 1.25, case


@pytest.mark.gpu
def test_repeated_calls_give_the_bits_of_whole_ones_on_a_gpu():
    from tests.kernels.llsa_triton_cases import repeated_equals_whole

    same = repeated_equals_whole("cuda")
    assert len(same) == 4
    for kind, found in same.items():
        assert found == {"same bits": True, "repeated": 3}, (kind, found)
