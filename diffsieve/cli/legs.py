"""What commands share that run in parts: `--shard`, `--max-seconds`, and the exit code of a leg that paused."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..compare.shards import Deadline, Shard

EXIT_PAUSED = 3

_LEGS = "Long runs"

ShardFlag = Annotated[
    str | None,
    typer.Option(
        "--shard",
        metavar="I/N",
        help="This process does every N-th item from the I-th, from 0.",
        show_default="as torchrun says, else all",
        rich_help_panel=_LEGS,
    ),
]
MaxSeconds = Annotated[
    float | None,
    typer.Option(
        "--max-seconds",
        help="Stop in time, between two pieces of work, with exit code 3; the same command goes on.",
        rich_help_panel=_LEGS,
    ),
]


def start_leg(shard: str | None, max_seconds: float | None) -> "tuple[Shard, Deadline]":
    """Read the two flags; the time runs from here, before the model is loaded."""
    started = time.monotonic()
    from ..compare.shards import Deadline, resolve_shard

    return resolve_shard(shard), Deadline(max_seconds, started)


def end_leg(result: Mapping[str, Any]) -> None:
    """Leave with exit code 3 when this process has work left."""
    if result["missing"]:
        raise typer.Exit(EXIT_PAUSED)


def say(line: str) -> None:
    """Tell a line of progress on stderr."""
    typer.echo(line, err=True)


def leg_text(result: Mapping[str, Any], what: str, report: str | None = None) -> str:
    """Say for people where a run stands.

    Args:
        result: with `out`, `done`, `missing` and `other_shards_missing`.
        what: the pieces of work.
        report: the files that are written when all are there, if any.
    """
    lines = [f"{result['done']} {what} in {result['out']}"]
    if result["missing"]:
        lines.append(f"{result['missing']} left for this process: the same command goes on")
    if result["other_shards_missing"]:
        lines.append(f"{result['other_shards_missing']} left for other shards")
    if report is not None and not result["missing"] and not result["other_shards_missing"]:
        lines.append(f"all there: {report}")
    return "\n".join(lines)
