"""LLSA in plain PyTorch: the definition that every backend is tested against. Memory grows with L squared.

Source: arXiv 2512.16615, with true counts of raw tokens in place of S^l, so that any length works.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .levels import level_lengths, token_counts
from .pyramid import fold_pyramid


def hierarchical_topk_reference(
    q_pyramid: Sequence[Tensor], k_pyramid: Sequence[Tensor], *, topk: Sequence[int], block_size: int
) -> list[Tensor]:
    """Choose, from the coarsest level down, the keys that each pooled query keeps.

    Level M: the best of all keys. Below: the best among the children of what the query's parent kept. The score is the
    plain dot product; NaN ranks as +inf; ties go to the lowest index.

    Args:
        q_pyramid, k_pyramid: levels 0..M of query `(B, H, n_l, D)` and key `(B, Hkv, n_l, D)`; level 0 is not read.
        topk: K_1 .. K_M.
        block_size: S.

    Returns:
        I_1 .. I_M, `(B, H, n_l, K_l)` int32, each row ascending, filled with -1 where there are fewer candidates.
    """
    chosen: list[Tensor] = []
    for level in range(len(topk), 0, -1):
        query, key = q_pyramid[level], k_pyramid[level]
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        scores = (query @ key.transpose(-1, -2)).nan_to_num(torch.inf, torch.inf, -torch.inf)
        allowed = torch.ones_like(scores, dtype=torch.bool)
        if chosen:
            tokens = torch.arange(query.shape[2], device=query.device)
            allowed = _kept_matrix(chosen[0], k_pyramid[level + 1].shape[2])
            allowed = allowed[:, :, tokens // block_size][..., tokens // block_size]
        # Two stable sorts: by score, then whatever is allowed comes first.
        by_score = scores.sort(dim=-1, descending=True, stable=True).indices
        first = allowed.gather(-1, by_score).int().sort(dim=-1, descending=True, stable=True)
        best = by_score.gather(-1, first.indices)[..., : topk[level - 1]]
        past = scores.shape[-1]
        kept = torch.where(allowed.gather(-1, best), best, past).sort(-1).values
        chosen.insert(0, torch.where(kept == past, -1, kept).int())
    return chosen


def token_weights(
    indices: Sequence[Tensor], *, length: int, block_size: int, enrich: bool, disjoint: bool
) -> list[Tensor]:
    """Return, per level, how many raw tokens each token stands for in the softmax of each query.

    Args:
        indices: I_1 .. I_M.
        length: L.
        block_size: S.
        enrich: attend to the pooled tokens too; otherwise to raw tokens alone.
        disjoint: leave out pooled tokens whose children are attended, so that the weights of a query sum to L.

    Returns:
        Levels 0..M (level 0 alone without `enrich`), `(B, H, L, n_l)` int64; 0 where the query does not attend.
    """
    device = indices[0].device
    levels = len(indices)
    lengths = level_lengths(length, block_size, levels)
    query = torch.arange(length, device=device)
    weights = []
    for level in range(levels + 1 if enrich else 1):
        token = torch.arange(lengths[level], device=device)
        if level < levels:
            kept = _kept_matrix(indices[level], lengths[level + 1])
            attended = kept[:, :, query // block_size ** (level + 1)][..., token // block_size]
        else:
            attended = torch.ones(*indices[0].shape[:2], length, lengths[level], dtype=torch.bool, device=device)
        if disjoint and level > 0:
            attended = attended & ~_kept_matrix(indices[level - 1], lengths[level])[:, :, query // block_size**level]
        weights.append(attended * token_counts(length, block_size, level, device))
    return weights


def enriched_attention_reference(
    query: Tensor,
    k_pyramid: Sequence[Tensor],
    v_pyramid: Sequence[Tensor],
    indices: Sequence[Tensor],
    *,
    block_size: int,
    scale: float,
    enrich: bool,
    disjoint: bool,
) -> tuple[Tensor, Tensor]:
    """One softmax over the raw and pooled tokens that each query attends to, weighted by their counts.

    Args:
        query: `(B, H, L, D)`.
        k_pyramid, v_pyramid: levels 0..M, `(B, Hkv, n_l, D)`, `H % Hkv == 0`.
        indices: I_1 .. I_M.
        block_size, enrich, disjoint: as in `token_weights`.
        scale: factor of the dot products, > 0.

    Returns:
        `(B, H, L, D)` in the dtype of `query`; log of the weighted sum of exponentials `(B, H, L)` in fp32 (fp64).
    """
    _, _, v, logits = _logits(query, k_pyramid, v_pyramid, indices, block_size, scale, enrich, disjoint)
    lse = torch.logsumexp(logits, dim=-1)
    return ((logits - lse[..., None]).exp() @ v).to(query.dtype), lse


def enriched_attention_backward_reference(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    k_pyramid: Sequence[Tensor],
    v_pyramid: Sequence[Tensor],
    indices: Sequence[Tensor],
    *,
    block_size: int,
    scale: float,
    enrich: bool,
    disjoint: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, raw key and raw value in fp32 (fp64), the indices held fixed.

    The derivative of a softmax, written out: dS = P (dO V^T - D + dLSE) with D = rowsum(dO o O). The log-counts are
    constants, and the pyramid's own gradient is `fold_pyramid`.
    """
    q, k, v, logits = _logits(query, k_pyramid, v_pyramid, indices, block_size, scale, enrich, disjoint)
    g = grad_out.to(q.dtype)
    weights = logits.softmax(dim=-1)
    d_weights = g @ v.transpose(-1, -2)
    shift = (weights * d_weights).sum(dim=-1, keepdim=True)
    if grad_lse is not None:
        shift = shift - grad_lse[..., None]
    d_logits = weights * (d_weights - shift) * scale
    sizes = [x.shape[2] for x in (k_pyramid if enrich else k_pyramid[:1])]
    grads = []
    for part in (d_logits.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ g):
        per_kv_head = part.unflatten(1, (k_pyramid[0].shape[1], -1)).sum(2)
        grads.append(fold_pyramid(per_kv_head.split(sizes, dim=2), length=query.shape[2], block_size=block_size))
    return d_logits @ k, grads[0], grads[1]


def _logits(
    query: Tensor,
    k_pyramid: Sequence[Tensor],
    v_pyramid: Sequence[Tensor],
    indices: Sequence[Tensor],
    block_size: int,
    scale: float,
    enrich: bool,
    disjoint: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, and key and value of all levels one after the other, per query head, and the weighted logits."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    group = query.shape[1] // k_pyramid[0].shape[1]
    depth = len(indices) + 1 if enrich else 1
    q = query.to(dtype)
    k, v = (
        torch.cat([x.to(dtype) for x in levels[:depth]], dim=2).repeat_interleave(group, dim=1)
        for levels in (k_pyramid, v_pyramid)
    )
    weights = token_weights(indices, length=query.shape[2], block_size=block_size, enrich=enrich, disjoint=disjoint)
    counts = torch.cat(weights, dim=-1).to(dtype)
    logits = q @ k.transpose(-1, -2) * scale + counts.log()
    return q, k, v, logits.masked_fill(counts == 0, -torch.inf)


def _kept_matrix(index: Tensor, num_keys: int) -> Tensor:
    """Lists `(B, H, n, K)` as a matrix `(B, H, n, num_keys)` bool."""
    target = torch.where(index < 0, num_keys, index.long())
    matrix = torch.zeros(*index.shape[:3], num_keys + 1, dtype=torch.bool, device=index.device)
    return matrix.scatter(-1, target, True)[..., :num_keys]
