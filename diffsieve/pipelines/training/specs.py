"""What is in a training clip: subject, motion, colour and the numbers of its path, drawn reproducibly by index.

Clip number i of a seed is always the same clip, on every device: all random numbers are hashes of (seed, i, what).
A batch is drawn in a few tensor operations, so a training loop can draw one per step and resume at any step.

Legend: B clips, S subjects, M motions, C colours.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import torch

from ...errors import UserInputError
from .captions import COLOURS, MOTIONS, caption_of
from .sprites import Sprites

BACKGROUNDS = ("gradient", "texture")
SPLITS = ("train", "heldout", "all")
# One triple in HELD_OUT_EVERY is held out, chosen by a hash of its words.
HELD_OUT_EVERY = 10


@dataclass(frozen=True)
class ClipSpec:
    """One clip, as words and numbers.

    Attributes:
        subject: A sprite name.
        motion: One of `MOTIONS`.
        colour: One of `COLOURS`, the background.
        size: In [0, 1], where in the range of sprite sizes the renderer works.
        offset: In [-1, 1], position across the direction of motion (0 is the middle).
        speed: In [0, 1], how much of the possible way, radius or growth is used.
        phase: In [0, 1), where a circle starts; below 0.5 it turns clockwise.
        background: One of `BACKGROUNDS`.
        seed: In [0, 2**31), the background's shade, direction and texture.
    """

    subject: str
    motion: str
    colour: str
    size: float = 0.5
    offset: float = 0.0
    speed: float = 0.5
    phase: float = 0.0
    background: str = "gradient"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, known in (("motion", MOTIONS), ("colour", COLOURS), ("background", BACKGROUNDS)):
            if getattr(self, name) not in known:
                raise UserInputError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        for name, low in (("size", 0), ("offset", -1), ("speed", 0), ("phase", 0)):
            if not low <= getattr(self, name) <= 1:
                raise UserInputError(f"{name} must be in [{low}, 1], got {getattr(self, name)}")
        if not 0 <= self.seed < 2**31:
            raise UserInputError(f"seed must be in [0, 2**31), got {self.seed}")


def caption(spec: ClipSpec) -> str:
    """The exact caption of a clip."""
    return caption_of(spec.subject, spec.motion, spec.colour)


@dataclass(frozen=True)
class SpecBatch:
    """B clips as tensors `(B,)`; the fields are those of `ClipSpec`, words as indices (int64), numbers as fp32.

    Attributes:
        names: Caption names that `subject` points into.
    """

    subject: torch.Tensor
    motion: torch.Tensor
    colour: torch.Tensor
    size: torch.Tensor
    offset: torch.Tensor
    speed: torch.Tensor
    phase: torch.Tensor
    background: torch.Tensor
    seed: torch.Tensor
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.subject)

    def __iter__(self) -> Iterator[ClipSpec]:
        columns = [getattr(self, field.name).tolist() for field in fields(ClipSpec)]
        for subject, motion, colour, size, offset, speed, phase, background, seed in zip(*columns, strict=True):
            words = self.names[subject], MOTIONS[motion], COLOURS[colour]
            yield ClipSpec(*words, size, offset, speed, phase, BACKGROUNDS[background], seed)

    def __getitem__(self, part: slice) -> "SpecBatch":
        """The clips of a slice, as a batch."""
        return replace(self, **{field.name: getattr(self, field.name)[part] for field in fields(ClipSpec)})

    def to(self, device: torch.device | str) -> "SpecBatch":
        """The same batch on another device."""
        return replace(self, **{field.name: getattr(self, field.name).to(device) for field in fields(ClipSpec)})

    def captions(self) -> list[str]:
        """The B exact captions."""
        triples = zip(self.subject.tolist(), self.motion.tolist(), self.colour.tolist(), strict=True)
        return [caption_of(self.names[s], MOTIONS[m], COLOURS[c]) for s, m, c in triples]

    @staticmethod
    def from_specs(specs: Sequence[ClipSpec], sprites: Sprites) -> "SpecBatch":
        """The batch of a list of specs. Raises `UserInputError` when a subject has no sprite."""
        index = {
            "subject": [sprites.index(spec.subject) for spec in specs],
            "motion": [MOTIONS.index(spec.motion) for spec in specs],
            "colour": [COLOURS.index(spec.colour) for spec in specs],
            "background": [BACKGROUNDS.index(spec.background) for spec in specs],
            "seed": [spec.seed for spec in specs],
        }
        number = {name: [getattr(spec, name) for spec in specs] for name in ("size", "offset", "speed", "phase")}
        return SpecBatch(
            **{name: torch.tensor(values, dtype=torch.int64) for name, values in index.items()},
            **{name: torch.tensor(values, dtype=torch.float32) for name, values in number.items()},
            names=sprites.names,
        )


@lru_cache(maxsize=8)
def held_out_table(names: tuple[str, ...]) -> torch.Tensor:
    """`(S, M, C)` bool: the triples never seen in training.

    A triple is held out when the first 4 bytes of SHA-256 of "subject|motion|colour", big-endian, are divisible by
    `HELD_OUT_EVERY`. It depends on the words alone, so adding subjects changes nothing for the others.
    """
    table = torch.zeros(len(names), len(MOTIONS), len(COLOURS), dtype=torch.bool)
    for s, name in enumerate(names):
        for m, motion in enumerate(MOTIONS):
            for c, colour in enumerate(COLOURS):
                digest = hashlib.sha256(f"{name}|{motion}|{colour}".encode()).digest()
                table[s, m, c] = int.from_bytes(digest[:4], "big") % HELD_OUT_EVERY == 0
    return table


@lru_cache(maxsize=32)
def _triples(names: tuple[str, ...], split: str, device: torch.device) -> torch.Tensor:
    """`(N, 3)` int64: all (subject, motion, colour) indices of a split."""
    table = held_out_table(names)
    keep = {"train": ~table, "heldout": table, "all": torch.ones_like(table)}[split]
    return keep.nonzero().to(device)


def hash_uniform(keys: torch.Tensor, count: int) -> torch.Tensor:
    """Random numbers that depend on the keys alone, the same on every device.

    A 31-bit integer hash (multiply and xor-shift rounds) of (key, column). Good enough to scatter clips; not a
    generator for statistics.

    Args:
        keys: `(B,)` int64 in [0, 2**31).
        count: Numbers per key.

    Returns:
        `(B, count)` fp32 in [0, 1), multiples of 2**-24.
    """
    mask = 2**31 - 1
    columns = torch.arange(1, count + 1, device=keys.device)
    # Odd multipliers below 2**31 keep every product inside int64.
    x = (keys[:, None] * 0x2545F491 + columns * 0x5851F42D) & mask
    for multiplier in (0x45D9F3B3, 0x119DE1F3, 0x3C6EF372 | 1):
        x = ((x ^ (x >> 15)) * multiplier) & mask
    x = x ^ (x >> 16)
    return (x >> 7).float() * 2.0**-24


def sample_spec_batch(
    count: int,
    sprites: Sprites,
    *,
    seed: int = 0,
    start: int = 0,
    split: str = "train",
    device: torch.device | str = "cpu",
) -> SpecBatch:
    """Clips number `start` to `start + count - 1` of an endless reproducible list.

    Args:
        count: B, at least 1.
        sprites: Their names are the subjects.
        seed: In [0, 2**31), which list.
        start: In [0, 2**31 - count], number of the first clip. In a training loop: step * batch size.
        split: "train", "heldout" (the triples of `held_out_table`) or "all".
        device: Where the tensors live.

    Returns:
        Subject, motion and colour uniform over the triples of the split; numbers uniform over their ranges.

    Raises:
        UserInputError: If a range above is left or the split has no triple.
    """
    if count < 1:
        raise UserInputError(f"count must be at least 1, got {count}")
    if not 0 <= seed < 2**31:
        raise UserInputError(f"seed must be in [0, 2**31), got {seed}")
    if not 0 <= start <= 2**31 - count:
        raise UserInputError(f"start must be in [0, 2**31 - count], got {start}")
    if split not in SPLITS:
        raise UserInputError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    device = torch.device(device)
    triples = _triples(sprites.names, split, device)
    if len(triples) == 0:
        raise UserInputError(f"split {split!r} must have at least one triple; {len(sprites)} sprites give none")
    clip = torch.arange(start, start + count, device=device)
    # The seed is hashed first, so that neighbouring seeds do not give shifted copies of one list.
    key = torch.tensor([seed], device=device)
    offset = (hash_uniform(key, 1)[:, 0].double() * 2**31).long()
    u = hash_uniform((clip * 0x9E3779B1 + offset) & (2**31 - 1), 7)
    pick = (u[:, 0].double() * len(triples)).long()
    subject, motion, colour = triples[pick].unbind(1)
    return SpecBatch(
        subject=subject,
        motion=motion,
        colour=colour,
        size=u[:, 1],
        offset=2 * u[:, 2] - 1,
        speed=u[:, 3],
        phase=u[:, 4],
        background=(u[:, 5] * len(BACKGROUNDS)).long(),
        seed=(u[:, 6].double() * 2**31).long(),
        names=sprites.names,
    )


def sample_specs(
    count: int, sprites: Sprites, *, seed: int = 0, start: int = 0, split: str = "train"
) -> list[ClipSpec]:
    """The clips of `sample_spec_batch` as a list."""
    return list(sample_spec_batch(count, sprites, seed=seed, start=start, split=split))
