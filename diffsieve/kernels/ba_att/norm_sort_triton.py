"""The order `hilbert_window` of one head in Triton: norms and their sort in one kernel, a program per window.

Legend: TOKENS of a window, padded to a power of two; BD channels per step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


# Lengths must not cause a new compilation, whatever they are multiples of.
@triton.jit(do_not_specialize=["length", "window"])
def window_order_kernel(  # type: ignore[no-untyped-def]
    key, centre, curve, order, stride_b, stride_l, stride_d, length, window,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TOKENS: tl.constexpr,
    DESCENDING: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * window
    batch = tl.program_id(1).to(tl.int64)
    o_l = tl.arange(0, TOKENS)
    inside = (o_l < window) & (first + o_l < length)
    source = tl.load(curve + first + o_l, mask=inside, other=0).to(tl.int64)
    rows = key + batch * stride_b + source * stride_l
    b_sum = tl.zeros([TOKENS], dtype=tl.float32)
    for start in tl.range(0, PADDED_DIM, BLOCK_D):
        o_d = start + tl.arange(0, BLOCK_D)
        channel = o_d < HEAD_DIM
        b_k = tl.load(rows[:, None] + (o_d * stride_d)[None, :], mask=inside[:, None] & channel[None, :], other=0.0)
        b_c = tl.load(centre + batch * HEAD_DIM + o_d, mask=channel, other=0.0)
        b_k = b_k.to(tl.float32) - b_c[None, :]
        b_sum += tl.sum(b_k * b_k, 1)
    # As in `norm_sort.sort_keys`; the place in the low half keeps the order of equals.
    keys = tl.sqrt_rn(b_sum).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if DESCENDING:
        keys = 0x7FFFFFFF - keys
    keys = tl.where(inside, keys, 0x7FFFFFFF)
    place = tl.sort((keys.to(tl.int64) << 32) | o_l) & 0xFFFFFFFF
    tl.store(order + batch * length + first + o_l, tl.load(curve + first + place, mask=inside, other=0), mask=inside)


def window_order_triton(
    key: torch.Tensor, centre: torch.Tensor, curve: torch.Tensor, window: int, *, descending: bool
) -> torch.Tensor:
    """Sort the keys of one head by their distance from `centre` inside the windows of a curve.

    Args:
        key: (B, 1, L, D).
        centre: (B, 1, 1, D) fp32.
        curve: int64 (L,).
        window: tokens per window; a power of two of them, 8 bytes each, is sorted in registers and shared memory.
        descending: largest distance first.

    Returns:
        int64 (B, 1, L).
    """
    batch, _, length, dim = key.shape
    order = curve.new_empty((batch, 1, length))
    window = min(window, length)
    tokens, block_d = max(16, triton.next_power_of_2(window)), 8
    with torch.cuda.device_of(key):
        window_order_kernel[triton.cdiv(length, window), batch](
            key, centre.contiguous(), curve, order, key.stride(0), key.stride(2), key.stride(3), length, window,
            HEAD_DIM=dim, PADDED_DIM=triton.cdiv(dim, block_d) * block_d, BLOCK_D=block_d, TOKENS=tokens,
            DESCENDING=descending, num_warps=min(16, max(1, tokens // 256)),
        )  # fmt: skip
    return order
