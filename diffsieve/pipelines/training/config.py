"""Settings of a mini-wan training run: one frozen dataclass per part, read from TOML or JSON, with dotted overrides."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...errors import UserInputError
from .settings import Settings
from .stage_config import StageConfig, check_phases, phase_at

FRAMES_PER_LATENT = 4
PIXELS_PER_LATENT = 8
FUSIONS = ("compile", "triton", "none")
MAX_BATCH = 512  # clips that one process may draw in a step


@dataclass(frozen=True)
class ClipSize:
    """Size of the clips of one training step.

    Args:
        frames: Frames of a clip, `1 + 4 * k`.
        height: Pixels, a multiple of 16.
        width: Pixels, a multiple of 16.
        batch_size: Clips per process and step.
        sprite_px: Smallest and largest edge of a sprite in pixels; None = the renderer's share of the shorter side.
    """

    frames: int = 25
    height: int = 192
    width: int = 192
    batch_size: int = 32
    sprite_px: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.frames < 1 or self.frames % FRAMES_PER_LATENT != 1:
            raise UserInputError(f"frames must be 1 + 4 * k with k >= 0, got {self.frames}")
        for name in ("height", "width"):
            if getattr(self, name) < 16 or getattr(self, name) % 16:
                raise UserInputError(f"{name} must be a positive multiple of 16, got {getattr(self, name)}")
        if not 1 <= self.batch_size <= MAX_BATCH:
            raise UserInputError(f"batch_size must be in [1, {MAX_BATCH}], got {self.batch_size}")
        if self.sprite_px is not None and len(self.sprite_px) != 2:
            raise UserInputError(f"sprite_px must be a smallest and a largest edge, got {self.sprite_px}")

    @property
    def latent_grid(self) -> tuple[int, int, int]:
        """Latent frames, height, width: with patch (1, 1, 1) also the token grid of the transformer."""
        return (
            (self.frames - 1) // FRAMES_PER_LATENT + 1,
            self.height // PIXELS_PER_LATENT,
            self.width // PIXELS_PER_LATENT,
        )


@dataclass(frozen=True)
class Phase(ClipSize):
    """A stretch of a stage with one clip size.

    Args:
        until: Share of the stage, in (0, 1], at which the phase ends. The last phase ends at 1.
        shift: Timestep shift of the flow sigmas (more weight on high noise); transformer stage only.
        long_text_share: Share of the steps with captions padded to `long_text_length`; transformer stage only.
        extra: A second, larger clip size, used by every `extra_every`-th step, always with long captions.
        extra_every: See `extra`; 0 = never.
    """

    until: float = 1.0
    shift: float = 3.0
    long_text_share: float = 0.0
    extra: ClipSize | None = None
    extra_every: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.until <= 1:
            raise UserInputError(f"until must be in (0, 1], got {self.until}")
        if self.shift <= 0:
            raise UserInputError(f"shift must be positive, got {self.shift}")
        if not 0 <= self.long_text_share <= 1:
            raise UserInputError(f"long_text_share must be in [0, 1], got {self.long_text_share}")
        if self.extra_every < 0 or (self.extra is None) != (self.extra_every == 0):
            raise UserInputError(f"extra and extra_every go together, got {self.extra} and {self.extra_every}")


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the three networks and the default of the scheduler."""

    vae_base_dim: int = 32
    vae_dim_mult: tuple[int, ...] = (1, 2, 2)
    vae_res_blocks: int = 2
    latent_channels: int = 16
    layers: int = 8
    heads: int = 6
    head_dim: int = 64
    ffn_dim: int = 768
    text_dim: int = 192
    text_layers: int = 2
    text_heads: int = 3
    text_head_dim: int = 64
    text_ffn_dim: int = 384
    rope_max_seq_len: int = 128
    flow_shift: float = 3.0


@dataclass(frozen=True)
class ClipStageConfig(StageConfig):
    """What the stages of mini-wan share.

    Args:
        phases: Clip sizes in order.
    """

    phases: tuple[Phase, ...] = (Phase(),)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_phases(self.phases)

    def phase(self, progress: float) -> Phase:
        """The phase that holds at `progress` in [0, 1]."""
        return phase_at(self.phases, progress)

    def sizes(self, progress: float = 1.0) -> list[tuple[int, int, int]]:
        """(frames, height, width) of the clips used up to `progress`, extra sizes included, in order."""
        found: dict[tuple[int, int, int], None] = {}
        start = 0.0
        for phase in self.phases:
            if start >= progress:
                break
            for size in (phase, phase.extra):
                if size is not None:
                    found[(size.frames, size.height, size.width)] = None
            start = phase.until
        return list(found)


def _vae_phases() -> tuple[Phase, ...]:
    return (Phase(frames=17, height=128, width=128, batch_size=24, sprite_px=(56.0, 74.0)),)


def _decoder_phases() -> tuple[Phase, ...]:
    return (Phase(frames=25, height=192, width=192, batch_size=12),)


def _dit_phases() -> tuple[Phase, ...]:
    return (
        Phase(height=128, width=128, batch_size=64, sprite_px=(58.0, 74.0), until=0.5, shift=1.8, long_text_share=1.0),
        Phase(height=192, width=192, batch_size=32, long_text_share=0.9),
    )


@dataclass(frozen=True)
class VaeConfig(ClipStageConfig):
    """The autoencoder: all of it in the first stage, or the decoder alone.

    Args:
        fusion: How norm and SiLU of the residual blocks are fused on a GPU: "compile" (static graphs, half a minute of
            compilation for each clip size), "triton" (a kernel of this project, no compilation), "none". On a CPU
            nothing is fused.
        fast_share: Share of the clips that show a fast motion (circle, bounces), beyond their part in the rest.
        alpha_weight: Extra weight of the L1 and L2 terms where the sprite covers the picture.
        gradient_weight: Weight of the L1 distance between spatial differences (sharp edges).
        kl_weight: Weight of the KL term, mean over latent values; no part of the loss when only the decoder is trained.
        latent_noise: Noise added to the latents before decoding, relative to their spread: makes the decoder forgive
            small errors of the transformer.
        min_ceiling: Share of reconstructed clips whose subject the judge must see before a run goes on to the
            transformer: nothing that the transformer learns on poor latents can be used later.
    """

    seconds: float = 240.0
    phases: tuple[Phase, ...] = field(default_factory=_vae_phases)
    hold: float = 0.6
    ema_decay: float = 0.99
    fusion: str = "compile"
    fast_share: float = 0.0
    alpha_weight: float = 4.0
    gradient_weight: float = 1.0
    kl_weight: float = 2e-4
    latent_noise: float = 0.05
    min_ceiling: float = 0.98

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fusion not in FUSIONS:
            raise UserInputError(f"fusion must be one of {', '.join(FUSIONS)}, got {self.fusion!r}")
        for name in ("fast_share", "min_ceiling"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserInputError(f"{name} must be in [0, 1], got {getattr(self, name)}")


@dataclass(frozen=True)
class DecoderConfig(VaeConfig):
    """The decoder alone; settings as for the autoencoder, with a gentler peak: the weights are trained already."""

    seconds: float = 90.0
    phases: tuple[Phase, ...] = field(default_factory=_decoder_phases)
    muon_lr: float = 0.01
    adam_lr: float = 5e-4
    hold: float = 0.3
    fast_share: float = 0.5


@dataclass(frozen=True)
class DitConfig(ClipStageConfig):
    """Transformer and text encoder together.

    Args:
        compile: Compile the transformer's blocks. Steps with short captions and those of an extra clip size run
            eagerly: they are too few to be worth graphs of their own.
        caption_dropout: Share of clips trained on the empty caption, for guidance.
        uniform_share: Share of clips with uniform sigmas; the rest is logit-normal.
        text_length: Length to which caption embeddings are zero-padded in steps with short captions.
        long_text_length: The stock default length, so that it works too.
        reuse: How often a clip is used, each time with other noise, sigma and caption dropout: encoding clips is a
            third of the work otherwise. Batch sizes must be multiples of it.
        reuse_lag: Steps between two uses.
    """

    seconds: float = 800.0
    phases: tuple[Phase, ...] = field(default_factory=_dit_phases)
    muon_lr: float = 0.015
    adam_lr: float = 6e-4
    weight_decay: float = 0.02
    compile: bool = True
    caption_dropout: float = 0.1
    uniform_share: float = 0.25
    text_length: int = 32
    long_text_length: int = 512
    reuse: int = 4
    reuse_lag: int = 25

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("caption_dropout", "uniform_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserInputError(f"{name} must be in [0, 1], got {getattr(self, name)}")
        for name in ("text_length", "reuse", "reuse_lag"):
            if getattr(self, name) < 1:
                raise UserInputError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.long_text_length < self.text_length:
            raise UserInputError(
                f"long_text_length must be at least text_length ({self.text_length}), got {self.long_text_length}"
            )
        sizes = [size for phase in self.phases for size in (phase, phase.extra) if size is not None]
        for size in sizes:
            if size.batch_size % self.reuse:
                raise UserInputError(f"batch_size must be a multiple of reuse ({self.reuse}), got {size.batch_size}")


@dataclass(frozen=True)
class EvaluationConfig:
    """How a finished model is measured.

    Args:
        prompts: Held-out prompts.
        size: Clip size; its batch size is the number of prompts per pipeline call.
        steps: Denoising steps.
        guidance_scale: Classifier-free guidance.
        max_sequence_length: Passed to the pipeline.
        seed: Seed of the first prompt's noise; prompt i takes seed + i.
    """

    prompts: int = 128
    size: ClipSize = field(default_factory=ClipSize)
    steps: int = 14
    guidance_scale: float = 4.0
    max_sequence_length: int = 512
    seed: int = 1000

    def __post_init__(self) -> None:
        for name in ("prompts", "steps", "max_sequence_length"):
            if getattr(self, name) < 1:
                raise UserInputError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class TrainConfig(Settings):
    """A whole run.

    Args:
        seed: Of the weights and the training clips; a continued run takes another one, to see other clips.
        reserve_seconds: End of a leg that is kept for export and measurement when the schedule is fitted to the leg.
        model: Sizes of the networks.
        vae: First stage.
        decoder: Decoder alone: encoder and latent statistics stay, so that a trained transformer stays valid.
        dit: Transformer and text encoder.
        evaluation: How the result is measured.
    """

    seed: int = 0
    reserve_seconds: float = 40.0
    model: ModelConfig = field(default_factory=ModelConfig)
    vae: VaeConfig = field(default_factory=VaeConfig)
    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    dit: DitConfig = field(default_factory=DitConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
