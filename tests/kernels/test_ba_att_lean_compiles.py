"""The kernels behind `fused_selection.LEAN` compile for Hopper and Ampere at real sizes, and keep all in registers."""

import importlib.util
import os

import pytest
import torch

from tests.kernels.compiling import SHARED_MEMORY, compile_launch, launches_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton has no build for this platform"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1 replaces the compiler"),
]


def lean_launches():
    """A layer of 12 heads of 128 channels at 720p (591 blocks); the tokens themselves are not looked at."""
    from diffsieve.kernels.ba_att import centroids_triton, fused_triton, norm_sort_triton, selection_triton

    tokens = torch.zeros(1, 256, 12, 128, dtype=torch.bfloat16).transpose(1, 2)
    perm = torch.arange(256).expand(1, 12, 256)
    moments, size, centre = torch.zeros(1, 12, 591, 128), torch.ones(591), torch.zeros(1, 12, 1, 128)

    def run():
        selection_triton.block_scores_triton(
            moments, moments, moments, moments, size, centre,
            beta=0.5, log_count=True, second_order=True, residual=True, scale=0.1,
        )  # fmt: skip
        selection_triton.select_blocks_triton(torch.zeros(1, 2, 3, 591), 296, return_mask=True)
        fused_triton.gather_moments_triton(tokens, perm, block_size=128, variance=True, heads_first=True)
        fused_triton.scatter_tokens_triton(tokens, perm, heads_first=True)
        means = torch.zeros(1, 12, 2, 128)
        centroids_triton.add_centroids_triton(
            tokens, torch.zeros(1, 12, 256), tokens, means, means, torch.ones(2),
            torch.ones(1, 12, 2, 2, dtype=torch.bool), perm, block_size=128, scale=0.1,
        )  # fmt: skip
        curve = torch.arange(75_600)
        norm_sort_triton.window_order_triton(
            tokens[:, :1, :1].expand(1, 1, 75_600, 128), torch.zeros(1, 1, 1, 128), curve, 2304, descending=True
        )

    return launches_of([centroids_triton, fused_triton, norm_sort_triton, selection_triton], run)


@pytest.mark.parametrize("arch", [90, 80])
def test_no_spills(arch):
    # Takes a minute or more: the sort of 4,096 keys is long code.
    launches = lean_launches()
    assert len(launches) == 6
    for kernel, args, kwargs in launches:
        result = compile_launch(kernel, args, kwargs, arch)
        assert result.spills == 0, result.name
        assert result.shared <= SHARED_MEMORY[arch], result.name
        assert result.unwritten == [], result.name
