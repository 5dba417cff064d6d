"""Make the examples that ship with the page: `python -m diffsieve.app.make_examples`, or `make examples`.

To be run anew whenever the weights of the embedded models change, or what the preset does. Takes minutes on a CPU, and
replaces the folder as a whole at the end.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..compare import CompareConfig, Progress, compare
from ..compare.files import write_json
from ..compare.folder import REPORT
from ..compare.mask_file import read_masks, write_masks
from ..compare.selection_file import read_selections, write_selections
from ..folders import replace_folder
from ..pipelines.defaults import EMBEDDED, MINI_PIXEL_DIT, MINI_WAN, MINI_WAN_DEFAULTS
from ..pipelines.loading import load_pipeline
from .errors import public_report
from .handlers import write_poster
from .store import EXAMPLES, POSTER

logger = logging.getLogger(__name__)

# One example for each: number of the model's own prompt, sparsity.
CHOSEN = ((0, 0.5), (0, 0.75), (2, 0.75))
# The example of the model of pictures: a class that it draws well, in half its steps, as full attention takes minutes.
PICTURE = {"prompt": ("Smileys & Emotion",), "seed": (1015,), "steps": 10}
MAX_BYTES = 1_500_000
_KEPT = ("dense", "sparse", "difference_clip", "difference_map", "masks", "selections")
_MASK_STEPS = 3
_SELECTION_STEPS = 2


def make_examples(target: Path, *, pipe: Any | None = None, chosen: Sequence[tuple[int, float]] = CHOSEN,
                  pictures: Any | None = None, picture: dict[str, Any] | None = None,
                  **settings: Any) -> int:  # fmt: skip
    """Generate the examples and put them into `target`, in place of what is there.

    Args:
        target: folder of the examples.
        pipe: a loaded pipeline; default: the embedded model.
        chosen: number of the prompt and sparsity of each.
        pictures: a loaded model of pictures for one more example, with its own defaults.
        picture: fields of `CompareConfig` for that example.
        **settings: further fields of `CompareConfig` for the clips.

    Returns:
        Bytes of all examples.

    Raises:
        DiffsieveError: they have more than `MAX_BYTES`; nothing is replaced then.
    """
    pipe = pipe if pipe is not None else load_pipeline(MINI_WAN)
    with tempfile.TemporaryDirectory(prefix="diffsieve-examples-") as work:
        ready = Path(work) / "ready"
        for number, (prompt, sparsity) in enumerate(chosen, start=1):
            config = CompareConfig(
                prompt=(MINI_WAN_DEFAULTS.prompts[prompt],),
                sparsity=sparsity,
                preset="default",
                warmup=0.2,
                block_size=128,
                save_masks=True,
                out=Path(work) / f"run{number}",
                **settings,
            )
            compare(config, pipe=pipe, progress=_log, dense_clips=Path(work) / "dense")
            slim(config.out, ready / f"example-{number}")
        if pictures is not None:
            config = CompareConfig(save_masks=True, out=Path(work) / "pictures", **picture or {})
            compare(config, pipe=pictures, progress=_log)
            slim(config.out, ready / f"example-{len(chosen) + 1}")
        # Whole or not at all: a run that is broken off leaves the old examples.
        return replace_folder(target, lambda folder: shutil.copytree(ready, folder, dirs_exist_ok=True),
                              max_bytes=MAX_BYTES)  # fmt: skip


def slim(run: Path, target: Path) -> None:
    """Copy what the page shows of a comparison: clips, difference, masks of some steps, poster and report."""
    report = public_report(json.loads((run / REPORT).read_text(encoding="utf-8")))
    clip = report["clips"][0]
    folder = target / clip["folder"]
    folder.mkdir(parents=True)
    clip["files"] = {key: name for key, name in clip["files"].items() if key in _KEPT}
    for key, name in clip["files"].items():
        source = run / clip["folder"] / name
        if key == "masks":
            write_masks(folder / name, read_masks(source).thinned(_MASK_STEPS))
        elif key == "selections":
            write_selections(folder / name, read_selections(source).thinned(_SELECTION_STEPS))
        else:
            shutil.copyfile(source, folder / name)
    write_poster(target, clip)
    assert (target / POSTER).is_file()
    write_json(target / REPORT, report)


def _log(report: Progress) -> None:
    logger.info("%s, seed %d, %s: step %d of %d", report.prompt, report.seed, report.run, report.step, report.steps)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    installed = (EMBEDDED[MINI_PIXEL_DIT] / "model_index.json").is_file()
    pictures = load_pipeline(MINI_PIXEL_DIT) if installed else None
    size = make_examples(EXAMPLES, pictures=pictures, picture=PICTURE)
    logger.info("%d bytes in %s", size, EXAMPLES)


if __name__ == "__main__":
    main()
