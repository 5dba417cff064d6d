"""LLSA by gathering the kept blocks of a few query blocks at a time; no memory grows with L squared.

Runs on every device of PyTorch. Each level is attended alone and merged into a running softmax, so each has chunks of
its own shape. Shapes: R queries in a row share their keys, C rows in a chunk, n keys of a row, S block size.

Deterministic: sums over queries are taken in the order of the rows. Reading the choice of keys costs synchronisations
on a GPU, where this backend only serves what the Triton kernels cannot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .levels import token_counts
from .pyramid import fold_pyramid

# On a CPU a chunk should stay in the last cache levels, elsewhere it should fill the device.
_CHUNK_BYTES = {"cpu": 8 * 2**20}
_CHUNK_BYTES_DEVICE = 256 * 2**20
_MAX_ROW = 512


def hierarchical_topk_torch(
    q_pyramid: Sequence[Tensor], k_pyramid: Sequence[Tensor], *, topk: Sequence[int], block_size: int
) -> list[Tensor]:
    """Same meaning as `reference.hierarchical_topk_reference`."""
    batch, heads = q_pyramid[0].shape[:2]
    kv_head = _kv_head(batch, heads, k_pyramid[0].shape[1], q_pyramid[0].device)
    levels = len(topk)
    chosen: list[Tensor] = []
    for level in range(levels, 0, -1):
        query, key = q_pyramid[level].flatten(0, 1), k_pyramid[level].flatten(0, 1)  # [BH, n_l, D], [BHkv, n_l, D]
        dim, num_keys = key.shape[2], key.shape[1]
        kept = topk[level - 1]
        if not chosen:
            step = _rows_per_chunk(query, num_keys * (dim + query.shape[1]))
            parts = []
            for start in range(0, query.shape[0], step):
                rows = slice(start, start + step)
                scores = torch.bmm(query[rows], key[kv_head[rows]].transpose(1, 2))
                parts.append(_best(scores, kept))
            index = torch.cat(parts)
        else:
            parents = chosen[0].flatten(0, 1)  # [BH, n_(l+1), K]
            groups = parents.shape[1]
            blocks = _as_rows(key, block_size, groups * block_size)
            rows_of = _as_rows(query, block_size, groups * block_size)
            parents = parents.flatten(0, 1)
            step = _rows_per_chunk(query, parents.shape[1] * block_size * (dim + block_size))
            parts = []
            for start in range(0, rows_of.shape[0], step):
                rows = slice(start, start + step)
                ids, child, present = _children(parents[rows], block_size)
                head = torch.arange(rows_of.shape[0], device=query.device)[rows] // groups
                b_k = _gather(blocks, ids + (kv_head[head] * groups)[:, None])
                scores = torch.bmm(rows_of[rows], b_k.transpose(1, 2))  # [C, S, n]
                listed = (present & (child < num_keys))[:, None]
                # What is no candidate stands last in its row, so among equals it loses.
                position = _best(scores.masked_fill(~listed, -torch.inf), kept)
                ids_of = child[:, None].expand(-1, block_size, -1).gather(-1, position)
                parts.append(torch.where(listed.expand_as(scores).gather(-1, position), ids_of, -1))
            index = torch.cat(parts).view(batch * heads, -1, kept)[:, :num_keys]
        chosen.insert(0, index.view(batch, heads, num_keys, kept).int().contiguous())
    return chosen


def enriched_attention_torch(
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
    """Same meaning as `reference.enriched_attention_reference`."""
    plan = _Plan(query, k_pyramid, v_pyramid, indices, block_size, enrich, disjoint)
    q = plan.padded(query)
    out, peak, total = torch.empty_like(q), q.new_empty(q.shape[:2]), q.new_empty(q.shape[:2])
    for chunk in plan.chunks(floats_per_key=2):
        part, part_peak, part_total = chunk.attend(chunk.of(q), scale)
        if chunk.level == 0:  # the raw tokens come first, all of a query at once
            for x, value in ((out, part), (peak, part_peak), (total, part_total)):
                chunk.put(x, value)
            continue
        b_out, b_peak, b_total = chunk.of(out), chunk.of(peak), chunk.of(total)
        # Each query keeps a raw token: its peak is finite.
        new_peak = torch.maximum(b_peak, part_peak)
        shrink, grow = (b_peak - new_peak).exp_(), (part_peak - new_peak).exp_()
        b_total.mul_(shrink).addcmul_(part_total, grow)
        b_out.mul_(shrink[..., None]).addcmul_(part, grow[..., None])
        b_peak.copy_(new_peak)
    result = torch.empty_like(query)
    length = query.shape[2]
    result.copy_(out.div_(total[..., None]).view(*query.shape[:2], -1, query.shape[3])[:, :, :length])
    lse = peak + total.log()
    return result, lse.view(*query.shape[:2], -1)[:, :, :length].contiguous()


def enriched_attention_backward_torch(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    k_pyramid: Sequence[Tensor],
    v_pyramid: Sequence[Tensor],
    out: Tensor,
    lse: Tensor,
    indices: Sequence[Tensor],
    *,
    block_size: int,
    scale: float,
    enrich: bool,
    disjoint: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, raw key and raw value in fp32 (fp64), from the saved output and log-sum-exp."""
    plan = _Plan(query, k_pyramid, v_pyramid, indices, block_size, enrich, disjoint)
    q, g = plan.padded(query), plan.padded(grad_out)
    shift = (g * plan.padded(out)).sum(dim=-1)
    if grad_lse is not None:
        shift -= plan.padded(grad_lse[..., None])[..., 0]
    log_total = plan.padded(lse[..., None])[..., 0]
    dq = torch.zeros_like(q)
    dk, dv = plan.zeros_like_levels(), plan.zeros_like_levels()
    for chunk in plan.chunks(floats_per_key=4):
        b_q, b_g = chunk.of(q), chunk.of(g)
        weights = chunk.logits(b_q, scale).sub_(chunk.of(log_total)[..., None]).exp_()  # [C, R, n]
        d_logits = torch.bmm(b_g, chunk.value.transpose(1, 2)).sub_(chunk.of(shift)[..., None])
        d_logits.mul_(weights).mul_(scale)
        chunk.put(dq, torch.baddbmm(chunk.of(dq), d_logits, chunk.key))
        chunk.add(dk, torch.bmm(d_logits.transpose(1, 2), b_q))
        chunk.add(dv, torch.bmm(weights.transpose(1, 2), b_g))
    length = query.shape[2]
    return (
        dq.view(*query.shape[:2], -1, query.shape[3])[:, :, :length],
        fold_pyramid(plan.level_tensors(dk), length=length, block_size=block_size),
        fold_pyramid(plan.level_tensors(dv), length=length, block_size=block_size),
    )


class _Chunk(NamedTuple):
    """Rows of queries, their keys and values, and what is added to their logits."""

    level: int
    row: int  # R
    heads: slice | None  # of B * H, where all keys of a head are attended
    rows: slice  # of B * H * rows, or of the rows of a head where `heads` is given
    blocks: Tensor | None  # (C * K,) which blocks of the level were gathered, None where all were
    key: Tensor  # (C, n, D)
    value: Tensor  # (C, n, D)
    bias: Tensor  # (C, 1, n), or broadcastable to the logits by row

    def of(self, x: Tensor) -> Tensor:
        """The queries of the chunk from `(B * H, Lp, ...)`: `(C, R, ...)`; all queries of a head count as one row."""
        if self.heads is not None:
            return x[self.heads, self.rows.start * self.row : self.rows.stop * self.row]
        return x.view(-1, self.row, *x.shape[2:])[self.rows]

    def put(self, x: Tensor, part: Tensor) -> None:
        self.of(x).copy_(part)

    def attend(self, b_q: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """Sums of the chunk's queries `(C, R, D)`: of weighted values, relative to a logit `(C, R)`, and of weights."""
        return self._attend_on_cpu(b_q, scale) if b_q.is_cpu else self._attend_elsewhere(b_q, scale)

    def _attend_elsewhere(self, b_q: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.logits(b_q, scale)  # [C, R, n]
        # A row of a pooled level can have no keys in disjoint mode: a finite peak makes its weights 0.
        peak = logits.amax(dim=-1).clamp(min=torch.finfo(logits.dtype).min)
        weights = logits.sub_(peak[..., None]).exp_()
        return torch.bmm(weights, self.value), peak, weights.sum(dim=-1)

    def _attend_on_cpu(self, b_q: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        # What scaled_dot_product_attention calls on a CPU, taken directly for its log-sum-exp. One pass of all threads
        # instead of eight: on a CPU that is busy with other work that decides.
        bias = self.bias
        if bias.ndim == 4:  # by row of a head: the same for each query of the row
            bias = bias.expand(-1, -1, self.row, -1).flatten(1, 2)
        elif bias.ndim == 1:
            bias = bias[None, None]
        mask = bias.expand(b_q.shape[0], -1, -1)[:, None] if bool(bias.any()) else None
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            b_q[:, None], self.key[:, None], self.value[:, None], attn_mask=mask, scale=scale
        )
        out, lse = out[:, 0], lse[:, 0]
        if mask is not None:  # a row without keys, of a pooled level in disjoint mode, comes back with 0
            lse = lse.masked_fill(mask[:, 0].isneginf().all(dim=-1), -torch.inf)
        return out, lse, torch.ones_like(lse)

    def logits(self, b_q: Tensor, scale: float) -> Tensor:
        if self.heads is None:
            bias = self.bias.expand(-1, b_q.shape[1], -1)
            return torch.baddbmm(bias, b_q, self.key.transpose(1, 2), alpha=scale)
        logits = torch.bmm(b_q, self.key.transpose(1, 2)).mul_(scale)
        logits.view(b_q.shape[0], -1, self.row, logits.shape[2]).add_(self.bias)
        return logits

    def add(self, grads: list[Tensor], part: Tensor) -> None:
        """Add `(C, n, D)` to the gradient of this level."""
        total = grads[self.level]
        if self.blocks is None:
            total[self.heads] += part
        elif total.is_cuda:
            # Sorts first: the one sum over repeated indices on a GPU that is taken in a fixed order.
            total.index_put_((self.blocks,), part.view(-1, *total.shape[1:]), accumulate=True)
        else:
            total.index_add_(0, self.blocks, part.view(-1, *total.shape[1:]))


class _Plan:
    """Keys, values and lists of one call, laid out for the chunks."""

    def __init__(
        self,
        query: Tensor,
        k_pyramid: Sequence[Tensor],
        v_pyramid: Sequence[Tensor],
        indices: Sequence[Tensor],
        block_size: int,
        enrich: bool,
        disjoint: bool,
    ) -> None:
        self.batch, self.heads, self.length, self.dim = query.shape
        self.kv_heads = k_pyramid[0].shape[1]
        self.dtype = torch.promote_types(query.dtype, torch.float32)
        self.device = query.device
        self.block_size, self.enrich, self.disjoint = block_size, enrich, disjoint
        self.indices = [index.flatten(0, 1).clamp(max=k_pyramid[i + 1].shape[2] - 1) for i, index in enumerate(indices)]
        self.lengths = [x.shape[2] for x in k_pyramid]
        self.levels = len(indices)
        self.kv_head = _kv_head(self.batch, self.heads, self.kv_heads, self.device)
        # Queries per row of the pooled levels: whole blocks that divide a group of level 2.
        blocks = max(
            f for f in range(1, block_size + 1) if block_size % f == 0 and f * block_size <= max(_MAX_ROW, block_size)
        )
        self.coarse_row = block_size * blocks
        self.padded_length = -(-self.length // self.coarse_row) * self.coarse_row
        self.k, self.v = self._level_keys(k_pyramid), self._level_keys(v_pyramid)

    def padded(self, x: Tensor) -> Tensor:
        """`(B, H, L, D)` as `(B * H, Lp, D)` in the dtype of the sums; the padding is 0."""
        return _lengthened(x.to(self.dtype), self.padded_length).flatten(0, 1).contiguous()

    def zeros_like_levels(self) -> list[Tensor]:
        """Gradients of the levels as the chunks add to them: by block of keys, level M by query head."""
        grads = [torch.zeros_like(x) for x in self.k[: self.levels]]
        if self.enrich:
            grads.append(self.k[-1].new_zeros(self.batch * self.heads, *self.k[-1].shape[1:]))
        return grads

    def level_tensors(self, grads: list[Tensor]) -> list[Tensor]:
        """Undo the layout of `zeros_like_levels`: `(B, Hkv, n_l, D)`."""
        result = []
        for level, grad in enumerate(grads):
            if level == self.levels:
                per_head = grad.view(self.batch, self.kv_heads, -1, *grad.shape[1:])
                result.append(per_head.sum(2))
            else:
                flat = grad.view(self.batch, self.kv_heads, -1, self.dim)
                result.append(flat[:, :, : self.lengths[level]])
        return result

    def chunks(self, *, floats_per_key: int) -> Iterator[_Chunk]:
        """All levels, the raw tokens first. `floats_per_key`: matrices of the size of the logits, or of the keys."""
        for level in range(self.levels if self.enrich else 1):
            yield from self._gathered(level, floats_per_key)
        if self.enrich:
            yield from self._coarsest(floats_per_key)

    def _level_keys(self, levels: Sequence[Tensor]) -> list[Tensor]:
        """Gathered levels as blocks `(B * Hkv * n_(l+1), S, D)`, the coarsest as `(B * Hkv, n_M, D)`."""
        result = []
        for level, x in enumerate(levels if self.enrich else levels[:1]):
            x = x.to(self.dtype).flatten(0, 1)
            if level < self.levels:
                x = _as_rows(x, self.block_size, self.lengths[level + 1] * self.block_size)
            result.append(x)
        return result

    def _groups(self, level: int, row: int) -> Tensor:
        """For each row of a head, the token of a level that stands over it: (Lp / R,)."""
        first = torch.arange(0, self.padded_length, row, device=self.device)
        return (first // self.block_size**level).clamp(max=self.lengths[level] - 1)

    def _gathered(self, level: int, floats_per_key: int) -> Iterator[_Chunk]:
        """Level 0..M-1: the children of what the level above keeps."""
        size = self.block_size
        # Without pooled tokens under it that its own block keeps, a row of level 1 has to be one block.
        row = size if level == 0 or (self.disjoint and level == 1) else self.coarse_row
        rows = self.padded_length // row
        parents = self.indices[level][:, self._groups(level + 1, row)].flatten(0, 1)
        own = None
        if self.disjoint and level > 0:
            own = self.indices[level - 1][:, self._groups(level, row)].flatten(0, 1).long()
        keys = parents.shape[1] * size
        step = _rows_per_chunk(self.k[level], floats_per_key * keys * (self.dim + row))
        for start in range(0, parents.shape[0], step):
            part = slice(start, min(start + step, parents.shape[0]))
            ids, child, present = _children(parents[part], size)
            span = size**level
            counts = (self.length - child * span).clamp(0, span) * present
            bias = counts.to(self.dtype).log()
            if own is not None:
                bias.masked_fill_((child[:, :, None] == own[part][:, None]).any(dim=-1), -torch.inf)
            head = torch.arange(part.start, part.stop, device=self.device) // rows
            blocks = ids + (self.kv_head[head] * self.lengths[level + 1])[:, None]
            yield _Chunk(
                level=level,
                row=row,
                heads=None,
                rows=part,
                blocks=blocks.flatten(),
                key=_gather(self.k[level], blocks),
                value=_gather(self.v[level], blocks),
                bias=bias[:, None],
            )

    def _coarsest(self, floats_per_key: int) -> Iterator[_Chunk]:
        """Level M: all queries of a head attend to all tokens; a few heads at a time, or a part of one."""
        level, tokens = self.levels, self.lengths[-1]
        row = self.block_size if level == 1 else self.coarse_row
        rows = self.padded_length // row
        counts = token_counts(self.length, self.block_size, level, self.device).to(self.dtype).log()
        own = None
        if self.disjoint:
            own = self.indices[level - 1][:, self._groups(level, row)].long()  # [BH, rows, K]
            own = torch.where(own < 0, own[..., :1], own)
        per_row = floats_per_key * row * (tokens + self.dim)
        heads_at_once = _rows_per_chunk(self.k[level], per_row * rows)
        rows_at_once = rows if heads_at_once > 1 else _rows_per_chunk(self.k[level], per_row)
        for first in range(0, self.batch * self.heads, heads_at_once):
            heads = slice(first, min(first + heads_at_once, self.batch * self.heads))
            key, value = (x[level][self.kv_head[heads]] for x in (self.k, self.v))
            for start in range(0, rows, rows_at_once):
                part = slice(start, min(start + rows_at_once, rows))
                bias = counts
                if own is not None:
                    listed = own[heads, part]
                    bias = counts.expand(*listed.shape[:2], -1).scatter(-1, listed, -torch.inf)[:, :, None]
                yield _Chunk(level=level, row=row, heads=heads, rows=part, blocks=None, key=key, value=value, bias=bias)


def _kv_head(batch: int, heads: int, kv_heads: int, device: torch.device) -> Tensor:
    """For each of B * H query heads, its key head among B * Hkv."""
    head = torch.arange(batch * heads, device=device)
    return head // heads * kv_heads + head % heads // (heads // kv_heads)


def _as_rows(x: Tensor, size: int, length: int) -> Tensor:
    """`(B * H, n, D)`, zero-padded to `length` tokens, as `(B * H * length / size, size, D)`."""
    return _lengthened(x, length).reshape(-1, size, x.shape[2])


def _lengthened(x: Tensor, length: int) -> Tensor:
    """`(..., n, D)` with zeros behind it, as `(..., length, D)`; `x` itself where nothing is missing."""
    missing = length - x.shape[-2]
    return pad(x, (0, 0, 0, missing)) if missing else x


def _children(parents: Tensor, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks `(C, K)`, the ids of their tokens `(C, K * S)` and whether each is listed.

    Empty entries become the first one of their row, which is never empty, so that nothing else is read for them.
    """
    parents = parents.long()
    present = (parents >= 0).repeat_interleave(block_size, dim=1)
    blocks = torch.where(parents < 0, parents[:, :1], parents).clamp(min=0)
    tokens = blocks[:, :, None] * block_size + torch.arange(block_size, device=parents.device)
    return blocks, tokens.flatten(1), present


def _gather(blocks: Tensor, ids: Tensor) -> Tensor:
    """Blocks `(N, S, D)` by ids `(C, K)`, as `(C, K * S, D)`."""
    return blocks.index_select(0, ids.flatten()).view(ids.shape[0], -1, blocks.shape[2])


def _best(scores: Tensor, kept: int) -> Tensor:
    """Positions of the `kept` largest scores of each row, ascending, ties to the lowest; NaN ranks as +inf."""
    scores = scores.nan_to_num(torch.inf, torch.inf, -torch.inf)
    last = scores.topk(kept, dim=-1).values[..., -1:]
    above, equal = scores > last, scores == last
    room = kept - above.sum(dim=-1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(dim=-1) <= room))
    return chosen.nonzero()[:, -1].view(*scores.shape[:-1], kept)


def _rows_per_chunk(x: Tensor, floats_per_row: int) -> int:
    budget = _CHUNK_BYTES.get(x.device.type, _CHUNK_BYTES_DEVICE)
    return max(1, budget // (x.element_size() * floats_per_row))
