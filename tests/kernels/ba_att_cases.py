"""Problems for the whole BA-Att call, shared by the interpreter's and the GPU's tests."""

from dataclasses import dataclass
from typing import Any

import torch

from diffsieve.kernels import testing
from diffsieve.kernels.ba_att.forms import Forms
from tests.kernels.compiling import launches_of


@dataclass(frozen=True)
class BAAttCase:
    """One problem; `gain` scales queries and keys, `extra` goes to `ba_attention`."""

    grid: tuple[int, int, int]
    orders: str | tuple[int, ...]
    heads: int = 2
    kv_heads: int = 2
    dim: int = 32
    block_size: int = 16
    density: float = 0.4
    gain: float = 1.0
    extra: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        parts = [f"{key}={value}" for key, value in self.extra]
        grid = "x".join(map(str, self.grid))
        return (
            f"{grid}-{self.orders}-H{self.heads}of{self.kv_heads}-D{self.dim}-b{self.block_size}-{parts}-x{self.gain}"
        )

    def options(self) -> dict[str, Any]:
        orders = self.orders if isinstance(self.orders, str) else torch.tensor(self.orders)
        common = {"grid_thw": self.grid, "orders": orders, "density": self.density, "block_size": self.block_size}
        extra = dict(self.extra)
        if "budgets" in extra:
            extra["budgets"] = torch.tensor(extra["budgets"])
        return {**common, **extra}


CENTROID = (("compensate", "centroid"), ("score", "residual"))
CASES = [
    BAAttCase((3, 5, 7), (3, 4), extra=CENTROID),
    BAAttCase((2, 6, 8), (1, 2, 0, 3), heads=4, kv_heads=2, block_size=32, extra=CENTROID),
    BAAttCase((1, 1, 5), (0, 4), extra=CENTROID),
    BAAttCase((3, 5, 7), "hilbert", dim=24),
    BAAttCase((3, 5, 7), "raster", density=0.01, extra=CENTROID),
    BAAttCase((3, 5, 7), "raster", density=1.0, extra=CENTROID),
    BAAttCase((3, 5, 7), (1, 3), gain=16.0, extra=CENTROID),
    BAAttCase((3, 5, 7), "frame_hilbert", extra=(("compensate", "centroid"), ("text_suffix", 19), ("top_p", 0.6))),
    BAAttCase((3, 5, 7), "hilbert_window", dim=64, block_size=64, extra=CENTROID),
    BAAttCase((3, 5, 7), (1, 3), gain=200.0, extra=CENTROID),
    BAAttCase((5, 9, 10), (3, 1), dim=128, block_size=128, density=0.5, extra=CENTROID),
    BAAttCase((3, 5, 7), (1, 3), extra=(*CENTROID, ("budgets", (1, 6)))),
    BAAttCase((3, 5, 7), (3, 0, 2, 1), heads=4, extra=(*CENTROID, ("budgets", (7, 1, 3, 2)), ("text_suffix", 19))),
    BAAttCase((3, 5, 7), "hilbert", heads=4, dim=24, extra=(("budgets", (1, 7, 3, 2)),)),
]


def make_inputs(case: BAAttCase, dtype: torch.dtype, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    """Queries, keys and values in the memory order of a diffusers processor, (B, L, H, D) seen as (B, H, L, D)."""
    length = case.grid[0] * case.grid[1] * case.grid[2] + dict(case.extra).get("text_suffix", 0)
    generator = torch.Generator().manual_seed(testing.SEED)

    def one(heads: int, gain: float, bias: float) -> torch.Tensor:
        tokens = torch.randn(2, length, heads, case.dim, generator=generator)
        return (gain * tokens + bias).to(device, dtype).transpose(1, 2)

    return one(case.heads, case.gain, 0.3), one(case.kv_heads, case.gain, 0.5), one(case.kv_heads, 1.0, 0.1)


def relative_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """RMS(actual - exact) / RMS(exact) in fp64; infinite where a value is not finite."""
    if not bool(actual.isfinite().all()):
        return float("inf")
    return float(((actual.double() - exact).square().mean() / exact.square().mean()).sqrt())


def launches() -> list[tuple[Any, tuple, dict]]:
    """Every launch of a layer of 12 heads of 128 channels at 720p (591 blocks): (kernel, args, kwargs).

    The tokens themselves are not looked at. The compensation is launched as on other GPUs, then as on Hopper.
    """
    from diffsieve.kernels.ba_att import fused_triton, lists_triton, scores_triton, skipped_triton, windows_triton

    form = Forms()
    tokens = torch.zeros(1, 256, 12, 128, dtype=torch.bfloat16).transpose(1, 2)
    perm = torch.arange(256).expand(1, 12, 256)
    moments, size, centre = torch.zeros(1, 12, 591, 128), torch.ones(591), torch.zeros(1, 12, 1, 128)
    means, lse, scores = torch.zeros(1, 12, 2, 128), torch.zeros(1, 12, 256), torch.zeros(1, 2, 3, 591)
    skipped = torch.zeros(1, 12, 2, 1, dtype=torch.int32)

    def run() -> None:
        fused_triton.gather_moments_triton(tokens, perm, block_size=128, variance=True, tile=form.gather)
        fused_triton.gather_moments_triton(tokens, perm, block_size=128, variance=False, tile=form.gather_means)
        fused_triton.scatter_tokens_triton(tokens, perm)
        scores_triton.split_scores_triton(
            moments, moments, moments, moments, size, centre, beta=0.5, log_count=True, second_order=True,
            residual=True, scale=0.1, tile=form.scores,
        )  # fmt: skip
        lists_triton.list_blocks_triton(scores, 296, return_skipped=True, num_warps=form.select_warps)
        budgets = torch.ones(2, dtype=torch.int32)
        lists_triton.list_blocks_by_head_triton(scores, budgets, return_skipped=True, num_warps=form.select_warps)
        attended = (tokens, lse, tokens, means, means, skipped, None, perm)
        count = torch.zeros(1, 12, 2, dtype=torch.int32)
        by_head = (*attended[:6], count, perm)
        for tile in (form.centroids_elsewhere, form.centroids):
            for lists in (attended, by_head):
                skipped_triton.add_skipped_triton(*lists, block_size=128, scale=0.1, tile=tile)
        windows_triton.window_orders_triton(
            tokens[:, :2], torch.zeros(1, 2, 1, 128), torch.arange(256), 128, descending=True, tile=form.windows
        )

    modules = [fused_triton, lists_triton, scores_triton, skipped_triton, windows_triton]
    return launches_of(modules, run)
