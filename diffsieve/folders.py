"""Folders that appear complete or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from .errors import DiffsieveError


def replace_folder(out: Path, write: Callable[[Path], object], *, max_bytes: int | None = None) -> int:
    """Call `write(temporary_folder)` and move the result to `out`, in place of what was there.

    Args:
        out: the folder.
        write: fills a folder that it may have to create.
        max_bytes: largest size of the result.

    Returns:
        Bytes of the folder.

    Raises:
        DiffsieveError: the folder would be larger than `max_bytes`; nothing is replaced then.
        OSError: it cannot be written, as on a full disk; nothing is replaced then, nothing is left.
    """
    partial, old = out.with_name(f".{out.name}.part"), out.with_name(f".{out.name}.old")
    if old.exists() and not out.exists():  # an earlier call was killed between the two renames
        os.replace(old, out)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        write(partial)
        for path in [partial, *partial.rglob("*")]:
            # safetensors makes files that only their owner may read
            path.chmod(0o755 if path.is_dir() else 0o644)
        size = sum(file.stat().st_size for file in partial.rglob("*") if file.is_file())
        if max_bytes is not None and size > max_bytes:
            raise DiffsieveError(f"the folder {out.name} must have at most {max_bytes} bytes, got {size}")
        shutil.rmtree(old, ignore_errors=True)
        if out.exists():
            os.replace(out, old)
        os.replace(partial, out)
        shutil.rmtree(old, ignore_errors=True)
    except Exception as error:
        if type(error).__name__ == "SafetensorError":  # its writer has no OSError for a full disk
            raise OSError(f"{out} cannot be written: {error}") from error
        raise
    finally:
        if old.exists() and not out.exists():  # broken off between the two renames
            os.replace(old, out)
        shutil.rmtree(partial, ignore_errors=True)
    return size
