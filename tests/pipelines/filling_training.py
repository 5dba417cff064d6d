"""A training run on a disk that fills up: python -m tests.pipelines.filling_training FOLDER PICTURES SPARE.

FOLDER lies on a small file system. At step 3 a file takes all of it but SPARE bytes; the run fails, the file goes, and
the run is resumed. Prints as JSON what it said, what it left and the losses of both calls together.
"""

import errno
import json
import sys
from pathlib import Path

from diffsieve.pipelines.training.pixel_dit.run import train_pixel_dit
from tests.pipelines.full_disk_cases import BROKEN_AT, left_over, losses, settings, steps_on_disk

BLOCK = 4096  # bytes; the file system counts in these


def fill(path, spare):
    with open(path, "wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * BLOCK)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        file.truncate(max(0, file.tell() - spare // BLOCK * BLOCK))


def main():
    folder, data, spare = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    out, ballast = folder / "run", folder / "ballast"

    def report(entry):
        if entry.step == BROKEN_AT:
            fill(ballast, spare)

    found = {}
    try:
        train_pixel_dit(out, data, settings(), report=report)
    except OSError as error:
        found = {"errno": error.errno, "said": str(error)}
    found |= {"left": left_over(out), "steps": steps_on_disk(out)}
    ballast.unlink()
    train_pixel_dit(out, data, resume=True)
    sys.stdout.write(json.dumps(found | {"losses": losses(out)}) + "\n")


if __name__ == "__main__":
    main()
