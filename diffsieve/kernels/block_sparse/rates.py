"""How fast the backends were measured to be: what "auto" goes by where more than one can run."""

from __future__ import annotations

# Head dimension and block size -> TFLOP/s by backend on an H200: 75,648 tokens, 12 heads, bf16, half of the blocks.
# Each line is of one run. The first: benchmarks/results/h200/bench/block-sparse.json, where alone `flash4` was timed.
# The others: h200/block_sparse_hopper.json. There is no entry for other lengths: in that first run `hopper` is the
# fastest at 8,192, 16,384 and 32,768 tokens too, but for 90 % skipped at 8,192 and 95 % at 8,192 and 16,384, where
# `flash4` takes 2.5 to 5.6 us less with lists made before the measurement; in a call it makes them, in four launches.
RATES_SM90 = {
    (128, 128): {"hopper": 705.5, "hopper-exact": 656.1, "flash4": 649.4, "triton": 537.2},
    (64, 128): {"hopper": 495.8, "hopper-exact": 463.2, "triton": 428.9},
    (128, 64): {"hopper": 557.1, "hopper-exact": 538.1, "triton": 451.8},
    (64, 64): {"hopper": 482.4, "hopper-exact": 420.9, "triton": 421.0},
}

# Worked out once: torch.compile traces no more than a look-up.
_BY_RATE = {key: tuple(sorted(rates, key=rates.__getitem__, reverse=True)) for key, rates in RATES_SM90.items()}


def by_rate(capability: tuple[int, int], dim: int, block_size: int) -> tuple[str, ...]:
    """The backends that "auto" considers on a GPU, the fastest first, whether or not they can run.

    Shapes that were not measured take the order of the nearest that was: larger blocks are cut into steps of 128 keys
    like those of 128, and of other head dimensions `hopper` says that it lacks them.

    Args:
        capability: compute capability of the GPU.
        dim: head dimension.
        block_size: tokens per block.
    """
    if capability != (9, 0):
        return ("triton",)
    return _BY_RATE[64 if dim <= 64 else 128, 64 if block_size <= 64 else 128]
