"""What sparse attention did in the latest generation: measured counts, not the settings."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any

import torch

from ..errors import UserInputError
from .ba_att import COUNTERS
from .calibration import FALLBACK_ORDER, order_names, write_orders
from .controller import MASK, SparseController
from .install import controllers_of, llsa_controllers_of
from .llsa_summary import LLSASummary, llsa_summary


@dataclass(frozen=True)
class StepSummary:
    """One step of one transformer.

    Attributes:
        step: Step of the generation, from 0.
        transformer: "transformer" or "transformer_2".
        dense: Whether it ran dense as a whole. A step in which a cache left dense layers alone to run did not.
        density: Share of block pairs computed, in [0, 1]; None if a step cache skipped all layers.
        layers: The same by layer, such as "blocks.3"; layers that a step cache skipped are missing.
    """

    step: int
    transformer: str
    dense: bool
    density: float | None
    layers: dict[str, float]


@dataclass(frozen=True)
class SparsitySummary:
    """Measured sparsity of the latest generation. Densities are shares in [0, 1] of self-attention work that was done.

    Attributes:
        steps_total: Steps that ran.
        steps_dense: Steps that ran dense as a whole (see `StepSummary`).
        density_overall: Block pairs computed / all block pairs, over the whole generation, warm-up and dense layers
            included; None before the first generation.
        density_sparse_steps: The same over the steps that are not dense; None if all are.
        token_density_overall: Like `density_overall`, in pairs of tokens (the last block is often short).
        token_density_sparse_steps: Like `density_sparse_steps`, in pairs of tokens.
        target_density: Share of block pairs that the settings ask for.
        layers: Density by "transformer.blocks.3" over the steps that are not dense, dense layers included as 1.
        steps: Per step and transformer.
        dense_reasons: Number of dense attention calls (a layer in one forward) by reason.
        backend: Name of the sparse kernel that ran, None if none did.
        backend_reason: Why that one, None if none ran.
        dense_backends: Number of the dense calls that a sparse kernel did, with all blocks listed, by its name: where
            that is faster than PyTorch's attention. The model's own processors did the others.
        step_source: Where the step numbers came from: "context", "scheduler" or "timestep".
        orders: Order names of the heads by layer, for the sparse layers; empty if nothing was chosen yet.
        orders_from: "calibration", "table", "setting" or "fallback".
        budgets: Key blocks that each block of queries keeps, head by head, by layer, for the sparse layers; empty where
            the heads of a layer are all to keep the same number, or nothing was chosen yet.
        budgets_from: "calibration", "table", or "fallback" where no layer was measured; None if `budgets` is empty.
        attention_seconds: Time in the sparse kernel, None where not measured.
        selection_seconds: Time in ordering, statistics and selection, None where not measured.
        notes: Sentences about what a user should know.
    """

    steps_total: int
    steps_dense: int
    density_overall: float | None
    density_sparse_steps: float | None
    token_density_overall: float | None
    token_density_sparse_steps: float | None
    target_density: float
    layers: dict[str, float]
    steps: tuple[StepSummary, ...]
    dense_reasons: dict[str, int]
    backend: str | None
    backend_reason: str | None
    dense_backends: dict[str, int]
    step_source: str
    orders: dict[str, tuple[str, ...]]
    orders_from: str
    budgets: dict[str, tuple[int, ...]]
    budgets_from: str | None
    attention_seconds: float | None
    selection_seconds: float | None
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        values = asdict(self)
        values["orders"] = {layer: list(names) for layer, names in self.orders.items()}
        values["budgets"] = {layer: list(blocks) for layer, blocks in self.budgets.items()}
        values["steps"] = list(values["steps"])
        values["notes"] = list(self.notes)
        return values

    def __str__(self) -> str:
        return format_summary(self)


def sparsity_summary(pipeline_or_transformer: Any) -> SparsitySummary | LLSASummary:
    """Return what sparse attention did in the latest generation (with LLSA: forward). Waits for the device.

    Raises:
        UserInputError: sparse attention is not applied.
    """
    llsa = llsa_controllers_of(pipeline_or_transformer)
    if llsa:
        return llsa_summary(llsa)
    controllers = _applied(pipeline_or_transformer)
    clock, config = controllers[0].clock, controllers[0].config
    active = [controller for controller in controllers if controller.generation == clock.generation > 0]
    rows = [row for controller in active for row in _rows(controller)]
    dense_steps = {row.step for row in rows} - {row.step for row in rows if row.in_sparse_step}
    sparse_rows = [row for row in rows if row.step not in dense_steps]
    reasons: dict[str, int] = {}
    for row in rows:
        if row.dense_calls:
            reason = row.reason or MASK
            reasons[reason] = reasons.get(reason, 0) + row.dense_calls
    ran = [layer.processor for c in active for layer in c.layers if layer.processor._backend]
    dense_backends: dict[str, int] = {}
    for row in rows:
        if row.listed_calls and row.dense_backend is not None:
            dense_backends[row.dense_backend] = dense_backends.get(row.dense_backend, 0) + row.listed_calls
    seconds = _seconds(active)
    orders = {f"{c.name}.{layer}": names for c in active for layer, names in orders_of(c).items()}
    budgets = {f"{c.name}.{layer}": blocks for c in active for layer, blocks in _budgets_of(c).items()}
    return SparsitySummary(
        steps_total=len({row.step for row in rows}),
        steps_dense=len(dense_steps),
        density_overall=_density(rows),
        density_sparse_steps=_density(sparse_rows),
        token_density_overall=_token_density(rows),
        token_density_sparse_steps=_token_density(sparse_rows),
        target_density=config.kept,
        layers=_by_layer(sparse_rows),
        steps=tuple(step for controller in active for step in _steps(controller.name, _rows(controller))),
        dense_reasons=reasons,
        backend=ran[0]._backend if ran else None,
        backend_reason=ran[0]._backend_reason if ran else None,
        dense_backends=dense_backends,
        step_source=clock.source,
        orders=orders,
        orders_from=_chosen_by(active, config.orders is not None, config.calibrates),
        budgets=budgets,
        budgets_from=_chosen_by(active, config.orders is not None, config.calibrates_budgets) if budgets else None,
        attention_seconds=seconds.get("attention"),
        selection_seconds=seconds.get("selection"),
        notes=(*_notes(active, bool(rows) and not sparse_rows, reasons), *_broken(rows)),
    )


def save_orders(pipeline_or_transformer: Any, path: str | PathLike[str]) -> None:
    """Write the orders of the latest generation as JSON, for `BAAttConfig(orders=path)`. Whole or not at all.

    Budgets that the heads had are written with them, as levels (`diffsieve.kernels.ba_att.LEVELS`).

    Raises:
        UserInputError: sparse attention is not applied, no order has been chosen yet, or the file cannot be written.
    """
    controllers = _applied(pipeline_or_transformer)
    tables = {controller.name: orders_of(controller) for controller in controllers}
    for controller in controllers:
        if not tables[controller.name]:
            missing = "orders"
        elif controller.calibrates_budgets and controller.levels is None:
            missing = 'budgets (`budgets="equal"` needs none)'
        else:
            continue
        raise UserInputError(
            f"{controller.name} has no {missing} to save yet: run one generation past its warm-up first"
        )
    levels = {c.name: {layer: c.levels[layer] for layer in tables[c.name]} for c in controllers if c.levels is not None}
    write_orders(path, tables, levels)


def orders_of(controller: SparseController) -> dict[str, tuple[str, ...]]:
    """Return the order names of the heads of the sparse layers; empty where no order is chosen yet."""
    sparse = [(i, layer) for i, layer in enumerate(controller.layers) if not layer.always_dense]
    if controller.orders is not None:
        return {layer.name: order_names(controller.orders[layer.name]) for _, layer in sparse}
    if not controller.config.calibrates:
        return {layer.name: (controller.config.order,) * layer.attn.heads for _, layer in sparse}
    if controller.chosen is None:
        return {}
    chosen = controller.chosen.tolist()
    return {layer.name: order_names(chosen[i]) for i, layer in sparse}


def _budgets_of(controller: SparseController) -> dict[str, tuple[int, ...]]:
    if controller.levels is None or controller.shape is None:
        return {}
    return {
        layer.name: tuple(budgets.tolist())
        for layer in controller.layers
        if (budgets := layer.processor.shared_budgets) is not None and not layer.always_dense
    }


def format_summary(summary: SparsitySummary) -> str:
    """Return the summary as text for a terminal."""
    if not summary.steps_total:
        return "sparse attention: nothing has run yet"
    lines = [
        f"sparse attention: {summary.steps_total} steps, {summary.steps_dense} dense",
        f"  density overall       {_percent(summary.density_overall)} of the block pairs, warm-up included",
        f"  density sparse steps  {_percent(summary.density_sparse_steps)} (asked for {summary.target_density:.1%})",
        f"  kernel                {f'{summary.backend} ({summary.backend_reason})' if summary.backend else 'none ran'}",
    ]
    if summary.attention_seconds is not None and summary.selection_seconds is not None:
        lines.append(
            f"  time                  {summary.attention_seconds:.2f} s attention, "
            f"{summary.selection_seconds:.2f} s selection"
        )
    if summary.orders:
        counts: dict[str, int] = {}
        for names in summary.orders.values():
            for name in names:
                counts[name] = counts.get(name, 0) + 1
        heads = ", ".join(f"{name} {count}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))
        lines.append(f"  orders of heads       {heads} (from {summary.orders_from})")
    if summary.budgets:
        blocks = [count for counts in summary.budgets.values() for count in counts]
        lines.append(
            f"  blocks of heads       {min(blocks)} to {max(blocks)} a row, {sum(blocks) / len(blocks):.4g} on average "
            f"(from {summary.budgets_from})"
        )
    reasons = ", ".join(f"{reason} {count}" for reason, count in summary.dense_reasons.items())
    listed = "".join(f"; {count} by {name}, all blocks listed" for name, count in summary.dense_backends.items())
    lines.append(f"  dense calls           {reasons or 'none'}{listed}")
    lines += [f"  note: {note}" for note in summary.notes]
    return "\n".join(lines)


@dataclass(frozen=True)
class _Row:
    """Counts of one layer in one step."""

    step: int
    layer: str  # "transformer.blocks.3"
    reason: str | None
    kept_pairs: int
    total_pairs: int
    kept_token_pairs: int
    total_token_pairs: int
    sparse_calls: int
    dense_calls: int
    broken_calls: int
    listed_calls: int
    dense_backend: str | None

    @property
    def in_sparse_step(self) -> bool:
        """Whether the layer ran sparse, or was to and a step cache skipped it."""
        return self.sparse_calls > 0 or (self.reason is None and not self.dense_calls)


def _applied(pipeline_or_transformer: Any) -> list[SparseController]:
    controllers = controllers_of(pipeline_or_transformer)
    if not controllers:
        raise UserInputError(
            f"sparse attention is not applied to this {type(pipeline_or_transformer).__name__}: "
            "call pipe.set_attn_processor(BAAttProcessor()) first"
        )
    return controllers


def _rows(controller: SparseController) -> list[_Row]:
    records = controller.records
    if not records:
        return []
    counts = torch.stack([record.counters.cpu() for record in records]).tolist()
    return [
        _Row(
            record.step,
            f"{controller.name}.{layer.name}",
            reason,
            **dict(zip(COUNTERS, values, strict=True)),
            dense_backend=record.dense_backend,
        )
        for record, table in zip(records, counts, strict=True)
        for layer, reason, values in zip(controller.layers, record.reasons, table, strict=True)
    ]


def _steps(transformer: str, rows: list[_Row]) -> list[StepSummary]:
    by_step: dict[int, list[_Row]] = {}
    for row in rows:
        by_step.setdefault(row.step, []).append(row)
    return [
        StepSummary(
            step=step,
            transformer=transformer,
            dense=not any(row.in_sparse_step for row in of_step),
            density=_density(of_step),
            layers={
                row.layer.removeprefix(f"{transformer}."): row.kept_pairs / row.total_pairs
                for row in of_step
                if row.total_pairs
            },
        )
        for step, of_step in by_step.items()
    ]


def _by_layer(rows: list[_Row]) -> dict[str, float]:
    by_layer: dict[str, list[_Row]] = {}
    for row in rows:
        by_layer.setdefault(row.layer, []).append(row)
    densities = {layer: _density(of_layer) for layer, of_layer in by_layer.items()}
    return {layer: density for layer, density in densities.items() if density is not None}


def _density(rows: Iterable[_Row]) -> float | None:
    rows = list(rows)
    total = sum(row.total_pairs for row in rows)
    return sum(row.kept_pairs for row in rows) / total if total else None


def _token_density(rows: Iterable[_Row]) -> float | None:
    rows = list(rows)
    total = sum(row.total_token_pairs for row in rows)
    return sum(row.kept_token_pairs for row in rows) / total if total else None


def _seconds(controllers: list[SparseController]) -> dict[str, float]:
    total: dict[str, float] = {}
    for controller in controllers:
        for stage, seconds in (controller.timer.seconds() if controller.timer else {}).items():
            total[stage] = total.get(stage, 0.0) + seconds
    return total


def _chosen_by(controllers: list[SparseController], has_table: bool, calibrates: bool) -> str:
    if has_table:
        return "table"
    if not calibrates:
        return "setting"
    measured = [c.measured for c in controllers if c.measured is not None]
    return "calibration" if any(bool(layers.any()) for layers in measured) or not measured else "fallback"


def _notes(controllers: list[SparseController], all_dense: bool, reasons: dict[str, int]) -> list[str]:
    notes = []
    too_long = [controller for controller in controllers if controller.warmup_too_long]
    if too_long:
        steps, warmup_steps = too_long[0].clock.num_steps, too_long[0].config.warmup_steps
        notes.append(f"warmup_steps={warmup_steps} covers all {steps} steps: every step ran dense")
    elif all_dense:
        notes.append(f"every step ran dense: {', '.join(reasons)}")
    for controller in controllers:
        if controller.measured is None:
            continue
        measured = controller.measured.tolist()
        config = controller.config
        sparse = [i for i, layer in enumerate(controller.layers) if not layer.always_dense]
        if not config.calibrates:  # budgets alone were measured
            sparse = [i for i in sparse if controller.layers[i].processor.shared_budgets is not None]
        missed = [i for i in sparse if not measured[i]]
        if missed:
            instead = [f"use the fixed order {FALLBACK_ORDER}"] if config.calibrates else []
            instead += ["keep equal numbers of blocks in all heads"] if config.calibrates_budgets else []
            notes.append(
                f"{controller.name}: {len(missed)} of {len(sparse)} sparse layers were not calibrated in a dense step "
                f"and {' and '.join(instead)}"
            )
    return notes


def _broken(rows: list[_Row]) -> list[str]:
    broken = [row for row in rows if row.broken_calls]
    if not broken:
        return []
    calls = sum(row.broken_calls for row in broken)
    return [f"NaN or infinity in the output of {calls} sparse calls, first in {broken[0].layer}, step {broken[0].step}"]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
