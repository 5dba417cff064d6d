"""The variants of block selection that a study compares, by name, all at equal density in the sparse steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import UserInputError
from ..kernels.ba_att import CANDIDATE_ORDERS, CustomSelection, default_window
from ..processors import BAAttConfig
from .selections import antidiagonal, head_budgets, one_sided_sort, oracle, random_blocks

FLOOR = "noise floor"
"""Dense against dense with another kernel: what no method can be said to be better than."""

MEANING_OF_DEFAULT = {"orders_chosen_by": "output error", "budgets": "auto", "beta": "1 to 60 % skipped, else 1/2"}
"""What `default` chooses its orders by, how it shares blocks among heads, and its weight of the second-order term.

Part of a study's settings: lines in which `default` was something else are not mixed in.
"""


@dataclass(frozen=True)
class Variant:
    """One way to choose blocks.

    Args:
        about: what it is, in a line.
        options: fields of `BAAttConfig` beside those that all variants share.
        custom: made anew for every layer (by its number) and clip, in place of a step of BA-Att.
        watch: what the orders of the heads are chosen by on all rows of the dense run, if not by calibration: "error",
            their error in the very steps that are sparse, or "recall", the attention mass kept in the last dense step.
        window_factor: sorting window as a multiple of the usual one.
        equal_total: whether the sparse layers keep less, so that with the dense ones the total is that of the others.
        from_preset: whether its options start from a preset, not from `base`.
        suites: that it belongs to.
    """

    about: str
    options: Mapping[str, Any] = field(default_factory=dict)
    custom: Callable[[int], CustomSelection] | None = None
    watch: Literal["error", "recall"] | None = None
    window_factor: int | None = None
    equal_total: bool = False
    from_preset: bool = False
    suites: tuple[str, ...] = ("fidelity",)


_MASS: dict[str, Any] = {"compensate": "none", "score": "moments"}
# What one part is changed of: as the preset, but for parts that were chosen by measuring them against this.
_BASE: dict[str, Any] = {"budgets": "equal", "beta": 0.5}
_PLAIN: dict[str, Any] = {"cov_layers": "none", "log_count": False} | _MASS


def _raster(custom: Callable[[int], CustomSelection]) -> dict[str, Any]:
    return {"options": {"order": "raster"} | _MASS, "custom": custom}


VARIANTS: dict[str, Variant] = {
    "paper": Variant(
        "BA-Att as published, the warm-up of the study", {"preset": "paper"}, from_preset=True,
        suites=("fidelity", "orders", "sort"),
    ),
    "default": Variant(
        "the preset default, its first layer sparse too", from_preset=True, suites=("fidelity", "orders")
    ),
    "preset default": Variant(
        "the preset default as it ships: the first layer is dense, so the density is higher",
        {"dense_layers": (0,)},
        from_preset=True,
        suites=("fidelity", "orders"),
    ),
    "base": Variant(
        "default with the same number of blocks for all heads and 1/2 as weight of the second-order term",
        suites=("fidelity", "orders"),
    ),
    "first layer dense": Variant(
        "base, the first layer dense and the others sparser by what it costs",
        {"dense_layers": (0,)},
        equal_total=True,
    ),
    "mean pooling": Variant("raster, block means alone", {"order": "raster"} | _PLAIN, suites=("fidelity", "orders")),
    **{
        f"order {name}": Variant(f"base, all heads in order {name}", {"order": name}, suites=("fidelity", "orders"))
        for name in CANDIDATE_ORDERS
    },
    "window x2": Variant("order hilbert_window, its window doubled", {"order": "hilbert_window"}, window_factor=2),
    "no centring": Variant("base without centred keys", {"center_keys": False}),
    "beta 1": Variant("base with the paper's weight of the second-order term", {"beta": 1.0}),
    "no second order": Variant("base without the second-order term", {"cov_layers": "none"}),
    "score moments": Variant("base, blocks ranked by predicted mass", {"score": "moments"}),
    "no compensation": Variant("base, ranked by predicted mass, skipped blocks left out", _MASS),
    "halfk": Variant("base, ranked by mass with scores exact on the side of the keys", {"score": "halfk"}),
    "head budgets": Variant(
        "base, the blocks of a layer shared among its heads by predicted gain", custom=lambda layer: head_budgets()
    ),
    "measured budgets": Variant(
        "base, the blocks of a layer shared among its heads by measured error", {"budgets": "auto"}
    ),
    "hindsight": Variant("base, orders of the heads by their error in later steps of the run", watch="error"),
    "order by recall": Variant(
        "base, orders of the heads by the attention mass that they keep in the last dense step", watch="recall"
    ),
    "antidiagonal 8": Variant("anti-diagonal sampling, stride 8", **_raster(lambda layer: antidiagonal(8))),
    "antidiagonal 16": Variant("anti-diagonal sampling, stride 16", **_raster(lambda layer: antidiagonal(16))),
    "random": Variant("blocks drawn at random", **_raster(random_blocks)),
    "oracle": Variant(
        "the exact attention mass as score, in the orders of base, nothing compensated", _MASS,
        custom=lambda layer: oracle(),
    ),
    "oracle raster": Variant("the exact attention mass as score, in raster order", **_raster(lambda layer: oracle())),
    "no sort": Variant(
        "the paper's method without its sort",
        {"preset": "paper", "order": "raster"},
        from_preset=True,
        suites=("sort",),
    ),
    "sort queries": Variant(
        "the paper's method, queries alone sorted",
        {"preset": "paper", "order": "raster"},
        custom=lambda layer: one_sided_sort("query"),
        from_preset=True,
        suites=("sort",),
    ),
    "sort keys": Variant(
        "the paper's method, keys alone sorted",
        {"preset": "paper", "order": "raster"},
        custom=lambda layer: one_sided_sort("key"),
        from_preset=True,
        suites=("sort",),
    ),
}  # fmt: skip

SUITES: dict[str, tuple[float, ...]] = {
    "fidelity": (0.5, 0.6, 0.75, 0.9),
    "orders": (0.5,),
    "sort": (0.9, 0.7, 0.5),
}
"""Named sets of variants with their sparsities.

All but the parts of the sort; the presets, orders and mean pooling; the ablation of the sort.
"""


def choose(suites: Sequence[str], variants: Sequence[str], sparsities: Sequence[float]) -> list[tuple[str, float]]:
    """Return the pairs of variant and sparsity to run, sparsity by sparsity.

    Args:
        suites: names of `SUITES`.
        variants: further names; with `suites` empty these alone.
        sparsities: in place of those of the suites; 0.5 for variants without a suite.

    Raises:
        UserInputError: unknown names, a sparsity outside (0, 1), nothing to run.
    """
    for name, given, known in (("suite", suites, SUITES), ("variant", variants, VARIANTS)):
        if unknown := [value for value in given if value not in known]:
            raise UserInputError(f"{name} must be one of {', '.join(known)}, got {unknown[0]!r}")
    if wrong := [value for value in sparsities if not 0 < value < 1]:
        raise UserInputError(f"sparsity must be in (0, 1), got {wrong[0]}")
    pairs: dict[tuple[str, float], None] = {}
    for suite in suites:
        members = [name for name, variant in VARIANTS.items() if suite in variant.suites]
        pairs |= dict.fromkeys((name, value) for value in sparsities or SUITES[suite] for name in members)
    pairs |= dict.fromkeys((name, value) for value in sparsities or (0.5,) for name in variants)
    if not pairs:
        raise UserInputError("suite or variant must name something to run, got neither")
    order = list(dict.fromkeys(sparsity for _, sparsity in pairs))
    return sorted(pairs, key=lambda pair: order.index(pair[1]))


def config_of(
    variant: Variant,
    sparsity: float,
    *,
    num_layers: int,
    num_tokens: int,
    warmup: int | float,
    block_size: int,
    backend: str = "auto",
    orders: Mapping[str, Any] | None = None,
) -> BAAttConfig | str:
    """Build the configuration of a variant, or say why there is none.

    Args:
        variant: of `VARIANTS`.
        sparsity: of the sparse steps, in (0, 1).
        num_layers: of the transformer.
        num_tokens: of the video.
        warmup: dense steps, a number or a share.
        block_size: tokens per block.
        backend: of the attention.
        orders: table for variants that `watch`.
    """
    options: dict[str, Any] = {"dense_layers": ()} | ({} if variant.from_preset else _BASE) | dict(variant.options)
    density = 1.0 - sparsity
    if variant.equal_total:
        dense = len(options["dense_layers"])
        density = (density * num_layers - dense) / (num_layers - dense) if num_layers > dense else 0.0
        if density <= 0:
            return f"{dense} dense of {num_layers} layers alone exceed a density of {1 - sparsity:.3g}"
    if variant.window_factor is not None:
        options["window"] = variant.window_factor * default_window(num_tokens, block_size)
    if variant.watch is not None:
        options["orders"] = orders
    return BAAttConfig(
        density=round(density, 12),
        warmup_steps=warmup,
        min_tokens=0,
        block_size=block_size,
        backend=backend,
        **options,
    )
