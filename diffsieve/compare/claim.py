"""What a long run is about, in one file that all its processes share: written once, then compared."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import UserInputError
from .folder import check_same_settings


def claim_settings(target: Path, schema: str, settings: Mapping[str, Any]) -> None:
    """Write the settings of a run, or check that they are those of the file that is there.

    Safe for processes that start together: the file appears whole, and only the first one writes it.

    Raises:
        UserInputError: a setting differs, or the file is another one.
    """
    part = _written_beside(target, schema, settings)
    try:
        os.link(part, target)
    except FileExistsError:
        pass
    finally:
        part.unlink()
    check_same_settings({"settings": read_settings(target, schema)}, settings, target.parent)


def replace_settings(target: Path, schema: str, settings: Mapping[str, Any]) -> None:
    """Write settings in the place of those that are there; of processes that start together the last one's stay."""
    os.replace(_written_beside(target, schema, settings), target)


def read_settings(path: Path, schema: str) -> dict[str, Any]:
    """Read a file of `claim_settings` or `replace_settings`.

    Raises:
        UserInputError: it is missing or another one.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserInputError(f"{path} must be the settings of a run, and cannot be read: {error}") from None
    if not isinstance(values, dict) or values.get("schema") != schema:
        raise UserInputError(f"{path} must be the settings of a run ({schema}), got another file")
    return values["settings"]


def _written_beside(target: Path, schema: str, settings: Mapping[str, Any]) -> Path:
    """Return a file of this process alone that holds what `target` is to hold."""
    part = target.with_name(f".{target.name}.{os.getpid()}.diffsieve-part")
    part.write_text(json.dumps({"schema": schema, "settings": settings}, indent=2) + "\n", encoding="utf-8")
    return part
