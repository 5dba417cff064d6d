"""BA-Att on a CUDA GPU: the Triton backend inside real pipelines, eager and compiled, and the choices of the CPU."""

import pytest
import torch

from diffsieve import BAAttConfig, apply_sparse_attention, ba_attention, sparsity_summary
from tests import tiny

pytestmark = pytest.mark.gpu

GRID = (5, 9, 10)


def _relative(actual, expected):
    assert torch.isfinite(actual).all()
    return ((actual - expected).float().pow(2).mean() / expected.float().pow(2).mean()).sqrt().item()


@pytest.mark.parametrize("preset", ["default", "paper"])
@pytest.mark.parametrize("form", ["eager", "repeated", "wrapped"])
def test_all_blocks_equal_dense_to_rounding(form, preset):
    torch._dynamo.reset()
    pipe = tiny.wan_pipeline().to("cuda", torch.bfloat16)
    dense = tiny.generate(pipe)
    config = BAAttConfig(
        preset=preset, density=1.0, block_size=16, min_tokens=0, warmup_steps=2, dense_layers=(), measure_time=True
    )
    apply_sparse_attention(pipe, config)
    if form == "repeated":
        pipe.transformer.compile_repeated_blocks(fullgraph=True)
    elif form == "wrapped":
        pipe.transformer = torch.compile(pipe.transformer, fullgraph=True)
    for _ in range(2):
        # Rounding of 5 steps in bf16 (2^-8 each) under guidance 3.
        assert _relative(tiny.generate(pipe), dense) < 0.05
        summary = sparsity_summary(pipe)
        assert (summary.backend, summary.steps_dense, summary.density_overall) == ("triton", 2, 1.0)
        assert (summary.attention_seconds is not None) == (form == "eager")


@pytest.mark.parametrize("form", ["eager", "repeated", "wrapped"])
def test_shared_blocks_keep_the_total_and_the_graph(form):
    torch._dynamo.reset()
    pipe = tiny.wan_pipeline().to("cuda", torch.bfloat16)
    for block in pipe.transformer.blocks:
        block.attn1.to_v.weight.data[:12] *= 8  # the values of the first head: what it misses counts for more
    dense = tiny.generate(pipe, height=64, width=64)
    config = BAAttConfig(budgets="auto", block_size=16, min_tokens=0, warmup_steps=2, dense_layers=())
    apply_sparse_attention(pipe, config)
    if form == "repeated":
        pipe.transformer.compile_repeated_blocks(fullgraph=True)
    elif form == "wrapped":
        pipe.transformer = torch.compile(pipe.transformer, fullgraph=True)
    for _ in range(2):
        # Half of the blocks of a model of random weights: near the dense result, as means stand in for the others.
        assert _relative(tiny.generate(pipe, height=64, width=64), dense) < 0.3
        summary = sparsity_summary(pipe)
        assert (summary.backend, summary.budgets_from, summary.density_sparse_steps) == ("triton", "calibration", 0.5)
        assert all(sum(blocks) == 2 * 6 for blocks in summary.budgets.values())
        assert any(len(set(blocks)) > 1 for blocks in summary.budgets.values())


@pytest.mark.parametrize("orders", ["raster", "hilbert", "hilbert_window", "norm_sort", "table", "table on the GPU"])
def test_selects_what_the_cpu_selects(orders, generator):
    inputs = [torch.randn(2, 450, 3, 64, generator=generator).transpose(1, 2).bfloat16() for _ in range(3)]
    options = {"grid_thw": GRID, "density": 0.4, "block_size": 32, "return_info": True}
    results = []
    for device in ("cpu", "cuda"):
        table = orders
        if orders.startswith("table"):
            table = torch.tensor([4, 3, 0], device=device if orders.endswith("GPU") else "cpu")
        out, info = ba_attention(*(x.to(device) for x in inputs), orders=table, **options)
        results.append((out.cpu().float(), info.block_index.cpu()))
    (expected, blocks), (out, blocks_gpu) = results
    # Sums in another order may swap two blocks of nearly equal score, but no more.
    same = (blocks == blocks_gpu).all(dim=-1)
    assert same.float().mean() > 0.9
    assert torch.isfinite(out).all()
    if orders == "raster":  # after a sort, block by block is not token by token
        rows = same.repeat_interleave(32, dim=2)[:, :, :450]
        assert torch.isclose(out[rows], expected[rows], rtol=0, atol=2**-6).all()
