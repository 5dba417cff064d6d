"""How fast the backends were measured to be: what "auto" goes by where more than one can run."""

from __future__ import annotations

# Head dimension and block size -> TFLOP/s by backend on an H200: 75,648 tokens, 12 heads, bf16, half of the blocks.
# Each line is of one run. The first: benchmarks/results/h200/bench/block-sparse.json, where alone `flash4` was timed
# and `triton` had an instruction more for each logit than since. The others: h200/block_sparse_hopper.json.
RATES_SM90 = {
    (128, 128): {"hopper": 725.2, "hopper-exact": 670.4, "flash4": 664.1, "triton": 539.0},
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
