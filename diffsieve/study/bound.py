"""The paper's bound on how far single logits lie from the block logit (arXiv 2605.19726, Eq. 7 and 8; Fig. 2)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..kernels.ba_att import TokenOrders, gather_tokens
from ..kernels.ba_att.statistics import block_means


def bound_and_deviation(
    query: torch.Tensor, key: torch.Tensor, order: TokenOrders, *, block_size: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the bound U and the true largest deviation for every pair of blocks.

    U = (Rq Mk + Mq Rk + Rq Rk) * scale, with R the largest distance of a token from its block's mean and M the largest
    norm in the block. The deviation is the largest |q_i·k_j - Qm·Km| * scale over the pair.

    Args:
        query: (B, H, L, D).
        key: (B, Hkv, L, D).
        order: of the tokens before they are cut into blocks.
        block_size: tokens per block.
        scale: factor of the logits.

    Returns:
        Two tensors (B, H, Nq, Nk) in fp32.
    """
    q = gather_tokens(query, order.query).float()
    k = gather_tokens(key, order.key).float()
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    (query_mean, query_radius, query_norm), (key_mean, key_radius, key_norm) = (_spread(x, block_size) for x in (q, k))
    rq, mq, rk, mk = query_radius[..., None], query_norm[..., None], key_radius[..., None, :], key_norm[..., None, :]
    bound = (rq * mk + mq * rk + rq * rk) * scale
    base = query_mean @ key_mean.transpose(-1, -2) * scale
    rows = []
    for number, block in enumerate(q.split(block_size, dim=2)):
        logits = block @ k.transpose(-1, -2) * scale  # (B, H, block, L)
        middle = base[:, :, number].repeat_interleave(block_size, dim=-1)[..., None, : logits.shape[-1]]
        rows.append(_block_max((logits - middle).abs().amax(dim=2), block_size))
    return bound, torch.stack(rows, dim=2)


def correlation(bound: torch.Tensor, deviation: torch.Tensor) -> torch.Tensor:
    """Return Pearson's r over the block pairs of each head, (B, H); NaN where one of the two is constant."""
    x, y = (values.flatten(2).double() for values in (bound, deviation))
    x, y = x - x.mean(-1, keepdim=True), y - y.mean(-1, keepdim=True)
    return ((x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1))).float()


def _spread(tokens: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Means (B, H, N, D), radii (B, H, N) and largest norms (B, H, N) of the blocks."""
    mean = block_means(tokens, block_size)
    centred = tokens - mean.repeat_interleave(block_size, dim=2)[:, :, : tokens.shape[2]]
    return mean, _block_max(centred.norm(dim=-1), block_size), _block_max(tokens.norm(dim=-1), block_size)


def _block_max(values: torch.Tensor, block_size: int) -> torch.Tensor:
    """Largest value of every block of the last dimension."""
    padded = F.pad(values, (0, -values.shape[-1] % block_size), value=-torch.inf)
    return padded.unflatten(-1, (-1, block_size)).amax(dim=-1)
