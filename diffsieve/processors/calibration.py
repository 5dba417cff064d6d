"""The table (layer, head) -> token order, level of budget: chosen from errors, read from a dict or file, written."""

import json
import os
from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch

from ..errors import UserInputError, os_reason
from ..kernels.ba_att import CANDIDATE_ORDERS, LEVELS, choose_budgets, choose_orders

# Used where nothing could be measured: no warm-up, or a layer that the calibrating step skipped.
FALLBACK_ORDER = "frame_hilbert"

_FORMAT = "diffsieve-orders"
# With budgets, which a reader of version 1 would leave out, and without.
_VERSION, _VERSION_OF_ORDERS = 2, 1

LayerOrders = dict[str, tuple[int, ...]]
LayerLevels = dict[str, tuple[int, ...]]


def choose_all_orders(errors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the order of every head from the sums of its calibrating calls.

    Args:
        errors: (layers, H, C + 1), errors of the C candidates summed over the calls, then the number of calls.

    Returns:
        (layers, H) int64 order ids; (layers,) bool, True where the layer was measured. Unmeasured layers get the
        fallback order.
    """
    layers, heads, _ = errors.shape
    calls = errors[..., -1:]
    chosen = choose_orders((errors[..., :-1] / calls.clamp(min=1)).flatten(0, 1)).view(layers, heads)
    measured = calls[:, 0, 0] > 0
    fallback = torch.full_like(chosen, CANDIDATE_ORDERS.index(FALLBACK_ORDER))
    return torch.where(measured[:, None], chosen, fallback), measured


def choose_all_budgets(errors: torch.Tensor, kept: int, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the level (see `LEVELS`) of every head from the sums of its calibrating calls.

    Args:
        errors: (layers, H, 3), the errors of `calibrate_budgets` summed over the calls, then the number of calls.
        kept: blocks of every head at equal budgets.
        num_blocks: blocks of the video.

    Returns:
        On the CPU: (layers, H) int64 levels; (layers,) bool, True where the layer was measured. Others get level 0.
    """
    calls = errors[..., -1:]
    levels = choose_budgets(errors[..., :-1] / calls.clamp(min=1), kept, num_blocks)
    measured = (calls[:, 0, 0] > 0).cpu()
    return torch.where(measured[:, None], levels, 0), measured


def order_names(ids: Sequence[int]) -> tuple[str, ...]:
    """Return the names of order ids."""
    return tuple(CANDIDATE_ORDERS[i] for i in ids)


def read_orders(source: str | PathLike[str] | Mapping[str, Any], transformer: str) -> Mapping[str, Any]:
    """Return the raw table (layer -> orders of its heads) of one transformer from `BAAttConfig.orders`.

    Args:
        source: Path of a file from `save_orders`; or a dict, (layer -> orders), or (transformer -> layer -> orders).
        transformer: Name of the transformer, "transformer" or "transformer_2".

    Raises:
        UserInputError: no such file, not such a file, or no table for this transformer.
    """
    if isinstance(source, Mapping):
        tables = source if all(isinstance(value, Mapping) for value in source.values()) else {"transformer": source}
    else:
        tables = _read_file(fspath(source))
    if not isinstance(tables.get(transformer), Mapping):
        raise UserInputError(f"orders must have a table for {transformer}, got {', '.join(map(str, tables)) or 'none'}")
    return tables[transformer]


def read_levels(source: str | PathLike[str] | Mapping[str, Any], transformer: str) -> Mapping[str, Any] | None:
    """Return the raw table (layer -> levels of its heads) of one transformer, `None` where it has equal budgets.

    Args:
        source: as in `read_orders`; a dict holds no levels.
        transformer: Name of the transformer.
    """
    if isinstance(source, Mapping):
        return None
    table = _read_content(fspath(source)).get("budgets")
    if table is None:
        return None
    if not isinstance(table, Mapping) or not all(isinstance(value, Mapping) for value in table.values()):
        raise UserInputError(
            f"orders: the budgets in {fspath(source)} must hold a table for each transformer, got {table!r}"
        )
    found: Mapping[str, Any] | None = table.get(transformer)
    return found


def check_levels(table: Mapping[str, Any], layers: Mapping[str, int], optional: set[str]) -> LayerLevels:
    """Validate a raw table of levels against a model; arguments and errors as `check_orders`."""
    table = _by_name(table)
    unknown = [name for name in table if name not in layers]
    if unknown:
        raise UserInputError(f"budgets has a layer {unknown[0]!r}, which must be among {', '.join(layers)}")
    for name, levels in table.items():
        heads = layers[name]
        whole = isinstance(levels, list) and all(type(level) is int and level in LEVELS for level in levels)
        if not whole or len(levels) != heads or sum(levels) != 0:
            raise UserInputError(
                f"budgets of {name} must be a list with one whole number in [{LEVELS[0]}, {LEVELS[-1]}] per head "
                f"({heads}), 0 in total, got {levels!r}"
            )
    missing = [name for name in layers if name not in table and name not in optional]
    if missing:
        raise UserInputError(f"budgets must have an entry for every sparse layer, got none for {missing[0]!r}")
    return {name: tuple(levels) for name, levels in table.items()}


def check_orders(table: Mapping[str, Any], layers: Mapping[str, int], optional: set[str]) -> LayerOrders:
    """Validate a raw table against a model and return it with order ids.

    Args:
        table: (layer -> order names or ids of its heads). A layer is a name such as "blocks.3", or its number.
        layers: Number of heads by layer name.
        optional: Layers that may be missing (they always run dense).

    Raises:
        UserInputError: unknown or missing layer, wrong number of heads, unknown order.
    """
    named = _by_name(table)
    unknown = [name for name in named if name not in layers]
    if unknown:
        raise UserInputError(f"orders has a layer {unknown[0]!r} that the model does not have")
    missing = [name for name in layers if name not in named and name not in optional]
    if missing:
        raise UserInputError(f"orders must have an entry for every sparse layer, got none for {missing[0]!r}")
    return {name: _check_heads(name, orders, layers[name]) for name, orders in named.items()}


def _by_name(table: Mapping[str, Any]) -> dict[str, Any]:
    return {f"blocks.{key}" if str(key).isdigit() else str(key): value for key, value in table.items()}


def write_orders(
    path: str | PathLike[str],
    tables: Mapping[str, Mapping[str, Sequence[str]]],
    levels: Mapping[str, Mapping[str, Sequence[int]]] | None = None,
) -> None:
    """Write (transformer -> layer -> order names), and levels of budgets where there are some, whole or not at all.

    Raises:
        UserInputError: the folder does not exist, or the file cannot be written.
    """
    target = Path(path)
    content: dict[str, Any] = {"format": _FORMAT, "version": _VERSION_OF_ORDERS, "transformers": tables}
    if levels:
        content |= {"version": _VERSION, "budgets": levels}
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        try:
            temporary.write_text(json.dumps(content, indent=1), encoding="utf-8")
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise UserInputError(f"path must be a file that can be written, got {target}: {os_reason(error)}") from None


def _read_file(path: str) -> Mapping[str, Any]:
    tables = _read_content(path).get("transformers")
    if not isinstance(tables, dict):
        raise UserInputError(f"orders: {path} holds no tables")
    return tables


def _read_content(path: str) -> dict[str, Any]:
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserInputError(f"orders: no such file: {path}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserInputError(f"orders: cannot read {path} as JSON: {error}") from None
    known = (_VERSION_OF_ORDERS, _VERSION)
    if not isinstance(content, dict) or content.get("format") != _FORMAT or content.get("version") not in known:
        raise UserInputError(f"orders: {path} must be a file written by save_orders (version 1 or 2)")
    return content


def _check_heads(layer: str, orders: Any, heads: int) -> tuple[int, ...]:
    if isinstance(orders, str) or not isinstance(orders, Sequence) or len(orders) != heads:
        got = f"{len(orders)} entries" if isinstance(orders, Sequence) and not isinstance(orders, str) else repr(orders)
        raise UserInputError(f"orders of {layer} must be a list with one entry per head ({heads}), got {got}")
    ids = []
    for order in orders:
        if order in CANDIDATE_ORDERS:
            ids.append(CANDIDATE_ORDERS.index(order))
        elif isinstance(order, int) and not isinstance(order, bool) and 0 <= order < len(CANDIDATE_ORDERS):
            ids.append(order)
        else:
            raise UserInputError(
                f"orders of {layer} must be names out of {', '.join(CANDIDATE_ORDERS)} or their numbers, got {order!r}"
            )
    return tuple(ids)
