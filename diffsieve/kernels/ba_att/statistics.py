"""Step 2 of BA-Att: mean and variance of every block of tokens."""

from typing import NamedTuple

import torch

from ...errors import refuse
from ..checks import check_4d

__all__ = ["BlockStatistics", "block_means", "block_sizes", "block_statistics"]

# Elements centred at a time in eager mode, whole heads: on a CPU the copy stays in the cache, elsewhere within 256 MiB.
_CHUNK_CPU, _CHUNK = 1 << 18, 1 << 26


class BlockStatistics(NamedTuple):
    """Moments of the blocks of one tensor; fp32, or fp64 for fp64 input.

    Attributes:
        mean: (B, H, N, D).
        variance: (B, H, N, D), per channel, population (divided by the true count).
        size: (N,) tokens per block; only the last may be below the block size.
    """

    mean: torch.Tensor
    variance: torch.Tensor
    size: torch.Tensor


def block_statistics(tokens: torch.Tensor, block_size: int) -> BlockStatistics:
    """Compute block means and per-channel variances over consecutive blocks of tokens.

    Two passes: the mean is subtracted before squaring, since E[x²] - E[x]² cancels badly under a channel bias.

    Args:
        tokens: (B, H, L, D), any strides; L need not be a multiple of `block_size`.
        block_size: tokens per block.

    Returns:
        `BlockStatistics` of N = ceil(L / block_size) blocks.

    Raises:
        UserInputError: `tokens` is no tensor of four axes with elements, or `block_size` no whole number >= 1.
    """
    check_4d(("tokens", tokens))
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
        refuse("block_size", "a whole number >= 1", repr(block_size))
    mean = block_means(tokens, block_size)
    at_once = heads_at_once(tokens)
    chunks = zip(tokens.split(at_once, dim=1), mean.split(at_once, dim=1), strict=True)
    variance = _cat([_block_variances(x, m, block_size) for x, m in chunks], dim=1)
    return BlockStatistics(mean, variance, block_sizes(tokens.shape[2], block_size, mean))


def block_means(tokens: torch.Tensor, block_size: int) -> torch.Tensor:
    """Compute block means, (B, H, N, D) in fp32 (fp64 for fp64 input); `tokens` as in `block_statistics`."""
    dtype = torch.promote_types(tokens.dtype, torch.float32)
    whole, tail = split_blocks(tokens, block_size)
    means = [whole.mean(dim=3, dtype=dtype)]
    if tail.shape[2]:
        means.append(tail.mean(dim=2, keepdim=True, dtype=dtype))
    return _cat(means, dim=2)


def heads_at_once(tokens: torch.Tensor) -> int:
    """Return how many heads of (B, H, L, D) to centre at a time."""
    if torch.compiler.is_compiling():  # compiled code fuses the passes and needs no copy
        return tokens.shape[1]
    budget = _CHUNK_CPU if tokens.device.type == "cpu" else _CHUNK
    return max(1, budget * tokens.shape[1] // tokens.numel())


def block_sizes(num_tokens: int, block_size: int, like: torch.Tensor) -> torch.Tensor:
    """Return the number of tokens of each block, (N,) in the dtype and on the device of `like`."""
    blocks = -(-num_tokens // block_size)
    sizes = like.new_full((blocks,), block_size)
    sizes[-1:].fill_(num_tokens - (blocks - 1) * block_size)
    return sizes


def split_blocks(tokens: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Split (B, H, L, D) into two views: whole blocks (B, H, L // block_size, block_size, D) and the rest."""
    num_whole = tokens.shape[2] // block_size
    whole = tokens[:, :, : num_whole * block_size].unflatten(2, (num_whole, block_size))
    return whole, tokens[:, :, num_whole * block_size :]


def _block_variances(tokens: torch.Tensor, mean: torch.Tensor, block_size: int) -> torch.Tensor:
    whole, tail = split_blocks(tokens, block_size)
    num_whole = whole.shape[2]
    variances = [(whole - mean[:, :, :num_whole, None]).square_().mean(dim=3)]
    if tail.shape[2]:
        variances.append((tail - mean[:, :, num_whole:]).square_().mean(dim=2, keepdim=True))
    return _cat(variances, dim=2)


def _cat(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)
