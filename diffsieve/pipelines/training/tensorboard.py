"""The stage log as TensorBoard scalars, where the package tensorboard is installed."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ...errors import UserInputError

if TYPE_CHECKING:
    from .loop import LogEntry


class TensorBoardLog:
    """Writes every log entry as scalars; used as a context manager.

    Args:
        folder: of the log; None writes nothing.

    Raises:
        UserInputError: the package tensorboard is not installed.
    """

    def __init__(self, folder: Path | None) -> None:
        self._writer: Any = None
        if folder is None:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserInputError(
                "tensorboard must be left out, or the package be installed: pip install tensorboard"
            ) from None
        self._writer = SummaryWriter(str(folder))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.close()

    def report(self, entry: LogEntry) -> None:
        """Write one log entry at its step."""
        if self._writer is None:
            return
        values = {
            "progress": entry.progress,
            "samples_per_second": entry.samples_per_second,
            "memory_gib": entry.memory_gib,
            "learning_rate": entry.learning_rate,
            **entry.losses,
            **entry.details,
        }
        for name, value in values.items():
            self._writer.add_scalar(name, value, entry.step)
