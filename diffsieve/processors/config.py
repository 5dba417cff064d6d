"""Configuration of BA-Att attention processors."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from os import PathLike, fspath
from typing import Any, Literal

from ..errors import UserInputError
from ..kernels.block_sparse import MAX_BLOCK_SIZE

# Default of the fields whose value comes from the preset: `__post_init__` replaces it, so a finished config never
# holds it and its repr shows the values in force.
_FROM_PRESET: Any = None

# The least at which the study found beta 1 closer to dense than 1/2: to 60 % skipped it is, at 75 % it is no longer.
_LEAST_KEPT_FOR_BETA_1 = 0.4

PRESETS: dict[str, dict[str, Any]] = {
    "default": {
        "warmup_steps": 0.2,
        "dense_layers": (0,),
        "order": "auto",
        "budgets": "auto",
        "beta": "auto",
        "cov_layers": "all",
        "center_keys": True,
        "log_count": True,
        "descending": True,
        "score": "residual",
        "compensate": "centroid",
    },
    "paper": {
        "warmup_steps": 10,
        "dense_layers": (),
        "order": "norm_sort",
        "budgets": "equal",
        "beta": 1.0,
        "cov_layers": "ends",
        "center_keys": False,
        "log_count": False,
        "descending": False,
        "score": "moments",
        "compensate": "none",
    },
}

OrdersTable = str | PathLike[str] | Mapping[str, Any] | None


@dataclass(frozen=True)
class BAAttConfig:
    """What to skip, where and when. Fields marked (preset) take their value from `preset` unless given.

    Args:
        preset: "default" calibrates the token order of each head, centres the keys, and lets the means of skipped
            blocks stand in for them; "paper" is BA-Att as published (arXiv 2605.19726): a yardstick, worse on models
            whose token norms are alike.
        sparsity: Share of (query block, key block) pairs to skip, in [0, 1). Default 0.5. More is faster and further
            from the dense result. Give this or `density`.
        density: Share of pairs to keep, in (0, 1]; 1 - sparsity.
        block_size: Tokens per block. Smaller blocks follow the attention pattern better at equal sparsity, but cost
            more for the selection and run slower on GPUs. Default 128.
        warmup_steps: (preset) Dense steps at the start of each generation: an int counts them, a float in [0, 1] is the
            share of the steps that run, rounded to the nearest and at least one where positive. The first steps fix
            the layout of the clip: fewer of them is faster and drifts further. 0.2, or 10 in "paper".
        warmup_until_sigma: Also dense while the scheduler's sigma is above this. Independent of the number of steps.
            Together with `warmup_steps` the stricter wins.
        warmup_until_timestep: The same in timesteps (usually 0 to 1000).
        dense_layers: (preset) Layers that always run dense, counted within each list of blocks; negative counts from
            the end. Early layers are often diffuse and lose most. (0,), or () in "paper".
        order: (preset) Token order before cutting into blocks: "auto" (each head takes the candidate whose output was
            closest to dense on some of its rows in the last dense step: best quality, for a measurement in each layer
            once a generation) or the name of one candidate for all heads. "auto", or "norm_sort" in "paper".
        orders: Saved table of orders, (layer -> orders of its heads), as a path from `save_orders` or a dict. Skips the
            calibration. Replaces `order`.
        budgets: (preset) Key blocks that the heads of a layer keep: "equal" gives all the same number; "auto" shares
            the same total out by what each head loses with more and with fewer blocks, measured once a generation in
            the last dense step. With "auto" a file of `orders` brings its own, and means equal ones if it has none.
            Equal too with `top_p`, a custom selection, one head, a dict of `orders`, nothing to skip, a single block
            kept or more than about five sixths of them. "auto", or "equal" in "paper".
        window: Tokens in one window of the "hilbert_window" candidate, a multiple of `block_size`. None: about 3 % of
            the sequence. Larger windows sort more strictly by norm and keep less locality.
        beta: (preset) Weight of the second-order term of the block score, >= 0. 0.5 is the expansion of the log-mass,
            1.0 is as published; "auto" is 1.0 where `score` is "residual" and at least 40 % of the pairs are kept, and
            0.5 elsewhere, as measured (see `second_order_weight`). No effect on speed. "auto", or 1.0 in "paper".
        cov_layers: (preset) Layers that use the second-order term: "all", "ends" (first and last) or "none" (block
            means only; slightly faster, clearly worse in sorted orders). "all", or "ends" in "paper".
        center_keys: (preset) Subtract the mean key in the statistics, so that a channel bias common to all keys does
            not drive the selection. Better quality, no cost.
        log_count: (preset) Count the true tokens of the short last block in its score. No cost.
        descending: (preset) Direction of norm sorts: large norms first, so that the short last block holds cold keys.
        score: (preset) What ranks the key blocks: "moments" (their predicted mass, from block statistics: free),
            "residual" (what `compensate` would miss of it: free) or "halfk" (mass, exact on the key side, for
            1 / (2 * block_size) of the dense cost). "residual", or "moments" in "paper" and with `top_p`.
        top_p: Keep, per query block, the smallest set of blocks whose predicted attention mass reaches this, with the
            density asked for as the upper bound. Spends work where attention is diffuse; how much is an outcome (see
            the summary). Needs `beta` < 1.
        min_density: With `top_p`, the least share of blocks to keep, in [0, density]. Default 0 (one block).
        compensate: (preset) "none" renormalises over the kept keys; "centroid" stands in for skipped blocks by their
            mean key and value: much closer to dense, for about 1 / block_size of the dense cost. "centroid", or "none"
            in "paper".
        text: Joint attention only. "keep": text queries run dense and text keys are always kept; "dense": layers with
            text tokens in their sequence run dense altogether (slower, safest).
        backend: Kernel: "auto" (by device, dtype and shape) or a name. A named backend that cannot run is an error.
        min_tokens: Shorter sequences run dense, because the sparse kernels lose there; "auto" is 2,048 on CPU and
            16,384 on H200, as measured, and estimated for other devices (see `crossover`).
        measure_time: Measure the seconds in selection and attention on GPUs too (CUDA events, a little slower). On CPU
            they are always measured. Not inside compiled code.
        record_masks: Layers whose last block mask is kept for pictures (see `recorded_masks`). Costs its memory, and
            one more graph under regional compilation.

    Raises:
        UserInputError: a value is out of range, an unknown name, or two fields contradict each other.
    """

    preset: Literal["default", "paper"] = "default"
    sparsity: float | None = None
    density: float | None = None
    block_size: int = 128
    warmup_steps: int | float = _FROM_PRESET
    warmup_until_sigma: float | None = None
    warmup_until_timestep: float | None = None
    dense_layers: tuple[int, ...] = _FROM_PRESET
    order: str = _FROM_PRESET
    orders: OrdersTable = None
    budgets: Literal["equal", "auto"] = _FROM_PRESET
    window: int | None = None
    beta: float | Literal["auto"] = _FROM_PRESET
    cov_layers: Literal["all", "ends", "none"] = _FROM_PRESET
    center_keys: bool = _FROM_PRESET
    log_count: bool = _FROM_PRESET
    descending: bool = _FROM_PRESET
    score: Literal["moments", "residual", "halfk"] = _FROM_PRESET
    top_p: float | None = None
    min_density: float = 0.0
    compensate: Literal["none", "centroid"] = _FROM_PRESET
    text: Literal["keep", "dense"] = "keep"
    backend: str = "auto"
    min_tokens: int | Literal["auto"] = "auto"
    measure_time: bool = False
    record_masks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_choice("preset", self.preset, tuple(PRESETS))
        values = PRESETS[self.preset]
        if self.top_p is not None:
            values = values | {"score": "moments"}  # the mass that top_p sums up
        for name, value in values.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        if self.sparsity is None and self.density is None:
            object.__setattr__(self, "sparsity", 0.5)
        for name in ("dense_layers", "record_masks"):
            object.__setattr__(self, name, _layer_tuple(name, getattr(self, name)))
        self._check_amounts()
        self._check_choices()

    @property
    def kept(self) -> float:
        """Target share of block pairs to keep, in (0, 1], from whichever of `density` and `sparsity` was given."""
        if self.density is not None:
            return self.density
        # 1 - 0.9 is just below 0.1, and the number of kept blocks is rounded half up. Never 0: one block always stays.
        return max(round(1.0 - (self.sparsity or 0.0), 12), 1e-12)

    @property
    def second_order_weight(self) -> float:
        """The `beta` in force: what "auto" stands for, or the number given."""
        if self.beta != "auto":
            return self.beta
        return 1.0 if self.score == "residual" and self.kept >= _LEAST_KEPT_FOR_BETA_1 else 0.5

    @property
    def calibrates(self) -> bool:
        """Whether the orders of the heads are chosen during the warm-up."""
        return self.order == "auto" and self.orders is None

    @property
    def shares_blocks(self) -> bool:
        """Whether heads may keep different numbers of blocks."""
        return self.budgets == "auto" and self.top_p is None and self.kept < 1

    @property
    def calibrates_budgets(self) -> bool:
        """Whether these numbers are chosen during the warm-up."""
        return self.shares_blocks and self.orders is None

    def second_order_in(self, *, end: bool) -> bool:
        """Whether a layer uses the second-order term; `end`: it is the first or last one of its list."""
        return self.cov_layers == "all" or (self.cov_layers == "ends" and end)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON values; `from_dict` is the inverse."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        values["dense_layers"] = list(self.dense_layers)
        values["record_masks"] = list(self.record_masks)
        if isinstance(self.orders, Mapping):
            values["orders"] = dict(self.orders)
        elif self.orders is not None:
            values["orders"] = fspath(self.orders)
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "BAAttConfig":
        """Build a config from `to_dict` or a parsed file.

        Raises:
            UserInputError: an unknown key, or any error of the constructor.
        """
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise UserInputError(f"unknown option {unknown[0]!r}; expected one of: {', '.join(known)}")
        return cls(**values)

    def _check_amounts(self) -> None:
        if self.sparsity is not None and self.density is not None:
            raise UserInputError(
                f"give sparsity or density, not both (got sparsity={self.sparsity}, density={self.density})"
            )
        _check_number("sparsity", self.sparsity, "in [0, 1)", lambda x: 0 <= x < 1)
        _check_number("density", self.density, "in (0, 1]", lambda x: 0 < x <= 1)
        _check_int("block_size", self.block_size, 1)
        if self.block_size > MAX_BLOCK_SIZE:
            raise UserInputError(f"block_size must be at most {MAX_BLOCK_SIZE}, got {self.block_size}")
        if isinstance(self.warmup_steps, float):
            # A count written as a float would silently turn 1.0 step into all of them, so the message tells both forms.
            _check_number(
                "warmup_steps", self.warmup_steps, "a whole number of steps or a float share in [0, 1]", _is_share
            )
        else:
            _check_int("warmup_steps", self.warmup_steps, 0)
        _check_number("warmup_until_sigma", self.warmup_until_sigma, ">= 0", lambda x: x >= 0)
        _check_number("warmup_until_timestep", self.warmup_until_timestep, ">= 0", lambda x: x >= 0)
        if self.beta != "auto":
            _check_number("beta", self.beta, '>= 0 or "auto"', lambda x: x >= 0)
        _check_number("top_p", self.top_p, "in (0, 1]", lambda x: 0 < x <= 1)
        if self.top_p is not None and self.score == "residual":
            raise UserInputError('top_p needs a score that predicts mass, "moments" or "halfk", got score="residual"')
        if self.top_p is not None and self.second_order_weight >= 1:
            raise UserInputError(f"top_p needs beta < 1 (its predicted mass means nothing otherwise), got {self.beta}")
        _check_number("min_density", self.min_density, f"in [0, {self.kept}]", lambda x: 0 <= x <= self.kept)
        if self.min_density and self.top_p is None:
            raise UserInputError(f"min_density has a meaning with top_p only, got {self.min_density} without top_p")
        if self.window is not None:
            _check_int("window", self.window, 1)
            if self.window % self.block_size:
                raise UserInputError(f"window must be a multiple of block_size ({self.block_size}), got {self.window}")
        if self.min_tokens != "auto":
            _check_int("min_tokens", self.min_tokens, 0)

    def _check_choices(self) -> None:
        from ..kernels.ba_att import CANDIDATE_ORDERS, SCORES
        from ..kernels.block_sparse import BACKENDS

        _check_choice("order", self.order, ("auto", *CANDIDATE_ORDERS))
        _check_choice("budgets", self.budgets, ("equal", "auto"))
        _check_choice("cov_layers", self.cov_layers, ("all", "ends", "none"))
        _check_choice("score", self.score, SCORES)
        _check_choice("compensate", self.compensate, ("none", "centroid"))
        _check_choice("text", self.text, ("keep", "dense"))
        _check_choice("backend", self.backend, tuple(BACKENDS))
        for name in ("center_keys", "log_count", "descending", "measure_time"):
            if not isinstance(getattr(self, name), bool):
                raise UserInputError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.orders is not None and not isinstance(self.orders, str | PathLike | Mapping):
            raise UserInputError(
                f"orders must be a path or a dict (layer -> orders of its heads), got {type(self.orders).__name__}"
            )


def _is_share(value: float) -> bool:
    return 0 <= value <= 1


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UserInputError(f"{name} must be one of {', '.join(choices)}; got {value!r}")


def _check_number(name: str, value: object, expected: str, accepts: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not accepts(value):
        raise UserInputError(f"{name} must be {expected}, got {value!r}")


def _check_int(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise UserInputError(f"{name} must be a whole number >= {low}, got {value!r}")


def _layer_tuple(name: str, value: object) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, tuple | list | range):
        raise UserInputError(f"{name} must be a tuple of layer numbers, got {value!r}")
    for layer in value:
        if isinstance(layer, bool) or not isinstance(layer, int):
            raise UserInputError(f"{name} must hold whole numbers, got {layer!r}")
    return tuple(value)
