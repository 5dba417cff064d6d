"""Packages of the npm registry that hold pictures: fetched by name, checked, read as archives, never unpacked."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ...errors import UserInputError

_PACK_TIMEOUT_S = 600


@dataclass(frozen=True)
class Package:
    """One version of a package.

    Args:
        name: with its version, as npm takes it.
        file: that `npm pack` writes.
        sha256: of that file, in hex.
    """

    name: str
    file: str
    sha256: str

    @property
    def command(self) -> str:
        """What a user runs to get it by hand."""
        return f"npm pack {self.name}"


FLUENT_3D = Package(
    "@lobehub/fluent-emoji-3d@1.1.0",
    "lobehub-fluent-emoji-3d-1.1.0.tgz",
    "c1bb7eee7de090205a232518a9ab4adb3df458bfbe8a1f78232991194c8b2e58",
)
EMOJI_NAMES = Package(
    "emoji-datasource-google@16.0.0",
    "emoji-datasource-google-16.0.0.tgz",
    "fb5fd131b362aab7a55542d2a147a79708cce0a8b1c1bbacd470172708b5c438",
)


def fetch_package(package: Package, folder: Path) -> Path:
    """The archive of a package in `folder`, fetched there with `npm pack` when it is missing.

    Raises:
        UserInputError: the archive is missing and npm is not installed or fails. The message has the command.
    """
    archive = folder / package.file
    if archive.is_file():
        return archive
    npm = shutil.which("npm")
    if npm is None:
        raise UserInputError(f"{archive} is missing and npm is not installed; run `{package.command}` in {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(
            [npm, "pack", "--ignore-scripts", package.name],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=_PACK_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UserInputError(f"`{package.command}` in {folder} took longer than {_PACK_TIMEOUT_S} s") from None
    if done.returncode != 0 or not archive.is_file():
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserInputError(f"`{package.command}` in {folder} failed with exit code {done.returncode}: {last}")
    return archive


def check_archive(archive: Path, sha256: str, command: str) -> None:
    """Raise `UserInputError` when an archive is missing or is not the expected one."""
    if not archive.is_file():
        raise UserInputError(f"package archive {archive} is missing; run `{command}` in {archive.parent}")
    with archive.open("rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    if got != sha256:
        raise UserInputError(f"{archive} must have sha256 {sha256}, got {got}; delete it and fetch it again")


def read_members(archive: Path, wanted: Callable[[PurePosixPath], bool], max_bytes: int) -> dict[PurePosixPath, bytes]:
    """The content of the wanted members of a .tgz archive, read in memory.

    Args:
        archive: the file.
        wanted: whether to read a member, by its path.
        max_bytes: largest size of one.

    Raises:
        UserInputError: the archive is damaged, holds a path that leads out of it, or a wanted member is too large.
    """
    found = {}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                path = PurePosixPath(member.name)
                if path.is_absolute() or ".." in path.parts or not (member.isfile() or member.isdir()):
                    raise UserInputError(f"{archive} must hold plain files inside it, got {member.name!r}")
                if not member.isfile() or not wanted(path):
                    continue
                if member.size > max_bytes:
                    raise UserInputError(f"{member.name} must have at most {max_bytes} bytes, got {member.size}")
                file = tar.extractfile(member)
                assert file is not None  # a plain file, as checked above
                found[path] = file.read()
    except FileNotFoundError:
        raise UserInputError(f"package archive {archive} is missing") from None
    except (tarfile.TarError, EOFError, OSError) as error:
        raise UserInputError(f"{archive} must be a .tgz archive: {error}") from error
    return found
