"""Block-sparse attention by gathering the kept key blocks of a few query blocks at a time.

Runs on every device of PyTorch. Shapes: R = B * H * Nq rows (query blocks), C rows in a chunk, S = block size,
n = keys kept by each row of a chunk.

The lists are ascending, so the short block at the end of the keys can only be the last entry of a list: the valid
keys of a row are a prefix of its gathered blocks. Rows with the same number of valid keys share a chunk, hence no
chunk needs a mask.

Working set: one chunk's keys, values and (for the log-sum-exp) logits, at most 2 MiB a thread on the CPU and 256 MiB
elsewhere, or one query block's if that is more; one contiguous copy of query, key or value where it is strided, ragged
or (on the CPU) of 16 bits. Reading the counts costs one synchronisation with the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

# On a CPU a chunk should stay in the last cache levels and still give every thread some rows; a GPU it should fill.
_CHUNK_BYTES_THREAD = 2 * 2**20
_CHUNK_BYTES_DEVICE = 256 * 2**20


class _Chunk(NamedTuple):
    rows: Tensor | slice  # which of the R query blocks
    blocks: Tensor  # (C * kept,) int64, positions of the kept blocks among all B * Hkv * Nk key blocks
    size: int  # C
    kept: int  # blocks in each list
    keys: int  # valid keys in each list, <= kept * S


def block_sparse_attention_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_index: Tensor,
    block_count: Tensor | None,
    *,
    block_size: int,
    scale: float,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Same meaning as `reference.block_sparse_attention_reference`; the log-sum-exp is None unless asked for."""
    batch, heads, len_q, dim = query.shape
    n_q = block_index.shape[2]
    # SDPA does not return the log-sum-exp. It is the faster way, by far on a CPU that is busy with other work: plain
    # products bring all threads to a barrier six times a chunk, SDPA once.
    use_sdpa = not return_lse
    on_cpu = query.device.type == "cpu"
    compute_dtype = query.dtype if use_sdpa and not on_cpu else _accumulation_dtype(query.dtype)
    q = _as_blocks(query, block_size, compute_dtype)
    k = _as_blocks(key, block_size, compute_dtype)
    v = _as_blocks(value, block_size, compute_dtype)
    if not use_sdpa:
        q = q * scale
    out = torch.zeros_like(q)
    lse = q.new_full((q.shape[0], block_size), float("-inf")) if return_lse else None
    workspace = _Workspace(q)
    for chunk in _chunks(
        block_index, block_count, key, block_size=block_size, floats_per_key=2 * dim + (0 if use_sdpa else block_size)
    ):
        b_q = q[chunk.rows]  # [C, S, D]
        b_k = workspace.gather("key", k, chunk)  # [C, n, D]
        b_v = workspace.gather("value", v, chunk)  # [C, n, D]
        if use_sdpa:
            out[chunk.rows] = scaled_dot_product_attention(b_q[:, None], b_k[:, None], b_v[:, None], scale=scale)[:, 0]
        else:
            logits = workspace.take("logits", (chunk.size, block_size, chunk.keys))
            torch.bmm(b_q, b_k.transpose(1, 2), out=logits)
            peak = logits.amax(dim=-1) if lse is not None else None
            weights = torch.softmax(logits, dim=-1, out=logits)
            if isinstance(chunk.rows, slice):
                torch.bmm(weights, b_v, out=out[chunk.rows])
            else:
                out[chunk.rows] = torch.bmm(weights, b_v)
            if lse is not None and peak is not None:
                # The largest weight is exp(0) / sum, so its logarithm completes the log-sum-exp.
                lse[chunk.rows] = peak - weights.amax(dim=-1).log()
    result = torch.empty_like(query)
    result.copy_(out.view(batch, heads, n_q * block_size, dim)[:, :, :len_q])
    if lse is None:
        return result, None
    return result, lse.view(batch, heads, n_q * block_size)[:, :, :len_q].contiguous()


def block_sparse_attention_torch_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_index: Tensor,
    block_count: Tensor | None,
    *,
    block_size: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value from those of the output and (optional) of the log-sum-exp.

    Recomputes the weights chunk by chunk and accumulates in fp32 (fp64 for fp64). On a GPU the sums over query
    blocks use atomic additions, so that their last bits differ from run to run.
    """
    dtype = _accumulation_dtype(query.dtype)
    q, k, v = (_as_blocks(x, block_size, dtype) for x in (query, key, value))
    g_out = _as_blocks(grad_out, block_size, dtype)
    g_lse = None if grad_lse is None else _as_blocks(grad_lse[..., None], block_size, dtype)
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    # Per key: key, value and their gradients, and four matrices of the size of the logits.
    floats_per_key = 4 * query.shape[3] + 4 * block_size
    for chunk in _chunks(block_index, block_count, key, block_size=block_size, floats_per_key=floats_per_key):
        shape = (chunk.size, chunk.kept * block_size, query.shape[3])
        b_q, b_g = q[chunk.rows], g_out[chunk.rows]  # [C, S, D]
        b_k = k.index_select(0, chunk.blocks).view(shape)[:, : chunk.keys]
        b_v = v.index_select(0, chunk.blocks).view(shape)[:, : chunk.keys]
        weights = torch.softmax(torch.bmm(b_q * scale, b_k.transpose(1, 2)), dim=-1)  # [C, S, n]
        d_weights = torch.bmm(b_g, b_v.transpose(1, 2))
        shift = (weights * d_weights).sum(dim=-1, keepdim=True)
        if g_lse is not None:
            shift = shift - g_lse[chunk.rows]
        d_logits = weights * (d_weights - shift) * scale
        dq[chunk.rows] = torch.bmm(d_logits, b_k)
        for total, part in (
            (dk, torch.bmm(d_logits.transpose(1, 2), b_q)),
            (dv, torch.bmm(weights.transpose(1, 2), b_g)),
        ):
            part = pad(part, (0, 0, 0, shape[1] - chunk.keys))
            total.index_add_(0, chunk.blocks, part.view(-1, block_size, shape[2]))
    return _from_blocks(dq, query), _from_blocks(dk, key), _from_blocks(dv, value)


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _as_blocks(x: Tensor, block_size: int, dtype: torch.dtype) -> Tensor:
    """`(B, H, L, D)` to `(B * H * N, S, D)` in `dtype`, the end zero-padded; a view where no copy is needed."""
    dim = x.shape[3]
    x = pad(x.to(dtype), (0, 0, 0, -x.shape[2] % block_size))
    return x.reshape(-1, block_size, dim)


def _from_blocks(blocks: Tensor, like: Tensor) -> Tensor:
    """Undo `_as_blocks`: a tensor of the shape, dtype and strides of `like`."""
    batch, heads, length, dim = like.shape
    result = torch.empty_like(like)
    result.copy_(blocks.view(batch, heads, -1, dim)[:, :, :length])
    return result


class _Workspace:
    """Buffers kept from chunk to chunk: fresh ones would cost a page fault per 4 KiB on every chunk."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        count = torch.Size(shape).numel()
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < count:
            buffer = self._buffers[name] = self._like.new_empty(count)
        return buffer[:count].view(shape)

    def gather(self, name: str, blocks: Tensor, chunk: _Chunk) -> Tensor:
        """Kept blocks `(B * Hkv * Nk, S, D)` of a chunk, without the padding at their end: `(C, n, D)`."""
        _, size, dim = blocks.shape
        target = self.take(name, (chunk.blocks.numel(), size, dim))
        torch.index_select(blocks, 0, chunk.blocks, out=target)
        return target.view(chunk.size, chunk.kept * size, dim)[:, : chunk.keys]


def _chunks(
    block_index: Tensor, block_count: Tensor | None, key: Tensor, *, block_size: int, floats_per_key: int
) -> Iterator[_Chunk]:
    """Split all query blocks with a list that is not empty into chunks of equal numbers of valid keys."""
    batch, heads, n_q, width = block_index.shape
    kv_heads, len_k = key.shape[1:3]
    n_k = -(-len_k // block_size)
    padding = n_k * block_size - len_k
    index = block_index.to(torch.int64).clamp(0, n_k - 1)
    if block_count is None:
        count = torch.full((batch * heads * n_q,), width, device=index.device)
    else:
        count = block_count.reshape(-1).to(torch.int64).clamp(0, width)
    last = index.reshape(-1, width).gather(1, (count - 1).clamp(min=0)[:, None])[:, 0]
    valid = count * block_size - (last == n_k - 1) * padding
    valid = torch.where(count > 0, valid, 0)
    head_of = torch.arange(batch * heads, device=index.device)
    kv_head = head_of // heads * kv_heads + head_of % heads // (heads // kv_heads)
    index = (index + (kv_head * n_k).view(batch, heads, 1, 1)).reshape(-1, width)

    on_cpu = index.device.type == "cpu"
    budget = _CHUNK_BYTES_THREAD * torch.get_num_threads() if on_cpu else _CHUNK_BYTES_DEVICE
    lengths = valid.unique().tolist()
    for keys in lengths:
        if keys == 0:
            continue
        kept = -(-keys // block_size)
        rows = None if len(lengths) == 1 else (valid == keys).nonzero()[:, 0]
        total = index.shape[0] if rows is None else rows.numel()
        step = max(1, budget // (4 * floats_per_key * kept * block_size))
        for start in range(0, total, step):
            part = slice(start, min(start + step, total)) if rows is None else rows[start : start + step]
            blocks = index[part, :kept].reshape(-1)
            yield _Chunk(part, blocks, blocks.numel() // kept, kept, keys)
