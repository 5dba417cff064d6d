"""`python -m diffsieve.pipelines.training`: the training run without the command line's dependencies.

Started by `accelerate launch --num_processes N -m diffsieve.pipelines.training ...` it trains on N GPUs.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path

from diffsieve.errors import DiffsieveError

from .config import TrainConfig
from .loop import LogEntry
from .run import STAGES, train_mini_wan

logger = logging.getLogger(__name__)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m diffsieve.pipelines.training", description="Train mini-wan.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--sprites", type=Path, required=True, help="file of `diffsieve data sprites`")
    parser.add_argument("--stage", choices=STAGES, default="all")
    parser.add_argument("--settings", type=Path, help="TOML or JSON file")
    parser.add_argument("--set", action="append", default=[], metavar="PART.NAME=VALUE", help="override one setting")
    parser.add_argument("--max-seconds", type=float, help="length of this leg")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--start-from", type=Path, help="folder of averaged weights for the second stage")
    parser.add_argument("--unmeasured", action="store_true", help="do not measure the autoencoder after its stage")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    for noisy in ("httpx", "diffusers", "transformers"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        summary = train_mini_wan(
            arguments.out,
            arguments.sprites,
            TrainConfig.load(arguments.settings, arguments.set),
            stage=arguments.stage,
            max_seconds=arguments.max_seconds,
            resume=arguments.resume,
            start_from=arguments.start_from,
            measured=not arguments.unmeasured,
            report=_report,
        )
    except DiffsieveError as error:
        logger.error("%s", error)
        return 1
    logger.info("%s", json.dumps(summary))
    return 0


def _report(entry: LogEntry) -> None:
    losses = " ".join(f"{name} {value:.4f}" for name, value in entry.losses.items())
    logger.info(
        "%s step %d (%.0f %%, %.0f s) %s | %.0f clips/s, %.1f GiB",
        entry.stage,
        entry.step,
        100 * entry.progress,
        entry.seconds,
        losses,
        entry.clips_per_second,
        entry.memory_gib,
    )


if __name__ == "__main__":
    sys.exit(main())
