"""Kernels of every form of the steps of BA-Att compile for Hopper and Ampere at real sizes, with all in registers."""

import importlib.util
import os

import pytest
import torch

from tests.kernels.ba_att_cases import FORMS
from tests.kernels.compiling import SHARED_MEMORY, compile_launch, launches_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton has no build for this platform"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1 replaces the compiler"),
]


def launches(form):
    """A layer of 12 heads of 128 channels at 720p (591 blocks); the tokens themselves are not looked at."""
    from diffsieve.kernels.ba_att import (
        centroids_triton,
        fused_triton,
        lists_triton,
        scores_triton,
        selection_triton,
        skipped_triton,
        windows_triton,
    )

    tokens = torch.zeros(1, 256, 12, 128, dtype=torch.bfloat16).transpose(1, 2)
    perm = torch.arange(256).expand(1, 12, 256)
    moments, size, centre = torch.zeros(1, 12, 591, 128), torch.ones(591), torch.zeros(1, 12, 1, 128)
    means, lse, scores = torch.zeros(1, 12, 2, 128), torch.zeros(1, 12, 256), torch.zeros(1, 2, 3, 591)
    how = {"beta": 0.5, "log_count": True, "second_order": True, "residual": True, "scale": 0.1}
    options = {"block_size": 128, "scale": 0.1}

    def run():
        fused_triton.gather_moments_triton(tokens, perm, block_size=128, variance=True, tile=form.gather)
        fused_triton.gather_moments_triton(tokens, perm, block_size=128, variance=False, tile=form.gather_means)
        inputs = (moments, moments, moments, moments, size, centre)
        if form.scores is None:
            selection_triton.block_scores_triton(*inputs, **how)
        else:
            scores_triton.split_scores_triton(*inputs, **how, tile=form.scores)
        if form.select_warps is None:
            selection_triton.select_blocks_triton(scores, 296, return_mask=True)
        else:
            lists_triton.list_blocks_triton(scores, 296, return_skipped=True, num_warps=form.select_warps)
        if form.centroids is None:
            kept = torch.ones(1, 12, 2, 2, dtype=torch.bool)
            centroids_triton.add_centroids_triton(tokens, lse, tokens, means, means, torch.ones(2), kept, **options)
            fused_triton.scatter_tokens_triton(tokens, perm)
        else:
            skipped = torch.zeros(1, 12, 2, 1, dtype=torch.int32)
            # On the CPU there is no capability to ask for: other GPUs than Hopper take a tile of their own.
            for tile in (form.centroids, skipped_triton._OTHER_GPUS):
                skipped_triton.add_skipped_triton(
                    tokens, lse, tokens, means, means, skipped, None, perm, **options, tile=tile
                )
        if form.windows is not None:
            windows_triton.window_orders_triton(
                tokens[:, :2], torch.zeros(1, 2, 1, 128), torch.arange(256), 128, descending=True, tile=form.windows
            )

    modules = [centroids_triton, fused_triton, lists_triton, scores_triton, selection_triton, skipped_triton]
    return launches_of([*modules, windows_triton], run)


@pytest.mark.parametrize("arch", [90, 80])
@pytest.mark.parametrize("form", FORMS)
def test_no_spills(form, arch):
    found = launches(FORMS[form])
    assert len(found) == {"default": 6, "lists": 12}[form]
    for kernel, args, kwargs in found:
        if arch != 90 and kernel.__name__ == "add_skipped_kernel" and kwargs["BLOCK_M"] == 128:
            continue  # Hopper's tile
        result = compile_launch(kernel, args, kwargs, arch)
        assert result.spills == 0, result.name
        assert result.shared <= SHARED_MEMORY[arch], result.name
        assert result.unwritten == [], result.name
        assert result.serialised == [], result.name
