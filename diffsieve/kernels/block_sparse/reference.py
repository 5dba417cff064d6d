"""Block-sparse attention in plain PyTorch: the definition that every backend is tested against."""

from __future__ import annotations

import torch
from torch import Tensor


def expand_block_mask(
    block_index: Tensor, block_count: Tensor | None, *, len_q: int, len_k: int, block_size: int
) -> Tensor:
    """Expand lists of kept key blocks to a token mask.

    Args:
        block_index: `(B, H, Nq, K)` integer, key blocks kept by each query block.
        block_count: `(B, H, Nq)` integer, how many entries of each list count, or None for all K.
        len_q: number of queries, `Nq = ceil(len_q / block_size)`.
        len_k: number of keys.
        block_size: tokens per block, of queries and keys alike.

    Returns:
        `(B, H, len_q, len_k)` bool, True where the query attends to the key.
    """
    batch, heads, n_q, kept = block_index.shape
    n_k = -(-len_k // block_size)
    listed = torch.ones_like(block_index, dtype=torch.bool)
    if block_count is not None:
        listed = torch.arange(kept, device=block_index.device) < block_count[..., None]
    # One column more than there are blocks: entries past the count go there and are cut off.
    target = torch.where(listed, block_index.long(), n_k)
    blocks = torch.zeros(batch, heads, n_q, n_k + 1, dtype=torch.bool, device=block_index.device)
    blocks = blocks.scatter(-1, target, True)[..., :n_k]
    rows = torch.arange(len_q, device=block_index.device) // block_size
    columns = torch.arange(len_k, device=block_index.device) // block_size
    return blocks[:, :, rows][..., columns]


def block_sparse_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_index: Tensor,
    block_count: Tensor | None = None,
    *,
    block_size: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention over the kept blocks only, renormalised, with the mask written out in full.

    Softmax runs in fp64 for fp64 inputs and in fp32 for all others. A query whose list is empty gives output 0 and
    log-sum-exp -inf. Keys are masked by their true number: the short last block holds no padding.

    Args:
        query: `(B, H, Lq, D)`.
        key, value: `(B, Hkv, Lk, D)`, `H % Hkv == 0`; query head h reads key head `h // (H / Hkv)`.
        block_index, block_count, block_size: as in `expand_block_mask`.
        scale: factor of the logits, > 0.

    Returns:
        `(B, H, Lq, D)` in the dtype of `query`, and the natural log-sum-exp `(B, H, Lq)` in fp32 (fp64 for fp64).
    """
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    group = query.shape[1] // key.shape[1]
    q = query.to(dtype)
    k = key.to(dtype).repeat_interleave(group, dim=1)
    v = value.to(dtype).repeat_interleave(group, dim=1)
    mask = expand_block_mask(block_index, block_count, len_q=query.shape[2], len_k=key.shape[2], block_size=block_size)
    logits = (q @ k.transpose(-1, -2) * scale).masked_fill(~mask, float("-inf"))
    lse = torch.logsumexp(logits, dim=-1)
    empty = ~mask.any(dim=-1, keepdim=True)
    weights = (logits - lse[..., None]).exp().masked_fill(empty, 0.0)
    return (weights @ v).to(query.dtype), lse
