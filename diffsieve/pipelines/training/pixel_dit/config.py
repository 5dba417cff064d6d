"""Settings of a pixel DiT training run; the defaults are those of the embedded model mini-pixel-dit, but for its two
levels at 128 x 128."""

from __future__ import annotations

from dataclasses import dataclass, field

from ....errors import UserInputError
from ....kernels.llsa.levels import MAX_LEVELS
from ..settings import Settings
from ..stage_config import StageConfig, check_phases, phase_at

OPTIMIZERS = ("muon", "adamw")
MAX_SIDE = 1024
MAX_BATCH = 4096  # pictures that one process may draw in a step


@dataclass(frozen=True)
class PixelModelConfig:
    """Shape of the transformer; see `PixelDiTTransformer2DModel`. The largest picture size and the number of classes
    come from the stage and the data.

    Args:
        layers: blocks.
        heads: attention heads.
        head_dim: channels of a head.
        mlp_ratio: width of the two-layer network of a block, relative to the model's.
        attention_method: "llsa", "full" or "topk".
        token_order: "hilbert", "morton" or "raster".
        block_size: of "llsa" and "topk".
        topk: of "llsa" and "topk".
        levels: of "llsa": a number, "auto" or "paper".
        enrich: of "llsa".
        disjoint: of "llsa".
        rope_extent: length that the side stands for at every resolution; None counts pixels.
    """

    layers: int = 8
    heads: int = 3
    head_dim: int = 64
    mlp_ratio: float = 4.0
    attention_method: str = "llsa"
    token_order: str = "hilbert"
    block_size: int = 16
    topk: int = 8
    levels: int | str = "auto"
    enrich: bool = True
    disjoint: bool = False
    rope_extent: int | None = 128

    def __post_init__(self) -> None:
        number = isinstance(self.levels, int) and 1 <= self.levels <= MAX_LEVELS
        if not number and self.levels not in ("auto", "paper"):
            raise UserInputError(f'levels must be an int in [1, {MAX_LEVELS}], "auto" or "paper", got {self.levels!r}')


# Shapes of the published models (Peebles and Xie 2023), for `model` in a settings file.
SHAPES = {
    "S": {"layers": 12, "heads": 6, "head_dim": 64, "mlp_ratio": 4.0},
    "B": {"layers": 12, "heads": 12, "head_dim": 64, "mlp_ratio": 4.0},
    "L": {"layers": 24, "heads": 16, "head_dim": 64, "mlp_ratio": 4.0},
}


@dataclass(frozen=True)
class ImagePhase:
    """A stretch of the stage with one picture size.

    Args:
        side: pixels, of square pictures.
        batch_size: pictures per process and step.
        until: share of the stage, in (0, 1], at which the phase ends. The last phase ends at 1.
    """

    side: int = 128
    batch_size: int = 32
    until: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.side <= MAX_SIDE:
            raise UserInputError(f"side must be in [1, {MAX_SIDE}] pixels, got {self.side}")
        if not 1 <= self.batch_size <= MAX_BATCH:
            raise UserInputError(f"batch_size must be in [1, {MAX_BATCH}], got {self.batch_size}")
        if not 0 < self.until <= 1:
            raise UserInputError(f"until must be in (0, 1], got {self.until}")


def _phases() -> tuple[ImagePhase, ...]:
    return (
        ImagePhase(side=32, batch_size=512, until=0.3),
        ImagePhase(side=64, batch_size=128, until=0.6),
        ImagePhase(side=128, batch_size=32),
    )


@dataclass(frozen=True)
class PixelStageConfig(StageConfig):
    """The transformer's training.

    Args:
        phases: picture sizes in order.
        optimizer: "muon" for the matrices of the blocks and AdamW for the rest, or "adamw" for all.
        compile: compile the transformer's blocks, one graph for each picture size.
        gradient_checkpointing: compute activations again in the backward pass: a third slower, a fraction of the
            memory.
        class_dropout: share of pictures trained without their class, for guidance.
        uniform_share: share of pictures with uniform noise levels; the rest is logit-normal.
        flip_share: share of pictures that are mirrored.
        shift: largest shift of a picture in each direction, as a share of its side; edges are repeated.
    """

    seconds: float = 1200.0
    phases: tuple[ImagePhase, ...] = field(default_factory=_phases)
    muon_lr: float = 0.015
    adam_lr: float = 6e-4
    weight_decay: float = 0.01
    ema_decay: float = 0.999
    optimizer: str = "muon"
    compile: bool = True
    gradient_checkpointing: bool = False
    class_dropout: float = 0.1
    uniform_share: float = 1.0
    flip_share: float = 0.0
    shift: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_phases(self.phases)
        if self.optimizer not in OPTIMIZERS:
            raise UserInputError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {self.optimizer!r}")
        for name in ("class_dropout", "uniform_share", "flip_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserInputError(f"{name} must be in [0, 1], got {getattr(self, name)}")
        if not 0 <= self.shift < 1:
            raise UserInputError(f"shift must be in [0, 1), got {self.shift}")

    def phase(self, progress: float) -> ImagePhase:
        """The phase that holds at `progress` in [0, 1]."""
        return phase_at(self.phases, progress)

    @property
    def side(self) -> int:
        """Side of the largest pictures."""
        return max(phase.side for phase in self.phases)


@dataclass(frozen=True)
class SamplingConfig:
    """How the finished model is shown, and what its pipeline does by default.

    Args:
        images: pictures on the contact sheet, spread over the classes.
        batch_size: pictures generated together.
        steps: denoising steps.
        guidance_scale: classifier-free guidance; 1 turns it off.
        guidance_interval: shares of noise between which guidance works.
        seed: of the noise; picture i takes seed + i.
    """

    images: int = 54
    batch_size: int = 18
    steps: int = 20
    guidance_scale: float = 2.5
    guidance_interval: tuple[float, ...] = (0.2, 0.9)
    seed: int = 1000

    def __post_init__(self) -> None:
        for name in ("images", "batch_size", "steps"):
            if getattr(self, name) < 1:
                raise UserInputError(f"{name} must be at least 1, got {getattr(self, name)}")
        if len(self.guidance_interval) != 2:
            raise UserInputError(f"guidance_interval must be two shares of noise, got {self.guidance_interval}")


@dataclass(frozen=True)
class PixelTrainConfig(Settings):
    """A whole run.

    Args:
        seed: of the weights, the order of the pictures and the noise; a run that continues another takes another one.
        reserve_seconds: end of a leg that is kept for export and samples when the schedule is fitted to the leg.
        model: shape of the transformer.
        dit: its training.
        sampling: how the result is shown.
        data_note: what the model card says about the pictures and their licence.
    """

    seed: int = 0
    reserve_seconds: float = 30.0
    model: PixelModelConfig = field(default_factory=PixelModelConfig)
    dit: PixelStageConfig = field(default_factory=PixelStageConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    data_note: str = ""
