"""The whole BA-Att call: order, statistics, scores, selection, attention over the kept blocks, order undone.

Shapes: B batch, H query heads, Hkv key heads, L tokens, D channels, N blocks. Text tokens before and after the video
tokens stay dense: their rows see all keys, their keys are kept by every row as blocks of their own.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from ..autocast import without_autocast
from ..block_sparse import block_sparse_attention, choose_backend
from .budgets import check_budgets
from .centroids import add_centroids, add_skipped_fused
from .checks import check_arguments, check_custom_order
from .custom import CustomSelection
from .fused import fuses, gather_with_means, gather_with_statistics, scatter_tokens
from .fused_selection import list_blocks_by_head, list_blocks_fused, score_blocks_fused, selects
from .ordering import Grid, Orders, TokenOrders, gather_tokens, token_orders
from .scores import score_blocks
from .selection import block_mask, kept_video_blocks, select_blocks, select_blocks_top_p, skipped_blocks
from .statistics import BlockStatistics

__all__ = ["BAAttInfo", "ba_attention"]


class BAAttInfo(NamedTuple):
    """What one call computed. Counts are int64 scalars on the device of the inputs (no synchronisation), over B and H.

    Attributes:
        block_index: int32 (B, H, Nq, K), kept blocks of the ordered video keys per block of ordered video queries.
        block_count: int32 (B, H, Nq), valid entries of `block_index`; `None` means all K.
        kept_pairs: pairs of (query block, key block) computed, text blocks included.
        total_pairs: all such pairs.
        kept_token_pairs: pairs of (query, key) computed.
        total_token_pairs: all such pairs.
        backend: name of the attention backend that ran.
        query_order: int64 (L,) or (B, H, L), video token at each place of the ordered queries; `None` for raster order.
        key_order: the same for the keys, (L,) or (B, Hkv, L).
    """

    block_index: torch.Tensor
    block_count: torch.Tensor | None
    kept_pairs: torch.Tensor
    total_pairs: torch.Tensor
    kept_token_pairs: torch.Tensor
    total_token_pairs: torch.Tensor
    backend: str
    query_order: torch.Tensor | None
    key_order: torch.Tensor | None


@without_autocast
def ba_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    grid_thw: Grid | None = None,
    orders: Orders,
    density: float,
    block_size: int = 128,
    beta: float = 0.5,
    center_keys: bool = True,
    log_count: bool = True,
    descending: bool = True,
    window: int | None = None,
    second_order: bool = True,
    compensate: Literal["none", "centroid"] = "none",
    score: Literal["moments", "residual", "halfk"] = "moments",
    top_p: float | None = None,
    min_density: float = 0.0,
    text_prefix: int = 0,
    text_suffix: int = 0,
    scale: float | None = None,
    backend: str = "auto",
    return_info: bool = False,
    timer: Callable[[str], AbstractContextManager[object]] | None = None,
    custom: CustomSelection | None = None,
    budgets: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, BAAttInfo]:
    """Attend to the key blocks that block moments predict to matter (BA-Att).

    The method of the paper is `orders="norm_sort", descending=False, beta=1.0, center_keys=False, log_count=False`,
    with `second_order` on in the layers that take its covariance term. Works inside `torch.compile(fullgraph=True)`;
    with `orders` as a tensor, other values run the same graph. Deterministic on one device, bit for bit. Autocast
    changes nothing: scores stay fp32, the attention is that of the dtype of the inputs.

    NaN in the inputs is not looked for. A row whose query or whose kept keys hold NaN is NaN in the output; a NaN
    anywhere in a head makes the selection of the rows that it reaches arbitrary, but always valid.

    Args:
        query: (B, H, L, D) after RoPE, fp32, bf16 or fp16, any strides.
        key: (B, Hkv, L, D) after RoPE, H a multiple of Hkv.
        value: (B, Hkv, L, D).
        grid_thw: (frames, height, width) of the video tokens; `None` allows the orders `raster` and `norm_sort` only.
        orders: token order, one name for all heads or one id per query head; see `token_orders`.
        density: share of key blocks that each query block keeps, in (0, 1]: floor(density * N + 1/2), at least 1.
            Text blocks count; at least one video block is kept beside them.
        block_size: tokens per block.
        beta: weight of the second-order term; what the preset takes is `BAAttConfig.second_order_weight`.
        center_keys: take the mean key out of the second-order term.
        log_count: add the log of the block's token count to its score.
        descending: sorts start at the largest norm.
        window: tokens per sorting window of `hilbert_window`; see `token_orders`.
        second_order: `False` scores by pooled means alone.
        compensate: "centroid" adds each skipped block as one key and one value, its means, weighted by its token count.
        score: "moments" (free), "residual" (free: what `compensate="centroid"` would miss; not with `top_p`) or "halfk"
            (exact on the key side, 1 / (2 block_size) of dense attention).
        top_p: keep the fewest blocks whose predicted mass reaches this share, in (0, 1], with `density` as upper and
            `min_density` as lower bound; `None` keeps the same number everywhere.
        min_density: lower bound of the share kept with `top_p`, in [0, density].
        text_prefix: text tokens before the video tokens.
        text_suffix: text tokens after the video tokens.
        scale: factor of the logits, default 1 / sqrt(D).
        backend: backend of `block_sparse_attention`.
        return_info: also return `BAAttInfo`.
        timer: gives a context manager to run a part of the call in: "selection" (order to selection; again to undo the
            order) or "attention". Eager mode only.
        custom: an order or a selection in place of the method's own; a selection not with `top_p`.
        budgets: int64 or int32 (H,) on the CPU, video blocks in [1, N] that each query block of a head keeps, in place
            of the number that `density` gives, text blocks beside them; `None` keeps that number in all heads. Not with
            `top_p` or a custom selection. Other values run the same compiled graph; in eager mode equal ones are as
            fast as `None`.

    Returns:
        (B, H, L, D) in the dtype of `query`, and `BAAttInfo` if asked for.

    Raises:
        UserInputError: an argument has a wrong type or is out of its range, or shapes do not fit.
        BackendUnavailableError: the named backend cannot run here.
    """
    check_arguments(
        query,
        key,
        value,
        grid_thw=grid_thw,
        orders=orders,
        density=density,
        block_size=block_size,
        beta=beta,
        center_keys=center_keys,
        log_count=log_count,
        descending=descending,
        window=window,
        second_order=second_order,
        compensate=compensate,
        score=score,
        top_p=top_p,
        min_density=min_density,
        text_prefix=text_prefix,
        text_suffix=text_suffix,
        scale=scale,
        backend=backend,
        return_info=return_info,
        timer=timer,
        custom=custom,
        budgets=budgets,
    )
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    stage = nullcontext if timer is None else timer
    num_text = text_prefix + text_suffix
    video = slice(text_prefix, query.shape[2] - text_suffix)
    video_query, video_key, video_value = query[:, :, video], key[:, :, video], value[:, :, video]
    chosen = choose_backend(query, key, block_size=block_size, backend=backend).name
    differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    fused = chosen not in ("torch", "reference") and not differentiable and fuses(query, block_size)

    with stage("selection"):
        if custom is not None and custom.order is not None:
            order = custom.order(video_query.detach(), video_key.detach(), grid_thw)
            check_custom_order(order, video_query, video_key)
        else:
            order = token_orders(
                video_query.detach(),
                video_key.detach(),
                grid_thw=grid_thw,
                orders=orders,
                block_size=block_size,
                window=window,
                descending=descending,
                fused=fused,
            )
        q, query_stats = gather_with_statistics(video_query, order.query, block_size, fused=fused)
        k, key_stats = gather_with_statistics(video_key, order.key, block_size, fused=fused)
        if compensate == "centroid":
            v, value_mean = gather_with_means(video_value, order.key, block_size, fused=fused)
        else:
            v = gather_tokens(video_value, order.key)
        num_key, text_blocks = key_stats.size.shape[0], -(-num_text // block_size)
        kept = kept_video_blocks(num_key, text_blocks, density)
        if budgets is not None and (alike := _equal_budget(budgets, num_key)) is not None:
            kept, budgets = alike, None
        block_count = skipped = skipped_count = None
        if custom is not None and custom.select is not None:
            block_index, block_count = custom.select(
                q.detach(), k.detach(), kept=kept, block_size=block_size, scale=scale
            )
        else:
            how: dict[str, Any] = {
                "beta": beta,
                "center_keys": center_keys,
                "second_order": second_order,
                "scale": scale,
            }
            how["log_count"] = log_count or top_p is not None
            if fused and score != "halfk":
                scores = score_blocks_fused(score, query_stats, key_stats, **how)
            else:
                scores = score_blocks(score, query_stats, key_stats, k.detach(), block_size, **how)
            if budgets is not None:
                block_index, block_count, skipped, skipped_count = list_blocks_by_head(
                    scores,
                    budgets,
                    return_skipped=fused and compensate == "centroid",
                    fused=fused and selects(scores.shape[-1]),
                )
            elif top_p is None and fused and selects(scores.shape[-1]):
                block_index, skipped = list_blocks_fused(scores, kept, return_skipped=compensate == "centroid")
            elif top_p is None:
                block_index = select_blocks(scores, kept)
            else:
                fewest = min(kept, kept_video_blocks(num_key, text_blocks, min_density))
                block_index, block_count = select_blocks_top_p(scores, top_p, min_blocks=fewest, max_blocks=kept)

    # The kernel that compensates is the last one, unless text joins: it can write to where the tokens came from.
    compensated_in_place = fused and compensate == "centroid" and not num_text
    attend = partial(_attend, block_size=block_size, scale=scale, backend=backend)
    with stage("attention"):
        if compensate == "none" and not num_text:
            out, _ = attend(q, k, v, block_index, block_count, return_lse=False)
        else:
            out, lse = attend(q, k, v, block_index, block_count)
            del k, v  # copies in their order: the compensation asks for memory, and needs their means alone
            if compensate == "centroid" and fused:
                if skipped is None:
                    skipped, skipped_count = skipped_blocks(block_index, block_count, num_key)
                perm = order.query if compensated_in_place else None
                others = (key_stats.mean, value_mean, skipped, skipped_count)
                out, lse = add_skipped_fused(out, lse, q, *others, perm, block_size=block_size, scale=scale)
            elif compensate == "centroid":
                kept_mask = block_mask(block_index, block_count, num_key)
                inputs = (out, lse, q, key_stats.mean, value_mean, key_stats.size, kept_mask)
                out, lse = add_centroids(*inputs, block_size=block_size, scale=scale)
            if num_text:
                text_key, text_value = (_text_tokens(x, text_prefix, text_suffix) for x in (key, value))
                every = torch.arange(-(-num_text // block_size), dtype=torch.int32, device=q.device)
                every = every.expand(*block_index.shape[:3], -1).contiguous()
                out, _ = _merge(out, lse, *attend(q, text_key, text_value, every, None))
    if not compensated_in_place:
        with stage("selection"):
            out = scatter_tokens(out, order.query, fused=fused)
    if num_text:
        with stage("attention"):
            rows = torch.nn.functional.scaled_dot_product_attention(
                _text_tokens(query, text_prefix, text_suffix),
                key,
                value,
                scale=scale,
                enable_gqa=key.shape[1] != query.shape[1],
            )
            out = torch.cat([rows[:, :, :text_prefix], out, rows[:, :, text_prefix:]], dim=2)
    if not return_info:
        return out
    return out, _info(
        block_index, block_count, query_stats, key_stats, query.shape, num_text, block_size, chosen, order
    )


def _equal_budget(budgets: torch.Tensor, num_key: int) -> int | None:
    """The number that all heads keep, `None` where they differ or values cannot be seen, as in compiled code."""
    if torch.compiler.is_compiling():
        return None
    values = budgets.tolist()
    check_budgets(values, num_key)
    return values[0] if len(set(values)) == 1 else None


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_index: torch.Tensor,
    block_count: torch.Tensor | None,
    *,
    block_size: int,
    scale: float,
    backend: str,
    return_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`block_sparse_attention` as a pair; the log-sum-exp is empty if not asked for."""
    result = block_sparse_attention(
        query,
        key,
        value,
        block_index,
        block_count,
        block_size=block_size,
        scale=scale,
        backend=backend,
        return_lse=return_lse,
    )
    return result if isinstance(result, tuple) else (result, query.new_empty(0))


def _text_tokens(tokens: torch.Tensor, prefix: int, suffix: int) -> torch.Tensor:
    length = tokens.shape[2]
    return torch.cat([tokens[:, :, :prefix], tokens[:, :, length - suffix :]], dim=2)


def _merge(
    out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Join attention over two disjoint sets of keys; (B, H, L, D) and natural log-sum-exp (B, H, L) of each."""
    total = torch.logaddexp(lse, other_lse)
    mixed = out * (lse - total).exp()[..., None] + other * (other_lse - total).exp()[..., None]
    return mixed.to(out.dtype), total


def _info(
    block_index: torch.Tensor,
    block_count: torch.Tensor | None,
    query_stats: BlockStatistics,
    key_stats: BlockStatistics,
    shape: torch.Size,
    num_text: int,
    block_size: int,
    backend: str,
    order: TokenOrders,
) -> BAAttInfo:
    batch, heads, length, _ = shape
    num_query, num_key, most = block_index.shape[2], key_stats.size.shape[0], block_index.shape[-1]
    count = torch.full_like(block_index[..., 0], most) if block_count is None else block_count
    # Only the last block is short, and an ascending list holds it last if at all.
    last = block_index.gather(-1, (count[..., None] - 1).long().clamp(min=0))[..., 0]
    missing = num_key * block_size - (length - num_text)
    tokens = count.long() * block_size - (last == num_key - 1) * missing
    video_rows, text_blocks = length - num_text, -(-num_text // block_size)
    kept_tokens = (tokens * query_stats.size.long()).sum() + batch * heads * num_text * (video_rows + length)
    kept_pairs = count.sum() + batch * heads * text_blocks * (num_query + num_key + text_blocks)
    total_pairs = batch * heads * (num_query + text_blocks) * (num_key + text_blocks)
    return BAAttInfo(
        block_index=block_index,
        block_count=block_count,
        kept_pairs=kept_pairs,
        total_pairs=torch.full_like(kept_pairs, total_pairs),
        kept_token_pairs=kept_tokens,
        total_token_pairs=torch.full_like(kept_pairs, batch * heads * length * length),
        backend=backend,
        query_order=order.query,
        key_order=order.key,
    )
