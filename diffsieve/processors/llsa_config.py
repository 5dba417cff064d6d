"""Configuration of LLSA attention processors."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from ..errors import UserInputError

ORDERS = ("hilbert", "frame_hilbert", "morton", "raster")


@dataclass(frozen=True)
class LLSAConfig:
    """How LLSA attends (arXiv 2512.16615). A model has to be trained or fine-tuned with the same settings.

    Args:
        block_size: Tokens pooled into one of the next level, >= 2. Smaller blocks choose better, larger run faster.
            Default 16.
        topk: Tokens kept per level by each pooled query, >= 1, or one number per level from fine to coarse. More is
            closer to dense attention and slower. Default 8.
        levels: Pooled levels, in [1, 4]. More levels are faster on long sequences and a little coarser. "auto": 1 up to
            16,384 tokens, 2 below 262,144, else 3; "paper": floor(log_block tokens) - 1.
        enrich: Attend to pooled tokens too. Without them far context is lost; faster.
        disjoint: Leave out pooled tokens whose children are attended. Not the published form. Closer to dense attention
            at one level, so the choice for fine-tuning from dense weights.
        order: Token order before cutting into blocks: "hilbert" (3-D curve), "frame_hilbert" (frame by frame), "morton"
            (as published, for pictures) or "raster" (no reordering: worse, free).
        dense_layers: Layers that attend to all tokens, also in a model that was trained with LLSA, counted within each
            list of blocks; negative counts from the end.
        backend: Kernel: "auto" (by device, dtype and shape), "reference", "torch" or "triton". A named backend that
            cannot run is an error.
        record_masks: Layers whose last choice of keys is kept for pictures (see `recorded_selections`), counted as in
            `dense_layers`. Costs its memory, and what the choice reuses of its means. Eager runs only.

    Raises:
        UserInputError: a value is out of range, or two fields contradict each other.
    """

    block_size: int = 16
    topk: int | tuple[int, ...] = 8
    levels: int | Literal["auto", "paper"] = "auto"
    enrich: bool = True
    disjoint: bool = False
    order: str = "hilbert"
    dense_layers: tuple[int, ...] = ()
    backend: str = "auto"
    record_masks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("topk", "dense_layers", "record_masks"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        _check(_is_int(self.block_size) and self.block_size >= 2, "block_size", "an int >= 2", self.block_size)
        numbers = self.topk if isinstance(self.topk, tuple) else (self.topk,)
        whole = len(numbers) > 0 and all(_is_int(k) and k >= 1 for k in numbers)
        _check(whole, "topk", "an int >= 1, or one per level", self.topk)
        fits = self.levels in ("auto", "paper") or (_is_int(self.levels) and 1 <= int(self.levels) <= 4)
        _check(fits, "levels", 'an int in [1, 4], "auto" or "paper"', self.levels)
        for name in ("enrich", "disjoint"):
            _check(isinstance(getattr(self, name), bool), name, "True or False", getattr(self, name))
        _check(self.enrich or not self.disjoint, "disjoint", "False where enrich is False", self.disjoint)
        _check(self.order in ORDERS, "order", f"one of {', '.join(ORDERS)}", self.order)
        for name in ("dense_layers", "record_masks"):
            value = getattr(self, name)
            layers = isinstance(value, tuple) and all(_is_int(layer) for layer in value)
            _check(layers, name, "a tuple of layer numbers", value)
        from ..kernels.llsa.checks import BACKENDS

        _check(self.backend in BACKENDS, "backend", f"one of {', '.join(BACKENDS)}", self.backend)
        per_level = isinstance(self.topk, tuple)
        matches = not per_level or len(numbers) == self.levels
        _check(matches, "topk", f"one number for each of levels={self.levels!r}", self.topk)

    def attends_like(self, other: "LLSAConfig | None") -> bool:
        """Whether a model gives the same output with other settings, up to rounding; False for None."""
        return other is not None and self == replace(other, backend=self.backend, record_masks=self.record_masks)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON values; `from_dict` is the inverse."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "LLSAConfig":
        """Build a config from `to_dict` or a parsed file.

        Raises:
            UserInputError: an unknown key, or any error of the constructor.
        """
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise UserInputError(f"unknown option {unknown[0]!r}; expected one of: {', '.join(known)}")
        return cls(**values)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check(condition: bool, name: str, expected: str, got: object) -> None:
    if not condition:
        raise UserInputError(f"{name} must be {expected}, got {got!r}")
