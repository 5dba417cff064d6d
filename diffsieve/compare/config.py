"""What to generate and how: the arguments of `generate` and `compare`."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from ..errors import UserInputError
from ..pipelines.defaults import MINI_WAN
from .methods import METHODS

if TYPE_CHECKING:
    from ..pipelines.defaults import GenerationDefaults

DENSE = "dense"
AUTO = "auto"
DEFAULT_METHOD = "ba-att"
DEFAULT_SPARSITY = 0.5
MAX_TEXT_TOKENS = 4096


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What `generate` and `compare` share. `None` takes the model's or the method's own default.

    Args:
        model: `"mini-wan"`, `"mini-pixel-dit"`, a folder in diffusers format, or a hub id.
        method: the sparse attention, one of `METHODS`.
        preset: of the method; `None` takes the method's own first choice.
        sparsity: share of the block pairs skipped in sparse steps, in [0, 1). More is faster and further from dense.
            BA-Att alone, 0.5 where `None`.
        topk: blocks that each query keeps per level, LLSA alone; `None` takes what the model was trained with, else 8.
        steps: denoising steps.
        warmup: dense steps at the start: a number of steps (int) or a share of all (float in [0, 1]). More is slower
            and closer to dense.
        block_size: tokens of a block. Larger blocks are faster for the same sparsity, and coarser.
        min_tokens: shorter sequences run dense, because sparse attention does not pay there.
        backend: of the block-sparse attention; `"auto"` picks by device.
        frames: of the clip; 1 for a model of pictures.
        height: pixels.
        width: pixels.
        prompt: one clip for each prompt and seed. For a model of pictures, classes by name or number.
        seed: start values of the noise.
        negative_prompt: what guidance moves away from.
        guidance_scale: classifier-free guidance; 1 or less turns it off and halves the work.
        max_sequence_length: text tokens, at most 4,096; Wan models know 512.
        fps: frames per second of the mp4 files.
        device: see `load_pipeline`.
        dtype: see `load_pipeline`.
        out: folder for the results.
    """

    # What `method` may be beside one of `METHODS`.
    _without_method: ClassVar[tuple[str, ...]] = ()
    # Arguments of sparse attention that a dense run looks at.
    _dense_takes: ClassVar[tuple[str, ...]] = ()

    model: str = MINI_WAN
    method: str = DEFAULT_METHOD
    preset: str | None = None
    sparsity: float | None = None
    topk: int | None = None
    steps: int | None = None
    warmup: int | float | None = None
    block_size: int | None = None
    min_tokens: int | None = None
    backend: str = "auto"
    frames: int | None = None
    height: int | None = None
    width: int | None = None
    prompt: tuple[str, ...] = ()
    seed: tuple[int, ...] = (0,)
    negative_prompt: str | None = None
    guidance_scale: float | None = None
    max_sequence_length: int | None = None
    fps: int | None = None
    device: str | None = None
    dtype: str | None = None
    out: Path = Path("outputs")

    def __post_init__(self) -> None:
        if self.sparsity is None and self.method == DEFAULT_METHOD:
            object.__setattr__(self, "sparsity", DEFAULT_SPARSITY)
        for name in ("steps", "frames", "height", "width", "block_size", "topk", "max_sequence_length", "fps"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UserInputError(f"{name} must be a positive integer, got {value!r}")
        if self.max_sequence_length is not None and self.max_sequence_length > MAX_TEXT_TOKENS:
            raise UserInputError(
                f"max_sequence_length must be at most {MAX_TEXT_TOKENS}, got {self.max_sequence_length}"
            )
        self._check_warmup()
        if self.min_tokens is not None and self.min_tokens < 0:
            raise UserInputError(f"min_tokens must be 0 or more, got {self.min_tokens}")
        if self.guidance_scale is not None and not math.isfinite(self.guidance_scale):
            raise UserInputError(f"guidance_scale must be finite, got {self.guidance_scale}")
        for name in ("prompt", "seed"):
            values = getattr(self, name)
            if isinstance(values, str) or not isinstance(values, tuple):
                raise UserInputError(f"{name} must be a tuple, got {values!r}")
            if len(set(values)) != len(values):
                raise UserInputError(f"{name} must not name a value twice, got {', '.join(map(repr, values))}")
        if not self.seed:
            raise UserInputError("seed must hold at least one value, got none")
        for seed in self.seed:
            if not isinstance(seed, int) or not 0 <= seed < 2**63:
                raise UserInputError(f"seed must be an integer in [0, 2^63), got {seed!r}")
        for prompt in self.prompt:
            if not isinstance(prompt, str) or not prompt.strip():
                raise UserInputError(f"prompt must be a text that is not empty, got {prompt!r}")
        known = (*METHODS, *self._without_method)
        if self.method not in known:
            raise UserInputError(f"method must be one of {', '.join(known)}, got {self.method!r}")
        if self.method == DENSE:
            self._refuse_sparse()
        # The method checks what it is given. Where the model decides, an argument of one method is checked by that one.
        chosen = ("llsa" if self.topk is not None else DEFAULT_METHOD) if self.method == AUTO else self.method
        if chosen in METHODS:
            METHODS[chosen].config(self, None)

    def _check_warmup(self) -> None:
        value = self.warmup
        share = isinstance(value, float) and 0.0 <= value <= 1.0
        count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        if value is not None and not share and not count:
            raise UserInputError(
                f"warmup must be a whole number of steps, or a share of them as a float in [0, 1], got {value!r}"
            )

    def _refuse_sparse(self) -> None:
        names = ("preset", "sparsity", "topk", "warmup", "block_size", "min_tokens")
        given = [name for name in names if getattr(self, name) is not None]
        given += ["backend"] if self.backend != "auto" else []
        given = [name for name in given if name not in self._dense_takes]
        if given:
            shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in given)
            raise UserInputError(f"{', '.join(given)} must be left out for method dense, got {shown}")

    def filled(self, defaults: GenerationDefaults) -> Self:
        """Return a copy in which the model's defaults stand for every `None` that concerns the model."""
        names = ("steps", "frames", "height", "width", "guidance_scale", "max_sequence_length", "fps")
        changes: dict[str, Any] = {name: getattr(defaults, name) for name in names if getattr(self, name) is None}
        if not self.prompt:
            changes["prompt"] = defaults.prompts[:1]
        return dataclasses.replace(self, **changes)

    def settings(self) -> dict[str, Any]:
        """Return what decides the content of a clip, as plain JSON values; not prompts, seeds and the output folder."""
        kept = {field.name for field in dataclasses.fields(self)} - {"prompt", "seed", "out"}
        return {name: getattr(self, name) for name in sorted(kept)}


@dataclass(frozen=True, kw_only=True)
class CompareConfig(RunConfig):
    """Arguments of `compare`; see `RunConfig` for those shared with `generate`.

    `method` may also be `"auto"`: LLSA for a model that was trained with it, else BA-Att.

    Args:
        mask_layer: transformer layer of the block mask picture; `None` takes the middle one.
        save_frames: also keep the raw frames of both runs, float32, as .npz (6 to 400 MB a clip).
        floor: also make the dense clip with another attention kernel: the noise floor.
        save_masks: also keep the block masks of the sparse layers and steps as masks.npz, with LLSA the chosen keys as
            selections.npz: of at most 12 layers, and of as many evenly spaced steps as fit into 256 MiB before
            compression.
    """

    _without_method: ClassVar[tuple[str, ...]] = (AUTO,)

    method: str = AUTO
    out: Path = Path("outputs/compare")
    mask_layer: int | None = None
    save_frames: bool = False
    floor: bool = False
    save_masks: bool = False


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(RunConfig):
    """Arguments of `generate`.

    `method` may also be `"dense"`, which leaves the pipeline as it is and takes none of `preset`, `sparsity`, `topk`,
    `warmup`, `block_size`, `min_tokens` and `backend`; or `"auto"`: BA-Att for clips, and the model's own attention for
    a model of pictures.
    """

    _without_method: ClassVar[tuple[str, ...]] = (DENSE, AUTO)

    out: Path = Path("outputs/generate")
    method: str = AUTO
