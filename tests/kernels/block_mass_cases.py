"""What the interpreter and a GPU check of the kernel for attention between blocks: the largest relative error each."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from diffsieve.kernels import testing
from diffsieve.kernels.ba_att import TokenOrders, token_orders
from diffsieve.kernels.ba_att.mass_triton import block_mass_triton
from diffsieve.study import mass
from tests.kernels.compiling import launches_of

SCALE = 0.3


def inputs(
    device: str, shape: tuple[int, int, int, int, int], dtype: torch.dtype, gain: float = 1.0
) -> list[torch.Tensor]:
    """Query (B, H, L, D) and key (B, Hkv, L, D), strided as the projections of a model leave them."""
    batch, heads, kv_heads, length, dim = shape
    rng = torch.Generator().manual_seed(testing.SEED)
    tokens = [torch.randn(batch, length, h, dim, generator=rng).transpose(1, 2) for h in (heads, kv_heads)]
    return [(gain * x).to(dtype).to(device) for x in tokens]


def in_fp64(query: torch.Tensor, key: torch.Tensor, order: TokenOrders, block_size: int) -> torch.Tensor:
    """The definition, all weights at once."""
    group = query.shape[1] // key.shape[1]
    sides = []
    for tokens, perm in ((query, order.query), (key, order.key)):
        ordered = (
            tokens if perm is None else tokens.gather(2, perm.expand(*tokens.shape[:3])[..., None].expand_as(tokens))
        )
        sides.append(ordered.double())
    weights = torch.softmax(SCALE * sides[0] @ sides[1].repeat_interleave(group, dim=1).transpose(-1, -2), dim=-1)
    missing = -weights.shape[-1] % block_size
    padded = F.pad(weights, (0, missing, 0, missing))
    return padded.unflatten(3, (-1, block_size)).unflatten(2, (-1, block_size)).sum((3, 5))


def error(
    device: str,
    shape: tuple[int, int, int, int, int],
    block_size: int,
    dtype: torch.dtype | None = None,
    order: str | None = None,
    gain: float = 1.0,
) -> float:
    """Largest error of a block's mass as a share of it, through what the study calls."""
    # The interpreter has no products of bfloat16.
    query, key = inputs(device, shape, dtype or (torch.bfloat16 if device == "cuda" else torch.float16), gain)
    permuted = TokenOrders(None, None) if order is None else token_orders(query, key, orders=order)
    with (
        testing.poisoned_memory(),
        mock.patch.object(mass, "attention_by_block", side_effect=AssertionError("PyTorch's form ran")),
    ):
        got = mass.block_mass(query, key, permuted, block_size=block_size, scale=SCALE)
    expected = in_fp64(query, key, permuted, block_size)
    return float(((got - expected).abs() / expected).max())


def checks() -> dict[str, Callable[[str], float]]:
    """Checks by name; each takes the device."""
    half = torch.float16
    return {
        "one block": lambda device: error(device, (1, 1, 1, 7, 16), 16),
        "last block short": lambda device: error(device, (2, 2, 2, 77, 32), 16),
        "key heads shared": lambda device: error(device, (2, 4, 2, 64, 16), 16),
        "channels padded": lambda device: error(device, (1, 2, 1, 45, 24), 16),
        "block of no power of two": lambda device: error(device, (1, 2, 2, 65, 16), 24),
        "block in two parts": lambda device: error(device, (1, 2, 2, 333, 16), 160),
        "fp16": lambda device: error(device, (1, 2, 2, 50, 64), 32, half),
        "norm sort": lambda device: error(device, (2, 4, 2, 100, 16), 32, order="norm_sort"),
        "sharp": lambda device: error(device, (1, 2, 2, 70, 64), 32, gain=1.7),
    }  # fmt: skip


def launches() -> list[tuple[Any, tuple, dict]]:
    """The launch of mini-wan (heads of 64 channels), and one of heads of 128."""
    from diffsieve.kernels.ba_att import mass_triton

    def run() -> None:
        for dim in (64, 128):
            tokens = torch.zeros(1, 256, 6, dim, dtype=torch.bfloat16).transpose(1, 2)
            block_mass_triton(tokens, tokens, block_size=128, scale=0.1)

    return launches_of(mass_triton, run)
