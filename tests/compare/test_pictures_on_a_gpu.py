"""Comparisons of pictures on a CUDA GPU: recording with the Triton backend, and BA-Att in Hilbert order."""

import dataclasses

import pytest
import torch

from diffsieve.compare import CompareConfig, compare
from diffsieve.compare.selection_file import read_selections
from diffsieve.processors import apply_sparse_attention, remove_sparse_attention, trained_llsa
from tests import tiny_pixels

pytestmark = pytest.mark.gpu


@pytest.fixture
def pipe():
    # 4,096 tokens in heads of 64, which the kernels take.
    sizes = {"sample_size": 64, "attention_head_dim": 64, "block_size": 16, "topk": 8}
    return tiny_pixels.pipeline(**sizes).to("cuda", torch.bfloat16)


def test_recording_changes_no_bit(pipe):
    config = trained_llsa(pipe)
    apply_sparse_attention(pipe, config)
    expected = tiny_pixels.generate(pipe)
    apply_sparse_attention(pipe, dataclasses.replace(config, record_masks=(0, 1)))
    assert torch.equal(tiny_pixels.generate(pipe), expected)
    remove_sparse_attention(pipe)
    assert torch.equal(tiny_pixels.generate(pipe), expected), "the model by itself attends the same"


def test_both_methods(pipe, tmp_path):
    llsa = CompareConfig(steps=3, save_masks=True, out=tmp_path / "llsa")
    clip = compare(llsa, pipe=pipe)["clips"][0]
    assert clip["sparsity"]["backend"] == "triton"
    kept = read_selections(llsa.out / clip["folder"] / clip["files"]["selections"])
    assert (kept.finest("transformer.blocks.1", 2, 0, (0, 1, 1)) == 0).sum() == 128
    exact = CompareConfig(steps=3, method="ba-att", sparsity=0.0, min_tokens=0, out=tmp_path / "exact")
    clip = compare(exact, pipe=pipe)["clips"][0]
    assert clip["sparsity"]["backend"] in ("triton", "hopper")
    # Rounding of 3 steps in bf16 (2^-8 each) on values in [0, 1].
    assert clip["metrics"]["psnr"]["mean"] > 30
    half = dataclasses.replace(exact, sparsity=0.5, out=tmp_path / "half")
    assert compare(half, pipe=pipe)["clips"][0]["sparsity"]["density_sparse_steps"] < 1
