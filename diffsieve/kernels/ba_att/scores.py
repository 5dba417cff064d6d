"""Steps 3 to 5 of BA-Att: how much attention each query block is expected to pay to each key block.

With x_ij = scale * q_i·k_j over the pairs of a query block and a key block, the mean of x is scale * Qm·Km exactly, and
its variance is, up to covariances between channels, scale² * Delta with

    Delta = Vq·Km² + Qm²·Vk + Vq·Vk = Vq·E[K²] + Qm²·Vk        (Eq. 14 of the paper; m means, V variances per channel)

The log of the mean of e^x is E[x] + Var[x] / 2 + ..., hence `beta = 1/2`; the paper takes 1, and so does the preset
`default` with `residual_scores` up to 60 % skipped, as measured. Softmax ignores a constant
added to all keys, the term Vq·Km² does not: `center_keys` takes the mean key out of it.

Where a skipped block is stood in for by its means (compensation), what is lost is not its mass but how far its weights
lie apart. For one query the logits of a block have the variance Sigma = scale² * (Qm² + Vq)·Vk, and were they normally
distributed, the standard deviation of the weights e^x would be their mean times sqrt(e^Sigma - 1): `residual_scores`.
"""

import math

import torch

from ...errors import refuse
from ..autocast import without_autocast
from .statistics import BlockStatistics, split_blocks

__all__ = ["SCORES", "block_scores", "halfk_scores", "mean_key", "residual_scores", "score_blocks"]

SCORES = ("moments", "residual", "halfk")

# Elements of (query blocks x keys) logits held at a time by `halfk_scores` (256 MiB in fp32).
_CHUNK = 1 << 26


@without_autocast
def block_scores(
    query: BlockStatistics,
    key: BlockStatistics,
    *,
    beta: float = 0.5,
    center_keys: bool = True,
    log_count: bool = True,
    second_order: bool = True,
    scale: float | None = None,
) -> torch.Tensor:
    """Score every pair of blocks from block moments, in one matrix product of inner size 3 D.

    Args:
        query: statistics of the query blocks, (B, H, Nq, D).
        key: statistics of the key blocks, (B, Hkv, Nk, D).
        beta: weight of the second-order term.
        center_keys: subtract the mean key from the key means (changes the base logits by a constant per row).
        log_count: add the log of the tokens in the key block, so that the score estimates log-mass, not log-mean.
        second_order: `False` leaves the base logits (mean pooling) alone.
        scale: factor of the logits, default 1 / sqrt(D).

    Returns:
        (B, H, Nq, Nk), fp32 (fp64 for fp64 statistics).

    Raises:
        UserInputError: the statistics do not fit, `beta` is not finite, or `scale` not finite and above 0.
    """
    _check(query, key, beta, scale)
    scale = query.mean.shape[-1] ** -0.5 if scale is None else scale
    key_mean = key.mean - mean_key(key) if center_keys else key.mean
    left, right = query.mean * scale, key_mean
    if second_order:
        weight = beta * scale**2
        left = torch.cat([left, query.variance * weight, query.mean.square() * weight], dim=-1)
        right = torch.cat([right, key_mean.square() + key.variance, key.variance], dim=-1)
    scores = _matmul_true_fp32(left, _expand_heads(right, left.shape[1]).transpose(-1, -2))
    return scores + key.size.log() if log_count else scores


@without_autocast
def halfk_scores(
    query: BlockStatistics,
    key: BlockStatistics,
    key_tokens: torch.Tensor,
    block_size: int,
    *,
    beta: float = 0.5,
    center_keys: bool = True,
    log_count: bool = True,
    second_order: bool = True,
    scale: float | None = None,
) -> torch.Tensor:
    """Score every pair of blocks from query means and single keys.

    The log-mean-exp of scale * Qm·k_j over the key block is exact on the key side; the spread of the queries adds
    beta * scale² * Vq·E[K²]. Costs 1 / (2 block_size) of dense attention.

    Args:
        query: statistics of the query blocks, (B, H, Nq, D).
        key: statistics of the key blocks, (B, Hkv, Nk, D).
        key_tokens: ordered keys (B, Hkv, Lk, D).
        block_size: tokens per key block.
        beta: weight of the query-side term.
        center_keys: take E[K²] of the keys minus their mean.
        log_count: add the log of the tokens in the key block.
        second_order: `False` drops the query-side term.
        scale: factor of the logits, default 1 / sqrt(D).

    Returns:
        (B, H, Nq, Nk), fp32 (fp64 for fp64 statistics).
    """
    _check(query, key, beta, scale)
    batch, heads, num_query, dim = query.mean.shape
    scale = dim**-0.5 if scale is None else scale
    group = heads // key_tokens.shape[1]
    heads_at_once = max(1, _CHUNK // (batch * num_query * key_tokens.shape[2]))
    chunks = []
    for head in range(0, heads, heads_at_once):
        pooled = query.mean[:, head : head + heads_at_once] * scale
        source = torch.arange(head, head + pooled.shape[1], device=pooled.device) // group
        single = key_tokens if group == 1 and heads_at_once >= heads else key_tokens.index_select(1, source)
        logits = pooled @ single.to(pooled.dtype).transpose(-1, -2)  # (B, h, Nq, Lk)
        whole, tail = split_blocks(logits.transpose(-1, -2), block_size)
        masses = [whole.logsumexp(dim=3)]
        if tail.shape[2]:
            masses.append(tail.logsumexp(dim=2, keepdim=True))
        chunks.append(torch.cat(masses, dim=2).transpose(-1, -2))
    scores = torch.cat(chunks, dim=1)
    if second_order:
        key_mean = key.mean - mean_key(key) if center_keys else key.mean
        second_moment = _expand_heads(key_mean.square() + key.variance, heads)
        scores = scores + _matmul_true_fp32(query.variance * (beta * scale**2), second_moment.transpose(-1, -2))
    return scores if log_count else scores - key.size.log()


@without_autocast
def residual_scores(
    query: BlockStatistics,
    key: BlockStatistics,
    *,
    beta: float = 0.5,
    center_keys: bool = True,
    log_count: bool = True,
    second_order: bool = True,
    scale: float | None = None,
) -> torch.Tensor:
    """Score every pair of blocks by what the means of the key block would miss of its attention.

    The log of (mass of the block * relative spread of its weights): `block_scores` + log(e^Sigma - 1) / 2. A block of
    equal keys has -inf: its means say all. Takes no more arithmetic than `block_scores`.

    Args:
        query: statistics of the query blocks, (B, H, Nq, D).
        key: statistics of the key blocks, (B, Hkv, Nk, D).
        beta: as in `block_scores`, like all other arguments.

    Returns:
        (B, H, Nq, Nk), fp32 (fp64 for fp64 statistics).
    """
    _check(query, key, beta, scale)
    scale = query.mean.shape[-1] ** -0.5 if scale is None else scale
    # Sigma is part of the variance in `block_scores`: Vq·(Km² + Vk) + Qm²·Vk = Vq·Km² + (Qm² + Vq)·Vk.
    second_moment = (query.mean.square() + query.variance) * scale**2
    spread = _matmul_true_fp32(second_moment, _expand_heads(key.variance, second_moment.shape[1]).transpose(-1, -2))
    key_mean = key.mean - mean_key(key) if center_keys else key.mean
    left, right = query.mean * scale, key_mean
    if second_order:
        left = torch.cat([left, query.variance * (beta * scale**2)], dim=-1)
        right = torch.cat([right, key_mean.square()], dim=-1)
    mass = _matmul_true_fp32(left, _expand_heads(right, left.shape[1]).transpose(-1, -2))
    if second_order:
        mass = mass + beta * spread
    if log_count:
        mass = mass + key.size.log()
    # log(e^x - 1) without overflow; rounding may leave a spread just below 0.
    spread = spread.clamp(min=0)
    return mass + (spread + (-torch.expm1(-spread)).log()) / 2


def score_blocks(
    score: str,
    query: BlockStatistics,
    key: BlockStatistics,
    key_tokens: torch.Tensor,
    block_size: int,
    *,
    beta: float,
    center_keys: bool,
    log_count: bool,
    second_order: bool,
    scale: float,
) -> torch.Tensor:
    """Score by `block_scores` ("moments"), `residual_scores` or `halfk_scores`; arguments and result as there."""
    if score == "halfk":
        return halfk_scores(
            query,
            key,
            key_tokens,
            block_size,
            beta=beta,
            center_keys=center_keys,
            log_count=log_count,
            second_order=second_order,
            scale=scale,
        )
    by_moments = residual_scores if score == "residual" else block_scores
    return by_moments(
        query,
        key,
        beta=beta,
        center_keys=center_keys,
        log_count=log_count,
        second_order=second_order,
        scale=scale,
    )


def mean_key(key: BlockStatistics) -> torch.Tensor:
    """Return the mean of all keys from the block means, (B, Hkv, 1, D)."""
    share = key.size / key.size.sum()
    return (key.mean * share[:, None]).sum(dim=2, keepdim=True)


def _check(query: BlockStatistics, key: BlockStatistics, beta: float, scale: float | None) -> None:
    for name, statistics in (("query", query), ("key", key)):
        if not isinstance(statistics, BlockStatistics):
            refuse(name, "BlockStatistics", type(statistics).__name__)
    batch, heads, _, dim = query.mean.shape
    key_batch, key_heads, _, key_dim = key.mean.shape
    if (key_batch, key_dim) != (batch, dim) or heads % key_heads:
        refuse("key", f"of shape ({batch}, a divisor of {heads}, Nk, {dim})", tuple(key.mean.shape))
    # `math.isfinite` cannot be traced where the compiler takes a number for a variable.
    if not -math.inf < beta < math.inf:
        refuse("beta", "finite", beta)
    if scale is not None and not 0 < scale < math.inf:
        refuse("scale", "finite and above 0, or None", scale)


def _expand_heads(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    group = heads // tensor.shape[1]
    return tensor if group == 1 else tensor.repeat_interleave(group, dim=1)


def _matmul_true_fp32(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Matrix product to fp32 accuracy whatever the process allows for TF32."""
    if left.device.type != "cuda" or left.dtype is not torch.float32:
        return left @ right
    return matmul_split(left, right)


def matmul_split(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """fp32 product from factors that TF32 holds: three products in one, relative error 2^-21 of the sum of |terms|.

    Each factor is split into a high part, rounded to 11 significant bits, and the exact rest, at most 2^-11 of it. The
    product of the two rests is dropped, 2^-22 of the term, and TF32 drops the last bit of either rest, 2^-23 each. A
    high part cut off instead of rounded leaves rests twice as large, all of one sign: up to 3.5 * 2^-21, adding up.
    Changing the process-wide TF32 switch would be the alternative, and it is not ours.
    """
    left_high, right_high = _tf32_part(left), _tf32_part(right)
    left_low, right_low = left - left_high, right - right_high
    return torch.cat([left_high, left_low, left_high], dim=-1) @ torch.cat([right_high, right_high, right_low], dim=-2)


def _tf32_part(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32).add(1 << 12).bitwise_and(-(1 << 13)).view(torch.float32)
