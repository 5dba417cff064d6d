"""The emoji picture set: one folder per category, made from two npm packages.

The pictures come from `@lobehub/fluent-emoji-3d`, their names and categories from `emoji-datasource-google`. They are
written as they are (.webp with transparency), so the set is small; the reader puts them on white.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ....errors import UserInputError
from ....folders import replace_folder
from ..npm import EMOJI_NAMES, FLUENT_3D, check_archive, read_members

_ASSETS = PurePosixPath("package/assets")
_TABLE = PurePosixPath("package/emoji.json")
_MAX_PICTURE_BYTES = 2**20
_MAX_TABLE_BYTES = 2**23
# Skin tones on their own are no pictures of anything.
_NO_CATEGORY = "Component"
_SKIN_TONE = re.compile(r"1f3f[b-f]")
# A rude gesture, which nobody should meet in samples of a public model.
_LEFT_OUT = ("1f595",)


@dataclass(frozen=True)
class EmojiSet:
    """What was written: pictures of each category, and pictures of the package without a name in the table."""

    counts: dict[str, int]
    unknown: int

    def __len__(self) -> int:
        return sum(self.counts.values())


def read_names(table: bytes) -> dict[str, tuple[str, str]]:
    """Code points joined by dashes, in lower case -> (name, category), skin-tone variants left out.

    Raises:
        UserInputError: the table has another form.
    """
    found: dict[str, tuple[str, str]] = {}
    try:
        for entry in json.loads(table):
            if entry["category"] == _NO_CATEGORY:
                continue
            for code in (entry["unified"], entry.get("non_qualified")):
                if code:
                    found[code.lower()] = (entry["name"] or entry["short_name"], entry["category"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserInputError(f"emoji.json must list emoji with unified, name and category: {error!r}") from error
    return found


def build_emoji(pictures: Path, names: Path, out: Path, *, check: bool = True) -> EmojiSet:
    """Write the set as `out/<category>/<code>-<name>.webp`.

    Args:
        pictures: archive of the package of pictures.
        names: archive of the package with the table of names.
        out: folder, which must not exist or be empty. It appears complete or not at all.
        check: compare the checksums of the archives.

    Raises:
        UserInputError: an archive is missing or not the expected one, or `out` is in use or cannot be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserInputError(f"out must be a new or empty folder, got {out}")
    if check:
        check_archive(pictures, FLUENT_3D.sha256, FLUENT_3D.command)
        check_archive(names, EMOJI_NAMES.sha256, EMOJI_NAMES.command)
    tables = read_members(names, lambda path: path == _TABLE, _MAX_TABLE_BYTES)
    if _TABLE not in tables:
        raise UserInputError(f"{names} must hold {_TABLE}")
    table = read_names(tables[_TABLE])
    encoded = read_members(pictures, lambda path: path.parent == _ASSETS and path.suffix == ".webp", _MAX_PICTURE_BYTES)
    counts: Counter[str] = Counter()
    known = {path.stem for path in encoded} & set(table)
    unknown = [path.stem for path in encoded if path.stem not in known and not _SKIN_TONE.search(path.stem)]

    def write(folder: Path) -> None:
        for path, content in encoded.items():
            if path.stem not in known or path.stem.startswith(_LEFT_OUT):
                continue
            name, category = table[path.stem]
            target = folder / category / f"{path.stem}-{_slug(name)}.webp"
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(content)
            counts[category] += 1
        if not counts:
            raise UserInputError(f"{pictures} must hold pictures of the emoji in {names}, got none")

    try:
        replace_folder(out, write)
    except OSError as error:
        raise UserInputError(f"out must be a writable folder, got {out}: {error}") from error
    return EmojiSet(dict(sorted(counts.items())), len(unknown))


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40]
