"""What the selections of all variants keep of the attention mass of captured queries and keys, head by head."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ..compare.claim import claim_settings
from ..compare.folder import check_writable, make_output
from ..compare.lines import line_writer, read_lines
from ..compare.report import versions
from ..compare.shards import Deadline, Shard
from ..compare.ticker import Ticker
from ..errors import UserInputError
from ..kernels.ba_att import (
    CANDIDATE_ORDERS,
    TokenOrders,
    ba_attention,
    budgets_of_levels,
    calibrate_budgets,
    calibrate_orders,
    choose_budgets,
    choose_orders,
    kept_blocks,
    token_orders,
)
from ..pipelines.loading import resolve_device
from ..processors import BAAttConfig
from ..processors.ba_att import kernel_arguments
from ..processors.warmup import dense_steps
from .bound import bound_and_deviation, correlation
from .captured import Captured, captured_files, read_captured, read_facts
from .mass import block_mass, kept_share
from .report import RECALL, RECALL_SCHEMA, RECALL_SETTINGS, write_report
from .variants import MEANING_OF_DEFAULT, VARIANTS, choose, config_of

# Orders in which the bound of the paper is compared: as it comes, and after its sort (ascending).
_BOUND_ORDERS = ("raster", "norm_sort")


@dataclass(frozen=True, kw_only=True)
class RecallConfig:
    """What to measure on captured tensors.

    Args:
        captures: folder of `diffsieve capture`.
        out: folder of the study.
        suites: sets of variants, names of `SUITES`.
        variants: further variants.
        sparsities: in place of those of the suites.
        warmup: dense steps that a sparse run would begin with; its last step calibrates, later ones are measured.
        block_size: tokens per block.
        backend: of the attention.
        device: where to compute; default: a GPU when there is one.
    """

    captures: Path
    out: Path = Path("outputs/study")
    suites: tuple[str, ...] = ("fidelity",)
    variants: tuple[str, ...] = ()
    sparsities: tuple[float, ...] = ()
    warmup: int | float = 0.2
    block_size: int = 128
    backend: str = "auto"
    device: str | None = None

    def __post_init__(self) -> None:
        BAAttConfig(block_size=self.block_size)  # which refuses what no variant takes


def study_recall(
    config: RecallConfig,
    *,
    shard: Shard | None = None,
    deadline: Deadline | None = None,
    progress: Callable[[str], None] | None = None,
    command: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Measure every variant on every captured call after the warm-up, one line each in `recall-<shard>.jsonl`.

    A line holds, head by head: the recall (share of the exact attention mass in the kept blocks), the error of the
    output (distance from dense attention over its norm), what the calibrating step promised of both, and the
    correlation of the paper's bound with the true deviation in raster order and after the norm sort.

    Args:
        config: see `RecallConfig`.
        shard: the share of this process, in clips times layers.
        deadline: ends the run between two captured calls.
        progress: told a line for each.
        command: the words of the command line, for the report.

    Returns:
        `{"out", "done", "missing", "other_shards_missing"}` in captured calls. With none missing the report is written.

    Raises:
        UserInputError: an argument is wrong, there is nothing to measure, or the folder holds other results.
    """
    shard, deadline = shard or Shard(), deadline or Deadline(None)
    chosen = choose(config.suites, config.variants, config.sparsities)
    pairs = [(name, sparsity) for name, sparsity in chosen if VARIANTS[name].watch is None]  # others watch a run
    device = resolve_device(config.device)
    check_writable(config.out)
    groups = _groups(config)
    make_output(config.out)
    settings = {
        "model": next(iter(groups.values())).model,
        "warmup": config.warmup,
        "block_size": config.block_size,
        "backend": config.backend,
        "pairs": [list(pair) for pair in pairs],
        **MEANING_OF_DEFAULT,
        "environment": {
            "versions": versions(),
            "device": device.type,
            "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        },
    }
    claim_settings(config.out / RECALL_SETTINGS, RECALL_SCHEMA, settings)
    wanted = {path.relative_to(config.captures).as_posix() for group in groups.values() for path in group.later}
    finished = _finished(config.out)
    mine = [group for _, group in shard.of(list(groups.items()))]
    own = {path.relative_to(config.captures).as_posix() for group in mine for path in group.later}
    ticker = Ticker(len(own - finished), progress)
    with line_writer(config.out / f"{RECALL}-{shard.index}.jsonl") as lines:
        for group in mine:
            calibration = _Calibration(group.calibrating, device, config.block_size)
            for path in group.later:
                name = path.relative_to(config.captures).as_posix()
                if name in finished or deadline.passed:
                    continue
                deadline.begin()
                captured = read_captured(path, device)
                lines.append({"file": name} | captured.facts | _measure(captured, config, pairs, calibration))
                deadline.end()
                ticker.tick(name)
    missing = wanted - _finished(config.out)
    if not missing:
        write_report(config.out, command=command)
    return {
        "out": str(config.out),
        "done": len(wanted) - len(missing),
        "missing": len(missing & own),
        "other_shards_missing": len(missing - own),
    }


@dataclass(frozen=True)
class _Group:
    """The captured calls of one layer in one clip: those of the calibrating step, and those after the warm-up."""

    model: str
    calibrating: tuple[Path, ...]
    later: tuple[Path, ...]


def _groups(config: RecallConfig) -> dict[tuple[str, int, str], _Group]:
    found: dict[tuple[str, int, str], list[tuple[Path, dict[str, Any]]]] = {}
    for path in captured_files(config.captures):
        facts = read_facts(path)
        found.setdefault((facts["prompt"], facts["seed"], facts["layer"]), []).append((path, facts))
    groups = {}
    for key, files in found.items():
        warm = _warm(config.warmup, files[0][1]["num_steps"])
        later = tuple(path for path, facts in files if facts["step"] >= warm)
        if later:
            calibrating = tuple(path for path, facts in files if facts["step"] == warm - 1)
            groups[key] = _Group(files[0][1]["model"], calibrating, later)
    if not groups:
        raise UserInputError(f"captures must hold steps after the warm-up ({config.warmup}), got none in the folder")
    return groups


def _warm(warmup: int | float, steps: int | None) -> int:
    if steps is None and isinstance(warmup, float):
        raise UserInputError("warmup must be a number of steps: the captured run did not know how many it had")
    return dense_steps(warmup, steps or 0)


@torch.no_grad()
def _measure(
    captured: Captured,
    config: RecallConfig,
    pairs: Sequence[tuple[str, float]],
    calibration: _Calibration,
) -> dict[str, Any]:
    query, key, value = captured.query, captured.key, captured.value
    dense = F.scaled_dot_product_attention(
        query, key, value, scale=captured.scale, enable_gqa=key.shape[1] != query.shape[1]
    ).float()
    masses = _Masses(captured, config.block_size)
    rows = []
    for name, sparsity in pairs:
        variant = VARIANTS[name]
        row: dict[str, Any] = {"variant": name, "sparsity": sparsity}
        rows.append(row)
        attention = config_of(
            variant,
            sparsity,
            num_layers=captured.num_layers,
            num_tokens=query.shape[2],
            warmup=config.warmup,
            block_size=config.block_size,
            backend=config.backend,
        )
        if isinstance(attention, str):
            row["skipped"] = attention
            continue
        if captured.number in {layer % captured.num_layers for layer in attention.dense_layers}:
            row["skipped"] = "the layer is dense"
            continue
        end = captured.number in (0, captured.num_layers - 1)
        selection, rest = kernel_arguments(attention, second_order=attention.second_order_in(end=end))
        selection["scale"] = captured.scale
        custom = None if variant.custom is None else variant.custom(captured.number)
        shares = attention.calibrates_budgets and custom is None
        if (attention.calibrates or shares) and not calibration.possible:
            row["skipped"] = "the step in which BA-Att calibrates was not captured"
            continue
        orders: Any = attention.order
        budgets = None
        if attention.calibrates:
            orders, predicted = calibration.of(attention, selection)
            row["orders"] = [CANDIDATE_ORDERS[i] for i in orders.tolist()]
            if not shares:  # what is predicted is that of equal ones
                row["predicted"] = {name: _numbers(values) for name, values in predicted.items()}
        if shares:
            budgets = calibration.budgets_of(attention, selection, orders)
            row["budgets"] = budgets.tolist()
        result = ba_attention(
            query,
            key,
            value,
            grid_thw=captured.grid_thw,
            orders=orders,
            custom=custom,
            budgets=budgets,
            return_info=True,
            **selection,
            **rest,
        )
        assert isinstance(result, tuple)
        out, info = result
        if custom is not None and custom.order is not None:
            mass = masses.of(custom.order(query, key, captured.grid_thw))
        else:
            mass = masses.of_orders(orders, attention)
        error = (out.float() - dense).norm(dim=(-1, -2)) / dense.norm(dim=(-1, -2))
        row["recall"] = _numbers(kept_share(mass, info.block_index, info.block_count).mean(0))
        row["error"] = _numbers(error.mean(0))
        row["density"] = int(info.kept_pairs) / int(info.total_pairs)
    return {"tokens": query.shape[2], "rows": rows, "bound": _bounds(captured, config.block_size)}


class _Masses:
    """Exact attention by block of one captured call, in each order once."""

    def __init__(self, captured: Captured, block_size: int) -> None:
        self._captured, self._block_size = captured, block_size
        self._found: dict[Any, torch.Tensor] = {}

    def of(self, order: TokenOrders) -> torch.Tensor:
        """(B, H, Nq, Nk) in the order given."""
        captured = self._captured
        return block_mass(captured.query, captured.key, order, block_size=self._block_size, scale=captured.scale)

    def of_orders(self, orders: str | torch.Tensor, attention: BAAttConfig) -> torch.Tensor:
        """The same for the name of an order, or ids by head."""
        if isinstance(orders, str):
            place = (orders, attention.window, attention.descending)
            if place not in self._found:
                captured = self._captured
                order = token_orders(
                    captured.query,
                    captured.key,
                    grid_thw=captured.grid_thw,
                    orders=orders,
                    block_size=self._block_size,
                    window=attention.window,
                    descending=attention.descending,
                )
                self._found[place] = self.of(order)
            return self._found[place]
        heads = [self.of_orders(CANDIDATE_ORDERS[i], attention)[:, head] for head, i in enumerate(orders.tolist())]
        return torch.stack(heads, dim=1)


class _Calibration:
    """Orders of the heads of one layer in one clip, as BA-Att finds them in the last dense step, and what they promise.

    Promised are the error that the calibration measured on its rows, and the recall of the chosen orders in that step.
    """

    def __init__(self, paths: Sequence[Path], device: torch.device, block_size: int) -> None:
        self._paths, self._device, self._block_size = paths, device, block_size
        self._found: dict[Any, tuple[torch.Tensor, dict[str, torch.Tensor]]] = {}
        self._budgets: dict[Any, torch.Tensor] = {}

    @property
    def possible(self) -> bool:
        """Whether that step was captured."""
        return bool(self._paths)

    def of(self, attention: BAAttConfig, selection: Mapping[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return orders (H,), and the "error" and "recall" (H,) promised; each computed once.

        Args:
            attention: settings of the variant.
            selection: its arguments of the selection.
        """
        place = _place(attention, selection)
        if place not in self._found:
            self._found[place] = self._calibrate(self._captured, attention, selection)
        return self._found[place]

    @cached_property
    def _captured(self) -> list[tuple[Captured, _Masses]]:
        files = [read_captured(path, self._device) for path in self._paths]
        return [(x, _Masses(x, self._block_size)) for x in files]

    def budgets_of(
        self, attention: BAAttConfig, selection: Mapping[str, Any], orders: str | torch.Tensor
    ) -> torch.Tensor:
        """Return the blocks (H,) that the heads keep in an order, or in those of each head; other arguments as `of`."""
        place = (orders if isinstance(orders, str) else tuple(orders.tolist()), *_place(attention, selection))
        if place not in self._budgets:
            self._budgets[place] = self._measure_budgets(attention, selection, orders)
        return self._budgets[place]

    def _measure_budgets(
        self, attention: BAAttConfig, selection: Mapping[str, Any], orders: str | torch.Tensor
    ) -> torch.Tensor:
        how: dict[str, Any] = {"compensate": attention.compensate, "backend": attention.backend, **selection}
        errors = torch.stack(
            [
                calibrate_budgets(x.query, x.key, x.value, orders=orders, grid_thw=x.grid_thw, **how)
                for x, _ in self._captured
            ]
        ).mean(0)
        num_blocks = -(-self._captured[0][0].query.shape[2] // self._block_size)
        kept = kept_blocks(num_blocks, attention.kept)
        return torch.tensor(budgets_of_levels(choose_budgets(errors, kept, num_blocks).tolist(), kept, num_blocks))

    @staticmethod
    def _calibrate(
        captured: Sequence[tuple[Captured, _Masses]], attention: BAAttConfig, selection: Mapping[str, Any]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        how: dict[str, Any] = {"compensate": attention.compensate, "backend": attention.backend, **selection}
        tensors = [(x.query, x.key, x.value) for x, _ in captured]
        grids = [x.grid_thw for x, _ in captured]
        errors = torch.stack(
            [calibrate_orders(*qkv, grid_thw=grid, **how) for qkv, grid in zip(tensors, grids, strict=True)]
        ).mean(0)
        orders = choose_orders(errors)
        recalls = []
        for (x, masses), qkv in zip(captured, tensors, strict=True):
            result = ba_attention(*qkv, grid_thw=x.grid_thw, orders=orders.cpu(), return_info=True, **how)
            assert isinstance(result, tuple)
            mass = masses.of_orders(orders, attention)
            recalls.append(kept_share(mass, result[1].block_index, result[1].block_count).mean(0))
        return orders, {
            "error": errors.gather(-1, orders[:, None])[:, 0].sqrt(),
            "recall": torch.stack(recalls).mean(0),
        }


def _place(attention: BAAttConfig, selection: Mapping[str, Any]) -> tuple[Any, ...]:
    """What the calibration depends on."""
    return (attention.compensate, *sorted(item for item in selection.items() if not item[0].startswith("text_")))


def _bounds(captured: Captured, block_size: int) -> dict[str, Any]:
    found = {}
    for name in _BOUND_ORDERS:
        order = token_orders(
            captured.query,
            captured.key,
            grid_thw=captured.grid_thw,
            orders=name,
            block_size=block_size,
            descending=False,
        )
        bound, deviation = bound_and_deviation(
            captured.query, captured.key, order, block_size=block_size, scale=captured.scale
        )
        found[name] = {
            "r": _numbers(correlation(bound, deviation).mean(0)),
            "bound": _numbers(bound.mean((-1, -2)).mean(0)),
            "deviation": _numbers(deviation.mean((-1, -2)).mean(0)),
        }
    return found


def _numbers(values: torch.Tensor) -> list[float | None]:
    """Values to six digits; `None` for what is not finite."""
    return [round(value, 6) if math.isfinite(value) else None for value in values.float().tolist()]


def _finished(out: Path) -> set[str]:
    return {line["file"] for line in read_lines(out, RECALL)}
