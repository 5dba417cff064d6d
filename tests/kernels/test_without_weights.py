"""The study's ablation without the weights of pooled tokens, under the Triton interpreter: kernels and check."""

import importlib.util

import pytest

from tests.kernels.own_process import run_script

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton has no build for this platform"),
]


@pytest.fixture(scope="module")
def interpreted() -> dict:
    return run_script("interpreted_without_weights.py")


def test_the_definition_with_weights_is_that_of_the_kernels_as_they_are(interpreted):
    assert max(interpreted["as they are"].values()) < 2e-6, interpreted["as they are"]


def test_the_check_refuses_kernels_that_still_have_their_weights(interpreted):
    assert "got a relative error of 0." in interpreted["refusal"]


def test_kernels_without_weights_agree_with_the_definition_and_pass_the_check(interpreted):
    assert max(interpreted["without"].values()) < 2e-6, interpreted["without"]
    assert interpreted["check"] == max(interpreted["without"].values())
