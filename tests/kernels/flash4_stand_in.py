"""A stand-in for the two modules of `flash-attn-4` that the `flash4` backend calls.

It says nothing about that package's kernels: it takes what their interface for Hopper GPUs takes, refuses what that
refuses, reads of the lists what that reads, and computes with a mask written out. Tests of how the backend calls it run
where no GPU and no package are.
"""

from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

INTERFACE, LISTS = "flash_attn.cute.interface", "flash_attn.cute.block_sparsity"


class Lists(NamedTuple):
    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor | None = None
    full_block_idx: Tensor | None = None
    block_size: tuple[int, int] | None = None


def flash_attn_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    pack_gqa: bool | None = None,
    block_sparse_tensors: Lists | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(B, L, H, D) in, written to `out` of that shape and `lse` (B, H, L) fp32."""
    lists = block_sparse_tensors
    assert lists is not None
    assert lists.full_block_cnt is not None
    assert lists.full_block_idx is not None
    assert lists.block_size is not None
    assert out is not None
    batch, len_q, heads, dim = q.shape
    len_k, kv_heads = k.shape[1:3]
    size = lists.block_size[0]
    assert lists.block_size in ((64, 64), (128, 128)), "blocks that are no tiles of it"
    n_q, n_k = -(-len_q // size), -(-len_k // size)
    for count, index in (lists[:2], lists[2:4]):
        assert count.shape == (batch, heads, n_q)
        assert index.shape[:3] == count.shape
        assert index.shape[3] <= n_k
        assert count.dtype == index.dtype == torch.int32
        assert count.is_contiguous()
        assert index.is_contiguous()
    assert not lists.mask_block_cnt.any(), "a block that needs a mask within"
    assert pack_gqa is False, "heads with lists of their own in one tile"
    for x in (q, k, v, out):
        assert x.stride(3) == 1
        assert all(stride * x.element_size() % 16 == 0 for stride in x.stride()[:3])
        assert not x.requires_grad

    kept = torch.zeros(batch, heads, n_q, n_k, dtype=torch.bool)
    for row in range(n_q):
        for b in range(batch):
            for h in range(heads):
                kept[b, h, row, lists.full_block_idx[b, h, row, : int(lists.full_block_cnt[b, h, row])].long()] = True
    mask = kept.repeat_interleave(size, 2)[:, :, :len_q].repeat_interleave(size, 3)[..., :len_k]
    query = q.transpose(1, 2).double()
    key, value = (x.transpose(1, 2).double().repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    logits = query @ key.transpose(2, 3) * (dim**-0.5 if softmax_scale is None else softmax_scale)
    logits = logits.masked_fill(~mask, float("-inf"))
    total = logits.logsumexp(-1)
    weights = (logits - total[..., None]).exp().masked_fill(~mask, 0.0)
    out.copy_((weights @ value).transpose(1, 2))
    if lse is not None:
        assert lse.shape == (batch, heads, len_q)
        assert lse.dtype == torch.float32
        assert lse.is_contiguous()
        lse.copy_(total)
    return out, lse


MODULES = {
    INTERFACE: SimpleNamespace(_flash_attn_fwd=flash_attn_fwd),
    LISTS: SimpleNamespace(BlockSparseTensorsTorch=Lists),
}
