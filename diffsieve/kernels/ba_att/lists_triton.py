"""The choice of blocks in Triton: the scores are read once, nothing is sorted, kept and skipped blocks are listed.

Legend: COLUMNS is the number of key blocks, padded to a power of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..sizes import next_power_of_2


@triton.jit(do_not_specialize=["num_key", "kept", "num_query", "heads"])
def list_blocks_kernel(  # type: ignore[no-untyped-def]
    scores, kept_index, skipped_index, budgets, kept_count, skipped_count, num_key, kept, num_query, heads,
    COLUMNS: tl.constexpr, STORE_SKIPPED: tl.constexpr, BY_HEAD: tl.constexpr,
):  # fmt: skip
    """Every row keeps `kept` blocks; `BY_HEAD`, as many as `budgets` has for its head, in lists of `num_key`."""
    row = tl.program_id(0).to(tl.int64)
    o_n = tl.arange(0, COLUMNS)
    if BY_HEAD:
        kept = tl.load(budgets + tl.program_id(0) // num_query % heads)
    column = o_n < num_key
    b_s = tl.load(scores + row * num_key + o_n, mask=column, other=0.0)
    # Unsigned integers that ascend with the scores, above 0. -0 becomes 0, which it equals; NaN becomes the largest.
    b_s = tl.where(b_s == 0.0, 0.0, b_s)
    bits = b_s.to(tl.int32, bitcast=True)
    signed = tl.where(b_s != b_s, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    keys = (signed ^ -0x80000000).to(tl.uint32, bitcast=True)
    keys = tl.where(column, keys, tl.full([COLUMNS], 0, tl.uint32))
    # The largest threshold that `kept` keys reach is the smallest key kept: two bits at a time from the highest on that
    # not all keys share, and no further than to a threshold that no more than `kept` keys reach.
    highest = tl.max(keys, 0)
    differing = highest ^ tl.min(tl.where(column, keys, tl.full([COLUMNS], 0xFFFFFFFF, tl.uint32)), 0)
    shift = tl.full([], 32, tl.int32)
    while (shift > 0) & ((differing >> tl.maximum(shift - 2, 0)) == 0):
        shift -= 2
    threshold = tl.where(shift < 32, (highest >> tl.minimum(shift, 31)) << tl.minimum(shift, 31), highest ^ highest)
    reached = num_key + 0
    while (shift > 0) & (reached != kept):
        shift -= 2
        one = tl.full([], 1, tl.uint32) << shift
        # Two counts of at most 2^14 in halves of a word.
        first = (keys >= (threshold | one)).to(tl.int32)
        counts = tl.sum(first + ((keys >= (threshold | (one * 2))).to(tl.int32) << 16), 0)
        third = tl.sum((keys >= (threshold | (one * 3))).to(tl.int32), 0)
        first, second = counts & 0xFFFF, counts >> 16
        digit = (first >= kept).to(tl.uint32) + (second >= kept).to(tl.uint32) + (third >= kept).to(tl.uint32)
        threshold = threshold | (one * digit)
        lower = tl.where(first >= kept, first, reached)
        reached = tl.where(third >= kept, third, tl.where(second >= kept, second, lower))
    above, equal = (keys > threshold) & column, (keys == threshold) & column
    # What equals the threshold fills the list from the lowest index up. One scan counts both, in halves of a word.
    left = kept - tl.sum(above.to(tl.int32), 0)
    counts = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), 0)
    so_far = (counts & 0xFFFF) + tl.minimum(counts >> 16, left)  # kept blocks up to here, this one included
    taken = above | (equal & ((counts >> 16) <= left))
    if BY_HEAD:
        tl.store(kept_count + row, kept)
        tl.store(kept_index + row * num_key + so_far - 1, o_n, mask=taken)
        tl.store(kept_index + row * num_key + o_n, num_key - 1, mask=column & (o_n >= kept))
        if STORE_SKIPPED:
            tl.store(skipped_count + row, num_key - kept)
            tl.store(skipped_index + row * num_key + o_n - so_far, o_n, mask=column & (taken == 0))
            tl.store(skipped_index + row * num_key + o_n, num_key - 1, mask=column & (o_n >= num_key - kept))
    else:
        tl.store(kept_index + row * kept + so_far - 1, o_n, mask=taken)
        if STORE_SKIPPED:
            tl.store(skipped_index + row * (num_key - kept) + o_n - so_far, o_n, mask=column & (taken == 0))


def list_blocks_triton(
    scores: torch.Tensor, kept: int, *, return_skipped: bool, num_warps: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Same meaning as `selection.select_blocks` of fp32 scores (..., Nk), Nk at most 16,384.

    Args:
        num_warps: per 1,024 blocks.

    Returns:
        int32 (..., kept), ascending; the other blocks, int32 (..., Nk - kept), ascending, or empty unless asked for.
    """
    scores = scores.contiguous()
    num_key = scores.shape[-1]
    index = scores.new_empty((*scores.shape[:-1], kept), dtype=torch.int32)
    skipped = scores.new_empty((*scores.shape[:-1], num_key - kept) if return_skipped else (0,), dtype=torch.int32)
    columns = next_power_of_2(num_key)
    with torch.cuda.device_of(scores):
        list_blocks_kernel[scores.numel() // num_key,](
            scores, index, skipped, None, None, None, num_key, kept, 0, 0,
            COLUMNS=columns, STORE_SKIPPED=return_skipped, BY_HEAD=False, num_warps=_warps(num_warps, columns),
        )  # fmt: skip
    return index, skipped


def list_blocks_by_head_triton(
    scores: torch.Tensor, budgets: torch.Tensor, *, return_skipped: bool, num_warps: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Same meaning as `fused_selection.list_blocks_by_head`, with int32 budgets (H,) on the device of the scores."""
    scores = scores.contiguous()
    _, heads, num_query, num_key = scores.shape
    index = torch.empty_like(scores, dtype=torch.int32)
    count = scores.new_empty(scores.shape[:-1], dtype=torch.int32)
    skipped, skipped_count = (torch.empty_like(x) if return_skipped else x.new_empty(0) for x in (index, count))
    columns = next_power_of_2(num_key)
    with torch.cuda.device_of(scores):
        list_blocks_kernel[scores.numel() // num_key,](
            scores, index, skipped, budgets, count, skipped_count, num_key, 0, num_query, heads,
            COLUMNS=columns, STORE_SKIPPED=return_skipped, BY_HEAD=True, num_warps=_warps(num_warps, columns),
        )  # fmt: skip
    return index, count, skipped, skipped_count


def _warps(per_1024: int, columns: int) -> int:
    return min(16, max(1, per_1024 * columns // 1024))
