"""Step 6 of BA-Att: which key blocks each query block keeps."""

from typing import Any

import torch

from ...errors import refuse

__all__ = [
    "block_mask",
    "kept_blocks",
    "kept_video_blocks",
    "select_blocks",
    "select_blocks_by_head",
    "select_blocks_top_p",
    "skipped_blocks",
]


def kept_blocks(num_blocks: int, density: float) -> int:
    """Return kappa = max(1, floor(density * N + 1/2)), the key blocks kept of `num_blocks`."""
    return min(num_blocks, max(1, int(density * num_blocks + 0.5)))


def kept_video_blocks(num_video: int, num_text: int, density: float) -> int:
    """Return the video blocks that a row keeps: what the text blocks leave of its budget, at least one.

    Args:
        num_video: blocks of video tokens.
        num_text: blocks of text tokens, which every row keeps.
        density: share of all blocks that a row keeps.
    """
    return min(num_video, max(1, kept_blocks(num_video + num_text, density) - num_text))


def select_blocks(scores: torch.Tensor, kept: int) -> torch.Tensor:
    """Select the `kept` best key blocks of every row.

    Args:
        scores: (..., Nk). Equal scores: the lower index wins. NaN counts as the largest, so that a block with NaN is
            attended to and shows up in the output.
        kept: blocks to keep, 1..Nk.

    Returns:
        int32 (..., kept), ascending.

    Raises:
        UserInputError: `kept` is out of its range.
    """
    num_blocks = scores.shape[-1]
    _check_count("kept", kept, 1, num_blocks)
    if kept == num_blocks:
        return torch.arange(num_blocks, dtype=torch.int32, device=scores.device).expand(scores.shape).contiguous()
    best = torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :kept]
    return best.to(torch.int32).sort(dim=-1).values


def select_blocks_by_head(scores: torch.Tensor, budgets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the best key blocks of every row, as many as its head has.

    Args:
        scores: (B, H, Nq, Nk), as in `select_blocks`.
        budgets: integers (H,), on the device of `scores`, each in [1, Nk].

    Returns:
        index: int32 (B, H, Nq, Nk), ascending; entries from `count` on hold Nk - 1 and are to be ignored.
        count: int32 (B, H, Nq), blocks kept.
    """
    num_blocks = scores.shape[-1]
    ranked = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    position = torch.arange(num_blocks, device=scores.device)
    index = torch.where(position < budgets[:, None, None], ranked, num_blocks).sort(dim=-1).values
    count = budgets.to(torch.int32)[:, None].expand(scores.shape[:-1]).contiguous()
    return index.clamp(max=num_blocks - 1).to(torch.int32), count


def select_blocks_top_p(
    scores: torch.Tensor, p: float, *, min_blocks: int = 1, max_blocks: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select, per row, the fewest key blocks whose predicted mass reaches `p`.

    The predicted mass is the softmax of the scores, which should hold the log of the block's token count. It is only
    roughly calibrated, hence the bounds.

    Args:
        scores: (..., Nk). Equal scores: the lower index wins.
        p: mass to reach, in (0, 1]; 1 keeps `max_blocks`.
        min_blocks: lower bound of the count, in [1, max_blocks].
        max_blocks: upper bound of the count, in [1, Nk], default Nk.

    Returns:
        index: int32 (..., max_blocks), ascending; entries from `count` on repeat the last block and are to be ignored.
        count: int32 (...), blocks kept.

    Raises:
        UserInputError: `p` or a bound is out of its range.
    """
    num_blocks = scores.shape[-1]
    max_blocks = num_blocks if max_blocks is None else max_blocks
    _check_count("max_blocks", max_blocks, 1, num_blocks)
    _check_count("min_blocks", min_blocks, 1, max_blocks)
    if not 0 < p <= 1:
        refuse("p", "in (0, 1]", p)
    if p >= 1:
        index = select_blocks(scores, max_blocks)
        return index, torch.full(scores.shape[:-1], max_blocks, dtype=torch.int32, device=scores.device)
    ranked = torch.sort(scores, dim=-1, descending=True, stable=True)
    mass = torch.softmax(ranked.values, dim=-1)
    before = mass.cumsum(dim=-1) - mass
    # NaN compares false: such a row keeps min_blocks.
    count = (before < p).sum(dim=-1).clamp(min_blocks, max_blocks)
    position = torch.arange(max_blocks, device=scores.device)
    index = torch.where(position < count[..., None], ranked.indices[..., :max_blocks], num_blocks)
    index = index.sort(dim=-1).values.clamp(max=num_blocks - 1)
    return index.to(torch.int32), count.to(torch.int32)


def _check_count(name: str, count: Any, low: int, high: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or not low <= count <= high:
        refuse(name, f"a whole number in [{low}, {high}]", repr(count))


def block_mask(block_index: torch.Tensor, block_count: torch.Tensor | None, num_blocks: int) -> torch.Tensor:
    """Expand kept indices (..., K) and counts (...) to a bool mask (..., num_blocks)."""
    index = block_index.long()
    if block_count is not None:
        position = torch.arange(index.shape[-1], device=index.device)
        index = torch.where(position < block_count[..., None], index, num_blocks)
    # One column more takes the ignored entries.
    mask = torch.zeros((*index.shape[:-1], num_blocks + 1), dtype=torch.bool, device=index.device)
    return mask.scatter_(-1, index, True)[..., :num_blocks]


def skipped_blocks(
    block_index: torch.Tensor, block_count: torch.Tensor | None, num_blocks: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """List what kept indices (..., K) with counts (...) leave out.

    Returns:
        int32 (..., num_blocks - K) and `None`; with counts int32 (..., num_blocks) and int32 (...), how many of its
        entries are valid. Ascending.
    """
    mask = block_mask(block_index, block_count, num_blocks)
    index = torch.sort(mask.to(torch.uint8), dim=-1, stable=True).indices.to(torch.int32)
    if block_count is None:
        return index[..., : num_blocks - block_index.shape[-1]], None
    return index, num_blocks - block_count
