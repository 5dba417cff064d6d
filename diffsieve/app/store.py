"""The folder of finished runs: one for each set of settings, cleaned by age and size, and what the server may send."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..compare.files import atomic_path
from ..compare.folder import REPORT, exclusive
from ..errors import UserInputError, os_reason
from .errors import AppError
from .reports import fault

logger = logging.getLogger(__name__)

EXAMPLES = Path(__file__).parent / "examples"
POSTER = "poster.png"
_KEPT = "kept"
_ID = re.compile(r"[a-z0-9-]{1,64}")


@dataclass(frozen=True)
class Run:
    """A finished comparison of one prompt and seed.

    Args:
        id: name of its folder: a digest of the settings, or the name of an example.
        folder: what `compare` wrote, and poster.png.
        report: what report.json holds.
        kept: whether cleaning leaves it alone.
        example: whether it ships with diffsieve.
    """

    id: str
    folder: Path
    report: Mapping[str, Any]
    kept: bool
    example: bool

    @property
    def clip(self) -> Mapping[str, Any]:
        clip: Mapping[str, Any] = self.report["clips"][0]
        return clip

    @property
    def pictures(self) -> bool:
        """Whether it has pictures instead of clips."""
        return bool(self.report.get("pictures"))

    @property
    def what(self) -> str:
        """What to call its results."""
        return "picture" if self.pictures else "clip"

    def file(self, key: str) -> Path | None:
        """Return a file of the clip by its key in the report, such as "dense"; `None` when the run has none."""
        name = self.clip["files"].get(key)
        return None if name is None else self.folder / self.clip["folder"] / name


@dataclass(frozen=True)
class Bounds:
    """When runs go.

    Args:
        age: seconds after which a run that is not kept goes.
        size: bytes of all runs and dense clips; the oldest that are not kept go first.
        kept: runs that can be kept.
    """

    age: float = 7 * 24 * 3600.0
    size: int = 4 << 30
    kept: int = 50


class Store:
    """Finished runs under `root`, for this server alone.

    Args:
        root: private folder, made with mode 0700.
        bounds: when runs go.
        examples: folder with runs that are offered but never changed.
    """

    def __init__(self, root: Path, bounds: Bounds | None = None, examples: Path = EXAMPLES) -> None:
        self.root, self._bounds, self._examples = root.expanduser(), bounds or Bounds(), examples
        self._runs, self.dense_clips, self._work = (self.root / name for name in ("runs", "dense", "work"))
        self.served = Path()
        self._lock: AbstractContextManager[None] | None = None
        self._passed_over: set[Path] = set()

    def open(self) -> None:
        """Make the folders, take them for this process, remove what a killed server left unfinished, and `clean`.

        Raises:
            UserInputError: the folder cannot be used, or another server uses it.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.root.chmod(0o700)
        except OSError as error:
            raise UserInputError(f"folder must be writable, got {self.root}: {os_reason(error)}") from None
        lock = exclusive(self.root)
        try:
            lock.__enter__()
        except UserInputError:
            raise UserInputError(f"folder must not be in use by another server, got {self.root}") from None
        self._lock = lock
        self.served = Path(tempfile.mkdtemp(prefix="diffsieve-app-"))
        shutil.rmtree(self._work, ignore_errors=True)
        for folder in (self._runs, self.dense_clips, self._work):
            folder.mkdir(exist_ok=True)
        self.clean()  # a server that makes no run would keep old ones for ever

    def close(self) -> None:
        """Give the folder free and remove what was served."""
        if self._lock is not None:
            shutil.rmtree(self.served, ignore_errors=True)
            self._lock.__exit__(None, None, None)
            self._lock = None

    @contextmanager
    def new_run(self, run_id: str) -> Iterator[Path]:
        """Give a folder that becomes the run when the block ends well, and vanishes otherwise."""
        work = self._work / run_id
        shutil.rmtree(work, ignore_errors=True)
        try:
            yield work
            target = self._runs / run_id
            if target.exists():
                shutil.rmtree(target)
            os.replace(work, target)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def get(self, run_id: Any) -> Run | None:
        """Return a run, or `None`. The id is looked up among the folders that are there, never made into a path."""
        if not isinstance(run_id, str) or not _ID.fullmatch(run_id):
            return None
        for folder in self._folders():
            if folder.name == run_id:
                return self._read(folder)
        return None

    def find(self, run_id: Any) -> Run:
        """Return a run.

        Raises:
            AppError: no such run, or no longer.
        """
        run = self.get(run_id)
        if run is None:
            raise AppError("this run is not there any more; run it again")
        return run

    def runs(self) -> list[Run]:
        """Return all runs, the newest first, the examples last."""
        found = [run for run in map(self._read, self._folders()) if run is not None]
        # Times in reports are whole seconds; that of the folder tells runs of one second apart.
        return sorted(
            found,
            key=lambda run: (not run.example, run.report["created"], run.folder.stat().st_mtime),
            reverse=True,
        )

    def keep(self, run_id: Any, kept: bool) -> Run:
        """Set whether cleaning leaves a run alone.

        Raises:
            AppError: no such run, an example, or too many kept ones.
        """
        run = self.find(run_id)
        if run.example:
            raise AppError("examples are always kept")
        if kept and not run.kept and sum(other.kept for other in self.runs()) >= self._bounds.kept:
            raise AppError(f"at most {self._bounds.kept} runs can be kept: give one free first")
        marker = run.folder / _KEPT
        if kept:
            marker.touch()
        else:
            marker.unlink(missing_ok=True)
        return self.find(run_id)

    def publish(self, run: Run, key: str) -> Path | None:
        """Return a copy of a run's file that the server may send; `None` when the run has none."""
        source = run.folder / POSTER if key == "poster" else run.folder / REPORT if key == "report" else run.file(key)
        if source is None or not source.is_file():
            return None
        target = self.served / "runs" / run.id / source.name
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(source, target)
            except OSError:  # another file system
                with atomic_path(target) as part:
                    shutil.copyfile(source, part)
        return target

    def publish_text(self, run: Run, name: str, text: str) -> Path:
        """Return a text file, such as a script, beside the published files of a run."""
        target = self.served / "runs" / run.id / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(target) as part:
            part.write_text(text, encoding="utf-8")
        return target

    def clean(self) -> None:
        """Remove runs and dense clips that are too old, and the oldest while all together are too large."""
        now = time.time()
        runs = [folder for folder in self._runs.iterdir() if folder.is_dir()]
        entries = [(folder.stat().st_mtime, _size(folder), folder) for folder in runs]
        entries += [(path.stat().st_mtime, path.stat().st_size, path) for path in self.dense_clips.iterdir()]
        total = sum(size for _, size, _ in entries)
        for stamp, size, path in sorted(entries):
            if (path / _KEPT).exists() or (now - stamp <= self._bounds.age and total <= self._bounds.size):
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
                shutil.rmtree(self.served / "runs" / path.name, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
            total -= size

    def _folders(self) -> list[Path]:
        own = list(self._runs.iterdir()) if self._runs.is_dir() else []
        shipped = list(self._examples.iterdir()) if self._examples.is_dir() else []
        return [folder for folder in [*own, *shipped] if folder.is_dir()]

    def _read(self, folder: Path) -> Run | None:
        report: Any = None
        try:
            report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
            wrong = fault(report)
        except (OSError, ValueError, RecursionError) as error:
            wrong = str(error)
        if wrong is not None:
            if folder not in self._passed_over:  # once, not at every list
                self._passed_over.add(folder)
                logger.warning("%s is no finished run and is not listed: %s", folder, wrong)
            return None
        return Run(folder.name, folder, report, (folder / _KEPT).exists(), folder.parent == self._examples)


def run_digest(settings: Mapping[str, Any]) -> str:
    """Return 16 hexadecimal digits that stand for settings: equal ones give the same run."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
