"""What BA-Att means: one head at a time, one block at a time, in the dtype of the inputs (use fp64 to be sure).

Sorting and selection compare fp32 values, as the method states; everything else follows the inputs. Shapes: L tokens, D
channels, N blocks; `query`, `key`, `value` are (L, D) of one head unless said otherwise.
"""

import math

import torch

from ..autocast import without_autocast
from ..orders import frame_hilbert_order, hilbert_order
from .ordering import CANDIDATE_ORDERS, Grid, default_window

__all__ = ["ba_attention_reference"]


def block_ranges(num_tokens: int, block_size: int) -> list[range]:
    """Return the tokens of every block; the last block may be short."""
    return [range(i, min(i + block_size, num_tokens)) for i in range(0, num_tokens, block_size)]


def sort_by_norm(norm: torch.Tensor, window: int, descending: bool) -> torch.Tensor:
    """Return the stable argsort of fp32 norms (L,) inside consecutive windows."""
    parts = [
        w.start + torch.sort(norm[w.start : w.stop].float(), stable=True, descending=descending).indices
        for w in block_ranges(norm.shape[0], window)
    ]
    return torch.cat(parts)


def orders_of_head(
    query: torch.Tensor, key: torch.Tensor, order: str, grid_thw: Grid | None, window: int, descending: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the permutations of queries and keys of one head, (Lq,) and (Lk,)."""
    if order == "norm_sort":
        by_norm = [sort_by_norm(x.norm(dim=-1), x.shape[0], descending) for x in (query, key)]
        return by_norm[0], by_norm[1]
    if order == "raster" or grid_thw is None:
        return torch.arange(query.shape[0]), torch.arange(key.shape[0])
    if order == "frame_hilbert":
        return frame_hilbert_order(grid_thw), frame_hilbert_order(grid_thw)
    curve = hilbert_order(grid_thw)
    if order == "hilbert":
        return curve, curve
    distance = (key - key.mean(dim=0)).norm(dim=-1)
    return curve, curve[sort_by_norm(distance[curve], window, descending)]


def statistics_of_head(tokens: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the means (N, D), population variances (N, D) and token counts (N,) of the blocks."""
    blocks = [tokens[b.start : b.stop] for b in block_ranges(tokens.shape[0], block_size)]
    means = torch.stack([block.mean(dim=0) for block in blocks])
    variances = torch.stack([((block - block.mean(dim=0)) ** 2).mean(dim=0) for block in blocks])
    return means, variances, torch.tensor([float(len(block)) for block in blocks], dtype=tokens.dtype)


def scores_of_head(
    query: torch.Tensor,
    key: torch.Tensor,
    block_size: int,
    *,
    beta: float,
    center_keys: bool,
    log_count: bool,
    second_order: bool,
    score: str,
    scale: float,
) -> torch.Tensor:
    """Return the scores (Nq, Nk) of ordered queries and keys: base logits, second-order term, log count."""
    query_mean, query_var, _ = statistics_of_head(query, block_size)
    key_mean, key_var, _ = statistics_of_head(key, block_size)
    centred = key_mean - key.mean(dim=0) if center_keys else key_mean
    scores = torch.empty(len(query_mean), len(key_mean), dtype=query.dtype)
    for g in range(len(query_mean)):
        for h, column in enumerate(block_ranges(key.shape[0], block_size)):
            query_side = query_var[g] @ centred[h] ** 2 + query_var[g] @ key_var[h]
            if score == "halfk":
                logits = scale * key[column.start : column.stop] @ query_mean[g]
                base = torch.logsumexp(logits, dim=0) - math.log(len(column))
                delta = query_side
            else:
                base = scale * query_mean[g] @ key_mean[h]
                delta = query_side + query_mean[g] ** 2 @ key_var[h]
            scores[g, h] = base + (beta * scale**2 * delta if second_order else 0)
            if score == "residual":
                spread = scale**2 * (query_mean[g] ** 2 + query_var[g]) @ key_var[h]
                scores[g, h] += 0.5 * torch.log(torch.expm1(spread))
            if log_count:
                scores[g, h] += math.log(len(column))
    return scores


def select_row(scores: torch.Tensor, kept: int) -> list[int]:
    """Return the `kept` blocks of one row (Nk,) with the largest scores, lower index first among equals, ascending."""
    ranked = sorted(range(len(scores)), key=lambda block: (-float(scores[block].float()), block))
    return sorted(ranked[:kept])


def select_row_top_p(scores: torch.Tensor, p: float, fewest: int, most: int) -> list[int]:
    """Return the fewest blocks of one row whose softmax mass reaches p, between `fewest` and `most`, ascending."""
    mass = torch.softmax(scores, dim=0)
    ranked = sorted(range(len(scores)), key=lambda block: (-float(scores[block]), block))
    count, reached = 0, 0.0
    while count < len(ranked) and reached < p:
        reached += float(mass[ranked[count]])
        count += 1
    return sorted(ranked[: min(max(count, fewest), most)])


def attention_of_head(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kept: list[list[int]],
    block_size: int,
    scale: float,
    compensate: str,
    text_key: torch.Tensor,
    text_value: torch.Tensor,
) -> torch.Tensor:
    """Return the softmax attention (Lq, D) over the kept key blocks and all text keys.

    With `compensate="centroid"` a skipped block takes part as n_g copies of its mean key and its mean value.
    """
    out = torch.empty_like(query)
    columns = block_ranges(key.shape[0], block_size)
    for g, row in enumerate(block_ranges(query.shape[0], block_size)):
        keys, values, log_weights = [text_key], [text_value], [torch.zeros(len(text_key), dtype=key.dtype)]
        for h, column in enumerate(columns):
            block_key, block_value = key[column.start : column.stop], value[column.start : column.stop]
            if h in kept[g]:
                keys.append(block_key)
                values.append(block_value)
                log_weights.append(torch.zeros(len(column), dtype=key.dtype))
            elif compensate == "centroid":
                keys.append(block_key.mean(dim=0, keepdim=True))
                values.append(block_value.mean(dim=0, keepdim=True))
                log_weights.append(torch.full((1,), math.log(len(column)), dtype=key.dtype))
        logits = scale * query[row.start : row.stop] @ torch.cat(keys).T + torch.cat(log_weights)
        out[row.start : row.stop] = torch.softmax(logits, dim=-1) @ torch.cat(values)
    return out


@without_autocast
def ba_attention_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    grid_thw: Grid | None = None,
    orders: str | list[str] | torch.Tensor,
    density: float,
    block_size: int = 128,
    beta: float = 0.5,
    center_keys: bool = True,
    log_count: bool = True,
    descending: bool = True,
    window: int | None = None,
    second_order: bool = True,
    compensate: str = "none",
    score: str = "moments",
    top_p: float | None = None,
    min_density: float = 0.0,
    text_prefix: int = 0,
    text_suffix: int = 0,
    scale: float | None = None,
    budgets: torch.Tensor | None = None,
) -> tuple[torch.Tensor, list[list[list[list[int]]]]]:
    """Compute BA-Att by its definition; arguments as in `ba_attention`.

    Returns:
        out: (B, H, L, D) in the dtype of `query`.
        kept: `kept[b][h][g]`, the ascending list of video key blocks that video query block g keeps.
    """
    batch, heads, length, dim = query.shape
    scale = dim**-0.5 if scale is None else scale
    names = [orders] * heads if isinstance(orders, str) else [_name(order) for order in orders]
    first, last = text_prefix, length - text_suffix
    window = default_window(last - first, block_size) if window is None else window
    text_blocks = math.ceil((text_prefix + text_suffix) / block_size)
    num_blocks = math.ceil((last - first) / block_size)

    def video_budget(share: float) -> int:
        total = max(1, math.floor(share * (num_blocks + text_blocks) + 0.5))
        return min(num_blocks, max(1, total - text_blocks))

    out = torch.empty_like(query)
    kept_all: list[list[list[list[int]]]] = []
    for b in range(batch):
        kept_all.append([])
        for h in range(heads):
            kv = h // (heads // key.shape[1])
            q_all, k_all, v_all = query[b, h], key[b, kv], value[b, kv]
            q, k, v = q_all[first:last], k_all[first:last], v_all[first:last]
            order_q, order_k = orders_of_head(q, k, names[h], grid_thw, window, descending)
            q, k, v = q[order_q], k[order_k], v[order_k]
            scores = scores_of_head(
                q,
                k,
                block_size,
                beta=beta,
                center_keys=center_keys,
                log_count=log_count or top_p is not None,
                second_order=second_order,
                score=score,
                scale=scale,
            )
            if top_p is None:
                of_head = video_budget(density) if budgets is None else int(budgets[h])
                kept = [select_row(row, of_head) for row in scores]
            else:
                fewest, most = video_budget(min_density), video_budget(density)
                kept = [select_row_top_p(row, top_p, fewest, most) for row in scores]
            text_key = torch.cat([k_all[:first], k_all[last:]])
            text_value = torch.cat([v_all[:first], v_all[last:]])
            ordered = attention_of_head(q, k, v, kept, block_size, scale, compensate, text_key, text_value)
            dense = torch.softmax(scale * q_all @ k_all.T, dim=-1) @ v_all
            dense[first + order_q] = ordered
            out[b, h] = dense
            kept_all[b].append(kept)
    return out, kept_all


def _name(order: str | int | torch.Tensor) -> str:
    return order if isinstance(order, str) else CANDIDATE_ORDERS[int(order)]
