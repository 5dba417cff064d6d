"""The output folder of a comparison: checked before any work, resumed only with the settings it was started with."""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import UserInputError, os_reason
from .files import remove_parts, write_json

SETTINGS = "settings.json"
REPORT = "report.json"
PAGE = "report.html"
RECORD = "metrics.json"
SETTINGS_SCHEMA = "diffsieve.compare.settings/1"
_SLUG_LENGTH = 40


def item_name(index: int, prompt: str, seed: int) -> str:
    """Return the name of the folder of one prompt and seed, such as `001-a-cat-moves-up-seed0`."""
    plain = unicodedata.normalize("NFKD", prompt).encode("ascii", "ignore").decode().lower()
    slug = re.sub(r"[^a-z0-9]+", "-", plain)[:_SLUG_LENGTH].strip("-")
    return "-".join(part for part in (f"{index + 1:03d}", slug, f"seed{seed}") if part)


def check_output(out: Path, *, resume: bool, overwrite: bool) -> dict[str, Any] | None:
    """Check, without writing anything, that results can go to `out`.

    Args:
        out: folder; it and its parents need not exist.
        resume: continue the run that is in there.
        overwrite: replace the run that is in there.

    Returns:
        What `settings.json` in the folder says, or `None` for a new or empty folder.

    Raises:
        UserInputError: not a folder, not writable, occupied, or not left by a comparison.
    """
    if resume and overwrite:
        raise UserInputError("give resume or overwrite, not both")
    check_writable(out)
    if not out.exists() or not any(out.iterdir()):
        return None
    if not (out / SETTINGS).is_file():
        raise UserInputError(f"out must be a new or empty folder, or one with an earlier comparison, got {out}")
    if not resume and not overwrite:
        raise UserInputError(
            f"out must be a new or empty folder, got {out} with an earlier comparison: resume continues it, "
            "overwrite replaces it"
        )
    return read_settings(out)


def check_writable(out: Path) -> None:
    """Raise `UserInputError` unless `out` is a writable folder or can be made; writes nothing."""
    place = out
    while not place.exists():
        if place.is_symlink() or place == place.parent:
            break
        place = place.parent
    if not place.is_dir():
        raise UserInputError(f"out must be a folder, got {out}: {place} is not one")
    if not os.access(place, os.W_OK | os.X_OK):
        raise UserInputError(f"out must be writable, got {out}: no permission to write in {place}")


def make_output(out: Path) -> None:
    """Make the folder `out` and its parents where they are missing; raise `UserInputError` when that fails."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserInputError(f"out must be a folder that can be written, got {out}: {os_reason(error)}") from error


def read_settings(out: Path) -> dict[str, Any]:
    """Read `settings.json`; raise `UserInputError` when it is not one of ours."""
    try:
        values = json.loads((out / SETTINGS).read_text(encoding="utf-8"))
    except ValueError:
        values = None
    keys = {"settings", "prompt", "seed"}
    if not isinstance(values, dict) or values.get("schema") != SETTINGS_SCHEMA or not keys <= values.keys():
        raise UserInputError(f"out must hold a comparison of this version, got {out} with another {SETTINGS}")
    return values


def check_same_settings(earlier: Mapping[str, Any], settings: Mapping[str, Any], out: Path) -> None:
    """Check that a run to resume has the settings of the earlier one.

    Args:
        earlier: what `settings.json` says.
        settings: of this run; a key that only the earlier run has is not looked at.
        out: folder, for the message.

    Raises:
        UserInputError: names the first setting that differs, what it was and what it is.
    """
    before = _flat(earlier["settings"])
    for key, value in sorted(_flat(settings).items()):
        if key not in before or before[key] != value:
            raise UserInputError(
                f"{key} must be {before.get(key)!r} to resume the run in {out}, got {value!r}; "
                "give another folder, or overwrite"
            )


def check_same_clips(earlier: Mapping[str, Any], prompt: Sequence[str], seed: Sequence[int], out: Path) -> None:
    """Check that a run to resume has the prompts and seeds of the earlier one; more may have been added.

    Raises:
        UserInputError: a prompt or seed is gone, or prompts stand in another order.
    """
    if list(prompt[: len(earlier["prompt"])]) != earlier["prompt"]:
        raise UserInputError(
            f"prompt must begin with those of the run to resume in {out}, {earlier['prompt']!r}, got {list(prompt)!r}"
        )
    lost = [value for value in earlier["seed"] if value not in seed]
    if lost:
        raise UserInputError(f"seed must hold those of the run to resume in {out}, {earlier['seed']}, got {list(seed)}")


@contextmanager
def exclusive(out: Path) -> Iterator[None]:
    """Hold a folder for one run; the lock ends with the process, however that ends. No lock without POSIX ones.

    Raises:
        UserInputError: another run holds it.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    handle = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserInputError(f"out must not be in use by another run, got {out}") from error
        yield
    finally:
        os.close(handle)


def start(out: Path, settings: Mapping[str, Any], prompt: Sequence[str], seed: Sequence[int]) -> None:
    """Make the folder and write its settings; a report of an earlier part of the run goes, as it no longer says all."""
    make_output(out)
    remove_parts(out)
    (out / REPORT).unlink(missing_ok=True)
    (out / PAGE).unlink(missing_ok=True)
    write_json(
        out / SETTINGS,
        {"schema": SETTINGS_SCHEMA, "settings": dict(settings), "prompt": list(prompt), "seed": list(seed)},
    )


def clear(out: Path, earlier: Mapping[str, Any], file_names: Sequence[str]) -> None:
    """Remove the files of an earlier comparison, and nothing else."""
    (out / REPORT).unlink(missing_ok=True)
    (out / PAGE).unlink(missing_ok=True)
    for index, prompt in enumerate(earlier["prompt"]):
        for seed in earlier["seed"]:
            folder = out / item_name(index, prompt, seed)
            if not folder.is_dir():
                continue
            remove_parts(folder)
            for name in file_names:
                (folder / name).unlink(missing_ok=True)
            if not any(folder.iterdir()):
                folder.rmdir()
    (out / SETTINGS).unlink(missing_ok=True)


def read_record(folder: Path) -> dict[str, Any] | None:
    """Return the record of a finished prompt and seed, or `None` when it or one of its files is missing."""
    path = folder / RECORD
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    files = record.get("files") if isinstance(record, dict) else None
    if not isinstance(files, dict) or not all((folder / name).is_file() for name in files.values()):
        return None
    return record


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Spell nested keys as `versions.torch`, with the values that JSON keeps."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = json.loads(json.dumps(value))
    return flat
