"""Prompts of a study where the user gives none."""

from __future__ import annotations

from typing import Any

from ..errors import UserInputError
from ..pipelines.defaults import MINI_WAN_FOLDER


def held_out_prompts(count: int) -> tuple[str, ...]:
    """Return captions of `count` triples of subject, motion and colour that mini-wan never saw, spread over all."""
    from ..pipelines.training.captions import COLOURS, MOTIONS, caption_of
    from ..pipelines.training.specs import held_out_table
    from ..pipelines.training.sprites import load_subjects

    names = tuple(load_subjects())
    triples = held_out_table(names).nonzero().tolist()
    if not 0 < count <= len(triples):
        raise UserInputError(f"prompts must be from 1 to {len(triples)}, got {count}")
    picked = [triples[(2 * i + 1) * len(triples) // (2 * count)] for i in range(count)]
    return tuple(caption_of(names[s], MOTIONS[m], COLOURS[c]) for s, m, c in picked)


def study_prompts(pipe: Any, given: tuple[str, ...], count: int) -> tuple[str, ...]:
    """Return the given prompts, or held-out ones of mini-wan.

    Raises:
        UserInputError: none given for another model.
    """
    if given:
        return given
    if str(pipe.name_or_path) != str(MINI_WAN_FOLDER):
        raise UserInputError("prompt or prompt_file must be given for this model: only mini-wan has prompts of its own")
    return held_out_prompts(count)
