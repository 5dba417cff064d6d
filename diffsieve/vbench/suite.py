"""The official prompt suite of VBench (Huang et al., CVPR 2024), read from its package or a file."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import UserInputError, os_reason

DIMENSIONS = (
    "subject_consistency", "background_consistency", "temporal_flickering", "motion_smoothness", "dynamic_degree",
    "aesthetic_quality", "imaging_quality", "object_class", "multiple_objects", "human_action", "color",
    "spatial_relationship", "scene", "temporal_style", "appearance_style", "overall_consistency",
)  # fmt: skip
SCORED_VIDEOS = 5
"""VBench 0.1.5 looks for the videos 0 to 4 of each prompt."""

_FULL_INFO = "VBench_full_info.json"
_WHERE = "import importlib.util; found = importlib.util.find_spec('vbench'); print(found.origin if found else '')"


@dataclass(frozen=True)
class Suite:
    """Entries of the official list.

    Attributes:
        entries: as in `VBench_full_info.json`: `prompt_en`, `dimension`, and what some dimensions need beside it.
        source: file that they came from.
        sha256: of that file.
    """

    entries: tuple[dict[str, Any], ...]
    source: str
    sha256: str

    @property
    def prompts(self) -> tuple[str, ...]:
        """The prompts, each once, in their order."""
        return tuple(dict.fromkeys(entry["prompt_en"] for entry in self.entries))

    def prompts_of(self, dimension: str) -> tuple[str, ...]:
        """The prompts that a dimension is scored on."""
        found = (entry["prompt_en"] for entry in self.entries if dimension in entry["dimension"])
        return tuple(dict.fromkeys(found))

    def select(self, dimensions: Sequence[str] = (), limit: int | None = None) -> Suite:
        """Return the part for some dimensions, and of it `limit` prompts, spread evenly.

        Args:
            dimensions: of `DIMENSIONS`; empty for all.
            limit: prompts; `None` for all.

        Raises:
            UserInputError: an unknown dimension, or more prompts than there are.
        """
        if unknown := [name for name in dimensions if name not in DIMENSIONS]:
            raise UserInputError(f"dimension must be one of {', '.join(DIMENSIONS)}, got {unknown[0]!r}")
        entries = [e for e in self.entries if not dimensions or set(dimensions) & set(e["dimension"])]
        part = Suite(tuple(entries), self.source, self.sha256)
        if limit is None:
            return part
        prompts = part.prompts
        if not 1 <= limit <= len(prompts):
            raise UserInputError(
                f"limit must be from 1 to {len(prompts)}, the prompts of these dimensions, got {limit}"
            )
        kept = {prompts[(2 * i + 1) * len(prompts) // (2 * limit)] for i in range(limit)}
        return Suite(tuple(e for e in entries if e["prompt_en"] in kept), self.source, self.sha256)


def load_suite(full_info: Path | None = None, python: str | None = None) -> Suite:
    """Read the official list.

    VBench needs an environment of its own (it pins packages that diffusers cannot use), so the list is looked for in a
    given file, in the environment of a given interpreter, or in this one; the package is not imported.

    Args:
        full_info: `VBench_full_info.json`.
        python: interpreter of an environment with the package.

    Raises:
        UserInputError: not found, or not such a list.
    """
    path = full_info if full_info is not None else _installed(python)
    try:
        content = path.read_bytes()
        entries = json.loads(content)
    except (OSError, ValueError) as error:
        raise UserInputError(f"full_info must be a {_FULL_INFO}, and {path} cannot be read: {error}") from None
    well_formed = isinstance(entries, list) and all(
        isinstance(e, dict)
        and isinstance(e.get("prompt_en"), str)
        and isinstance(e.get("dimension"), list)
        and set(e["dimension"]) <= set(DIMENSIONS)
        for e in entries
    )
    if not well_formed or not entries:
        raise UserInputError(f"full_info must be a list of prompts with dimensions as in {_FULL_INFO}, got {path}")
    if bad := [e["prompt_en"] for e in entries if "/" in e["prompt_en"] or "\0" in e["prompt_en"]]:
        raise UserInputError(f"full_info must have prompts that can name a file, got {bad[0]!r}")
    return Suite(tuple(entries), str(path), hashlib.sha256(content).hexdigest())


def video_name(prompt: str, index: int) -> str:
    """Return the official file name: the prompt unchanged, and the number of the video."""
    return f"{prompt}-{index}.mp4"


def _installed(python: str | None) -> Path:
    if python is None:
        found = find_spec("vbench")
        origin = None if found is None else found.origin
    else:
        origin = ask_python(python, _WHERE)
    if not origin:
        where = "this environment" if python is None else f"that of {python}"
        raise UserInputError(
            f"the package vbench is not in {where}: name an interpreter that has it (python), or its {_FULL_INFO} "
            "(full_info)"
        )
    return Path(origin).parent / _FULL_INFO


def ask_python(python: str, code: str) -> str:
    """Return what an interpreter prints for a line of code.

    Raises:
        UserInputError: it cannot be run.
    """
    try:
        done = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL
        )
    except OSError as error:
        raise UserInputError(f"python must be an interpreter, and {python} cannot be run: {os_reason(error)}") from None
    except subprocess.CalledProcessError as error:
        message = (error.stderr or "").strip().splitlines()
        raise UserInputError(
            f"python must be an interpreter, {python} fails: {message[-1] if message else ''}"
        ) from None
    return done.stdout.strip()
