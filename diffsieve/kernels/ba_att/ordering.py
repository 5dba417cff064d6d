"""Step 1 of BA-Att: which token sits where before the sequence is cut into blocks.

Shapes: B batch, H query heads, Hkv key heads (H a multiple of Hkv), L tokens, D channels. A permutation `perm` means
`ordered[i] = tokens[perm[i]]`. It is `None` (identity), `(L,)` (one for all heads) or `(B, H, L)`.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from diffsieve.errors import UserInputError, refuse

from ..checks import check_4d
from ..custom_ops import custom_op
from ..orders import check_grid, frame_hilbert_order, hilbert_order, inverse_order, raster_order
from . import forms
from .norm_sort import mean_key, sort_keys, sort_windows, token_norms

__all__ = ["CANDIDATE_ORDERS", "TokenOrders", "default_window", "gather_tokens", "token_orders", "undo_order"]

CANDIDATE_ORDERS = ("raster", "frame_hilbert", "hilbert", "hilbert_window", "norm_sort")
"""Names of the orders; the index is the id in order tables, and an earlier one is cheaper."""

_WINDOW, _NORM_SORT = CANDIDATE_ORDERS.index("hilbert_window"), CANDIDATE_ORDERS.index("norm_sort")
_MAX_COUNTED_WINDOW = 8_192
NEEDS_GRID = ("frame_hilbert", "hilbert", "hilbert_window")

Grid = tuple[int, int, int]
Orders = str | Sequence[int | str] | torch.Tensor


class TokenOrders(NamedTuple):
    """Permutations of the queries and of the keys: `None`, `(L,)` or `(B, H, L)` int64."""

    query: torch.Tensor | None
    key: torch.Tensor | None


def default_window(num_tokens: int, block_size: int) -> int:
    """Return the sorting window: 3 % of the tokens in whole blocks, at least two (one block alone gains nothing)."""
    return block_size * max(2, int(0.03 * num_tokens / block_size + 0.5))


def token_orders(
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    grid_thw: Grid | None = None,
    orders: Orders,
    block_size: int = 128,
    window: int | None = None,
    descending: bool = True,
    fused: bool = False,
) -> TokenOrders:
    """Build the permutations of queries and keys.

    `raster`, `frame_hilbert` and `hilbert` depend on the grid alone. `hilbert_window` walks the 3-D Hilbert curve and
    sorts the keys of every window of that walk by their distance from the mean key; queries stay on the curve.
    `norm_sort` sorts queries and keys, each by its norm, over the whole sequence (Eq. 9 and 10 of the paper). Sorts
    compare fp32 norms and are stable: equal norms keep the order of the base sequence. A NaN counts as the largest.

    Args:
        query: (B, H, Lq, D), after RoPE.
        key: (B, Hkv, Lk, D), after RoPE.
        grid_thw: (frames, height, width) with product L; may be `None` for `raster` and `norm_sort`.
        orders: one name of `CANDIDATE_ORDERS` for all heads; or per query head an id, as int tensor (H,) or as a
            sequence of ids or names. A name (or equal entries in a sequence) is the fast path: it gathers no more than
            it must. The values of a tensor are data: other values need no recompilation. Keep the tensor on the CPU,
            wherever the tokens are: its values are then read without waiting for the device, and only heads whose order
            depends on their tokens are sorted. On another device they cannot be seen, so that all heads are sorted.
        block_size: tokens per block.
        window: tokens per sorting window, a multiple of `block_size`; `None` for `default_window`.
        descending: sort from the largest norm down, so that a short last block holds the coldest keys.
        fused: order windows by Triton kernels where these are faster; see `fused.fuses`.

    Returns:
        `TokenOrders`; with a tensor of ids both permutations are (B, H, L).

    Raises:
        UserInputError: an argument has a wrong type or is out of its range, or shapes do not fit. Ids of a tensor are
            looked at on a CPU alone, by compiled code when it runs.
    """
    orders = normalise_orders(orders)
    _check_orders(query, key, grid_thw, orders, block_size, window)
    length = key.shape[2]
    window = default_window(length, block_size) if window is None else window
    if isinstance(orders, str):
        return _uniform_orders(query, key, grid_thw, orders, window, descending, fused)
    return _per_head_orders(query, key, grid_thw, orders, window, descending, fused)


def gather_tokens(tokens: torch.Tensor, perm: torch.Tensor | None) -> torch.Tensor:
    """Reorder tokens per head.

    Args:
        tokens: (B, Hkv, L, D), any strides.
        perm: `None`, (M,) or (B, H, M) int64 with H a multiple of Hkv; query head h reads key head h // (H / Hkv).

    Returns:
        (B, H, M, D); `tokens` itself when `perm` is `None`.
    """
    if perm is None:
        return tokens
    batch, heads, length, dim = tokens.shape
    # Whole rows are copied from a flat (rows, D) view: several times faster on a CPU than a gather per element.
    by_head = tokens.is_contiguous()
    rows = (tokens if by_head else tokens.transpose(1, 2)).reshape(-1, dim)
    out_heads = perm.shape[1] if perm.dim() == 3 else heads
    source = torch.arange(out_heads, device=perm.device) // (out_heads // heads)
    item = torch.arange(batch, device=perm.device)[:, None]
    first = (item * heads + source) * length if by_head else item * (length * heads) + source  # (B, H)
    index = first[:, :, None] + (perm if by_head else perm * heads)
    return rows.index_select(0, index.flatten()).unflatten(0, (batch, out_heads, perm.shape[-1]))


def undo_order(tokens: torch.Tensor, perm: torch.Tensor | None) -> torch.Tensor:
    """Put tokens back: `undo_order(gather_tokens(x, perm), perm)` is `x`, bit for bit."""
    return tokens if perm is None else gather_tokens(tokens, inverse_order(perm))


def normalise_orders(orders: Orders) -> str | torch.Tensor:
    """Reduce `orders` to a name (all heads alike) or an id tensor (H,)."""
    if isinstance(orders, str | torch.Tensor):
        return orders
    if not isinstance(orders, Sequence):
        raise UserInputError(f"orders must be a name, a tensor of ids, or a sequence of either, got {orders!r}")
    names = [order if isinstance(order, str) else CANDIDATE_ORDERS[order] for order in _checked_entries(orders)]
    if len(set(names)) == 1:
        return names[0]
    return torch.tensor([CANDIDATE_ORDERS.index(name) for name in names], device="cpu")


def _checked_entries(orders: Sequence[int | str]) -> Sequence[int | str]:
    valid = {*CANDIDATE_ORDERS, *range(len(CANDIDATE_ORDERS))}
    for order in orders:
        if type(order) not in (int, str) or order not in valid:
            raise UserInputError(f"orders must hold names of {CANDIDATE_ORDERS} or their ids, got {order!r}")
    if not orders:
        raise UserInputError("orders must hold one entry per head, got none")
    return orders


def _check_orders(
    query: torch.Tensor,
    key: torch.Tensor,
    grid_thw: Grid | None,
    orders: str | torch.Tensor,
    block_size: int,
    window: int | None,
) -> None:
    check_4d(("query", query), ("key", key))
    batch, heads, _, dim = query.shape
    key_batch, key_heads, _, key_dim = key.shape
    if (key_batch, key_dim) != (batch, dim) or heads % key_heads:
        refuse("key", f"of shape ({batch}, a divisor of {heads}, Lk, {dim})", tuple(key.shape))
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
        refuse("block_size", "a whole number >= 1", repr(block_size))
    if window is not None and (isinstance(window, bool) or not isinstance(window, int)):
        refuse("window", "a whole number of tokens or None", repr(window))
    if window is not None and (window < 1 or window % block_size):
        raise UserInputError(f"window must be a positive multiple of block_size ({block_size}), got {window}")
    if isinstance(orders, str):
        if orders not in CANDIDATE_ORDERS:
            raise UserInputError(f"orders must be one of {CANDIDATE_ORDERS}, got {orders!r}")
        if grid_thw is None and orders in NEEDS_GRID:
            raise UserInputError(f"grid_thw must be given for the order {orders!r}, got None")
    else:
        if orders.shape != (query.shape[1],) or orders.is_floating_point() or orders.dtype is torch.bool:
            expected = f"an integer tensor of shape ({query.shape[1]},), one id per query head"
            raise UserInputError(f"orders must be {expected}, got {orders.dtype} of shape {tuple(orders.shape)}")
        if query.shape[2] != key.shape[2]:
            lengths = f"query {query.shape[2]} and key {key.shape[2]}"
            raise UserInputError(f"orders per head need as many queries as keys, got {lengths} tokens")
        if orders.device.type == "meta" != query.device.type:
            raise UserInputError("orders must hold values, got a tensor on the device meta")
    if grid_thw is not None:
        product = math.prod(check_grid(grid_thw))
        for name, tokens in (("query", query), ("key", key)):
            if tokens.shape[2] != product:
                raise UserInputError(
                    f"grid_thw must have as many points as {name} has tokens ({tokens.shape[2]}), "
                    f"got {tuple(grid_thw)} with {product}"
                )


def _uniform_orders(
    query: torch.Tensor,
    key: torch.Tensor,
    grid_thw: Grid | None,
    order: str,
    window: int,
    descending: bool,
    fused: bool,
) -> TokenOrders:
    if order == "raster":
        return TokenOrders(None, None)
    if order == "norm_sort":
        by_norm = [sort_windows(token_norms(x), x.shape[2], descending) for x in (query, key)]
        return TokenOrders(by_norm[0], by_norm[1])
    base = _order_table(grid_thw, key.shape[2], key.device)[CANDIDATE_ORDERS.index(order)]
    if order != "hilbert_window":
        return TokenOrders(base, base)
    return TokenOrders(base, _window_order(key, base, window, descending, fused))


def _per_head_orders(
    query: torch.Tensor,
    key: torch.Tensor,
    grid_thw: Grid | None,
    orders: torch.Tensor,
    window: int,
    descending: bool,
    fused: bool,
) -> TokenOrders:
    length = query.shape[2]
    frames, height, width = (0, 0, length) if grid_thw is None else grid_thw
    perms = _head_orders_op(query, key, orders, frames, height, width, window, descending, fused)
    return TokenOrders(*perms.unbind(0))


# An operation of its own, opaque to the compiler: what it does depends on the values of `orders`, and other values must
# not mean another graph. Nor a CUDA graph, which would repeat the ids that it was recorded with: the tag keeps inductor
# from recording it.
@custom_op("diffsieve::head_orders", tags=(torch.Tag.cudagraph_unsafe,))
def _head_orders_op(
    query: torch.Tensor,
    key: torch.Tensor,
    orders: torch.Tensor,
    frames: int,
    height: int,
    width: int,
    window: int,
    descending: bool,
    fused: bool,
) -> torch.Tensor:
    """Permutations of the queries and of the keys, (2, B, H, L), contiguous."""
    table = _table(frames, height, width, key.device)
    if orders.device.type == "cpu":  # reading it makes nobody wait; elsewhere a wrong id fails on the device
        ids = orders.tolist()
        allowed = [i for i, name in enumerate(CANDIDATE_ORDERS) if frames or name not in NEEDS_GRID]
        wrong = [order for order in ids if order not in allowed]
        if wrong:
            of_grid = (frames, height, width) if frames else None
            raise UserInputError(f"orders must hold ids of {allowed} (grid_thw={of_grid}), got {wrong[0]}")
        return _sort_known_heads(query, key, ids, table, window, descending, fused)
    return _sort_all_heads(query, key, orders, table, window, descending)


@torch.library.register_fake("diffsieve::head_orders")
def _(query: torch.Tensor, *_: object) -> torch.Tensor:
    return query.new_empty((2, *query.shape[:3]), dtype=torch.int64)


def _sort_known_heads(
    query: torch.Tensor,
    key: torch.Tensor,
    orders: list[int],
    table: torch.Tensor,
    window: int,
    descending: bool,
    fused: bool,
) -> torch.Tensor:
    """Sort the heads whose order depends on their tokens, and no others, those of one order in one sort."""
    batch, heads, length = query.shape[:3]
    group = heads // key.shape[1]
    # Rows are taken and put together without an index tensor, which would have to be sent to the device.
    rows = table.unbind(0)
    query_rows = [rows[order].expand(batch, length) for order in orders]
    key_rows = list(query_rows)
    windowed, by_norm = ([head for head, order in enumerate(orders) if order == kind] for kind in (_WINDOW, _NORM_SORT))
    if windowed:
        keys = torch.stack([key[:, head // group] for head in windowed], dim=1)
        found = _window_order(keys, rows[_WINDOW], window, descending, fused)
        for head, row in zip(windowed, found.unbind(1), strict=True):
            key_rows[head] = row
    if by_norm:
        tokens = [query[:, head] for head in by_norm] + [key[:, head // group] for head in by_norm]
        sorts = sort_windows(token_norms(torch.stack(tokens, dim=1)), length, descending).unbind(1)
        for number, head in enumerate(by_norm):
            query_rows[head], key_rows[head] = sorts[number], sorts[len(by_norm) + number]
    perms = table.new_empty((2, batch, heads, length))
    torch.stack(query_rows, dim=1, out=perms[0])
    torch.stack(key_rows, dim=1, out=perms[1])
    return perms


def _sort_all_heads(
    query: torch.Tensor, key: torch.Tensor, orders: torch.Tensor, table: torch.Tensor, window: int, descending: bool
) -> torch.Tensor:
    """Sort every head, in windows of one token where its order is static: nothing is read from the device."""
    batch, heads, length = query.shape[:3]
    orders = orders.to(device=key.device, dtype=torch.int64)
    base = table[orders].expand(2, batch, heads, length)
    is_window, is_sort = (orders == _WINDOW)[:, None], (orders == _NORM_SORT)[:, None]
    if key.shape[1] != heads:
        key = key.repeat_interleave(heads // key.shape[1], dim=1)
    # The norm is taken from the mean key in window heads and from the origin in norm_sort heads.
    centre = torch.where(is_window[..., None], mean_key(key), 0)
    norms = torch.stack([token_norms(query), token_norms(key, centre)]).gather(-1, base)
    query_window = torch.where(is_sort, length, 1)
    key_window = torch.where(is_window, window, query_window)
    number = torch.arange(length, device=key.device) // torch.stack([query_window, key_window])[:, None]
    # One integer key does it: the number of the window in the high half.
    keys = (number << 32) | sort_keys(norms, descending).long()
    return base.gather(-1, torch.sort(keys, dim=-1, stable=True).indices)


def _window_order(key: torch.Tensor, curve: torch.Tensor, window: int, descending: bool, fused: bool) -> torch.Tensor:
    """The curve (L,) with the keys of every window sorted by their distance from the mean key, (B, H, L)."""
    # Every token of a window is compared with all others of it: not for windows of any size.
    if fused and window <= _MAX_COUNTED_WINDOW:
        found: torch.Tensor = _window_order_op(key, mean_key(key), curve, window, descending)
        return found
    return curve[sort_windows(token_norms(key, mean_key(key)).index_select(-1, curve), window, descending)]


@custom_op("diffsieve::window_order")
def _window_order_op(
    key: torch.Tensor, centre: torch.Tensor, curve: torch.Tensor, window: int, descending: bool
) -> torch.Tensor:
    from .windows_triton import window_orders_triton

    return window_orders_triton(key, centre, curve, window, descending=descending, tile=forms.FORMS.windows)


@torch.library.register_fake("diffsieve::window_order")
def _(key: torch.Tensor, centre: torch.Tensor, curve: torch.Tensor, *_: object) -> torch.Tensor:
    return curve.new_empty(key.shape[:3])


def _order_table(grid_thw: Grid | None, length: int, device: torch.device) -> torch.Tensor:
    """Base permutation of every candidate, (5, L) int64 on `device`."""
    frames, height, width = (0, 0, length) if grid_thw is None else grid_thw
    return _order_table_op(frames, height, width, device)


# An operation of its own: a compiled caller then holds one opaque node instead of a traced Hilbert curve.
@custom_op("diffsieve::token_order_table")
def _order_table_op(frames: int, height: int, width: int, device: torch.device) -> torch.Tensor:
    return _table(frames, height, width, device).clone()


@torch.library.register_fake("diffsieve::token_order_table")
def _(frames: int, height: int, width: int, device: torch.device) -> torch.Tensor:
    length = frames * height * width if frames else width
    return torch.empty((len(CANDIDATE_ORDERS), length), dtype=torch.int64, device=device)


# Tables that captured CUDA graphs read at every replay: never freed.
_captured_tables: dict[tuple[int, int, int, torch.device], torch.Tensor] = {}


def _table(frames: int, height: int, width: int, device: torch.device) -> torch.Tensor:
    """Return the table of `_order_table` itself, made once per grid as long as that is among the latest eight."""
    key = frames, height, width, device
    table = _captured_tables.get(key)
    if table is None:
        table = _cached_table(*key)
        if _is_capturing(device):
            _captured_tables[key] = table
    return table


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@lru_cache(maxsize=8)
def _cached_table(frames: int, height: int, width: int, device: torch.device) -> torch.Tensor:
    if frames:
        grid = (frames, height, width)
        raster, frame, curve = raster_order(grid), frame_hilbert_order(grid), hilbert_order(grid)
    else:  # no grid: the rows that need one point past the end, so that using them fails instead of passing for raster
        raster = torch.arange(width, device="cpu")
        frame = curve = torch.full((width,), width, device="cpu")
    return torch.stack([raster, frame, curve, curve, raster]).to(device)
