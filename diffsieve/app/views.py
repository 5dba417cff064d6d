"""The parts of the page as HTML, but for the figures: every text of a user or a file is escaped here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ..compare.methods import METHODS
from ..compare.report import size_text
from .errors import without_paths
from .jobs import duration
from .store import Run

if TYPE_CHECKING:
    from .handlers import Spot

_KEEP_SHORT = 90


def facts(run: Run) -> str:
    """Return what was compared, on what, as a list of terms."""
    report, clip = run.report, run.clip
    settings, place = report["settings"], report["environment"]
    versions = ", ".join(f"{name} {number}" for name, number in place["versions"].items() if number)
    subject = [("prompt", clip["prompt"]), ("negative prompt", settings["negative_prompt"] or "none")]
    items = [
        *([("class", clip["prompt"])] if run.pictures else subject),
        ("model", settings["model"]),
        ("method", run_label(run) + _warmup(settings["attention"].get("warmup_steps"))),
        (run.what, f"{size_text(settings)} pixels"),
        ("steps, guidance, seed", f"{settings['steps']}, {settings['guidance_scale']:g}, {clip['seed']}"),
        ("attention kernel", f"dense: PyTorch SDPA; sparse: {clip['sparsity']['backend'] or 'none ran'}"),
        ("hardware", f"{hardware(place)}, {place['threads']} CPU threads"),
        ("versions", versions),
        ("made", report["created"].replace("T", " ").replace("+00:00", " UTC")),
    ]
    rows = "".join(f"<dt>{escape(term)}</dt><dd>{escape(str(text))}</dd>" for term, text in items)
    return f'<dl class="ds-facts">{rows}</dl>' + notes(run)


def downloads(files: Sequence[tuple[str, Path]]) -> str:
    """Return links to published files, with their sizes."""
    items = "".join(
        f'<li><a href="{escape(file_url(path), quote=True)}" download="{escape(path.name, quote=True)}">{escape(label)}'
        f"<small>{escape(path.suffix[1:])}, {_size(path.stat().st_size)}</small></a></li>"
        for label, path in files
    )
    return f'<h3 class="ds-part">Downloads</h3><ul class="ds-files">{items}</ul>'


def hardware(place: Mapping[str, Any]) -> str:
    """Return where clips are made, such as "CPU (x86_64), float32"; `place` is the environment of a report."""
    name = place["device_name"]
    if place["device"] != "cuda":
        name = f"{place['device'].upper()} ({name})"
    return f"{name}, {place['dtype']}"


def notes(run: Run) -> str:
    """Return what a reader of the figures must know, if anything."""
    lines = "".join(f'<p class="ds-note" role="note">{escape(without_paths(note))}</p>' for note in run.clip["notes"])
    return lines


def player(left: tuple[str, Path], right: tuple[str, Path], *, fps: int | None, frames: int, title: str,
           difference: tuple[Path, float] | None = None, psnr: Sequence[float | None] = ()) -> str:  # fmt: skip
    """Return two clips that play in step, or two pictures, with a slider between them.

    Args:
        left: label and published file.
        right: label and published file.
        fps: frames per second; `None` for pictures.
        frames: of both clips.
        title: what assistive software calls the player.
        difference: published file and the value of its last colour; default none.
        psnr: dB per frame, `None` where both frames are identical.
    """
    data = {
        "left": {"label": left[0], "src": file_url(left[1])},
        "right": {"label": right[0], "src": file_url(right[1])},
        "difference": None if difference is None else {"src": file_url(difference[0]), "end": difference[1]},
        "fps": fps,
        "frames": frames,
        "psnr": list(psnr),
        "title": title,
    }
    return f'<diffsieve-player data-clip="{escape(json.dumps(data), quote=True)}"></diffsieve-player>'


def run_label(run: Run) -> str:
    """Return what to call the sparse side of a run, such as "BA-Att 50 %" or "LLSA top 8"."""
    settings = run.report["settings"]
    if settings["method"] == "llsa":
        topk = settings["attention"]["topk"]
        return f"{METHODS['llsa'].label} top {topk if isinstance(topk, int) else '/'.join(map(str, topk))}"
    return f"{METHODS[settings['method']].label} {100 * settings['sparsity']:.4g} %"


def run_title(run: Run) -> str:
    """Return one line that tells a run from others, for lists."""
    settings, prompt = run.report["settings"], run.clip["prompt"]
    if len(prompt) > _KEEP_SHORT:
        prompt = prompt[: _KEEP_SHORT - 3] + "..."
    psnr = run.clip["metrics"]["psnr"]["mean"]
    kind = "example · " if run.example else "kept · " if run.kept else ""
    distance = "no PSNR" if psnr is None else f"{psnr:.1f} dB"
    return f"{kind}{run_label(run)} · {prompt} · seed {run.clip['seed']} · {settings['steps']} steps · {distance}"


def spot_text(spot: Spot, head: Any) -> str:
    """Return what the query of one token attended to."""
    frame, row, column = spot.token
    place = f"row {row}, column {column}"
    if spot.layout.grid_thw[0] > 1:
        place += f" of token frame {frame}"
    text = (
        f"Head {escape(str(head))}: the query at {place} attended to {spot.attended:,} of {spot.tokens:,} tokens "
        f"({spot.attended / spot.tokens:.1%})"
    )
    if not spot.means:
        return f"{text}; the others are dark."
    means = ", ".join(f"{count:,} in means of {size:,}" for size, count in spot.means if count)
    return f"{text} in detail, and saw {means or 'no others'}: the larger the means, the darker."


def empty(title: str, text: str) -> str:
    """Return what stands where nothing is to be seen yet."""
    return f'<div class="ds-empty"><b>{escape(title)}</b><p>{escape(text)}</p></div>'


def status(text: str, kind: str = "info") -> str:
    """Return the line under the buttons; `kind` is "info", "good" or "bad", which the text must say too."""
    return f'<p class="ds-status ds-{kind}" role="status">{escape(text)}</p>'


def keeping(run: Run | None) -> str:
    """Return the line beside the button that keeps the run that is shown, `None` before there is one."""
    if run is not None and run.example:
        return status("The run that is shown is an example, which is always kept.")
    if run is not None and run.kept:
        return status("The run that is shown is kept until it is given free.")
    return status("Runs that are not kept go after a week, or when the folder is full.")


def progress(share: float, text: str) -> str:
    """Return the line under the buttons while a run is at work, with a bar; `share` is in [0, 1]."""
    per_cent = round(100 * share)
    bar = (
        f'<span class="ds-progress" role="progressbar" aria-label="Progress" aria-valuemin="0" aria-valuemax="100" '
        f'aria-valuenow="{per_cent}"><i style="width:{per_cent}%"></i></span>'
    )
    return f'<div class="ds-status" role="status">{escape(text[:1].upper() + text[1:])}{bar}</div>'


def plain(text: str) -> str:
    """Return a text for a toast, which Gradio shows as HTML."""
    return escape(text)


def layer_name(layer: str) -> str:
    """Return "layer 3" for "transformer.blocks.3", with the transformer where a pipeline has two."""
    head, _, number = layer.rpartition(".")
    return f"layer {number}" + (", second transformer" if head.startswith("transformer_2") else "")


def done_line(run: Run, seconds: float) -> str:
    """Return the status after a run."""
    return status(f"Done in {duration(seconds)}: {run_title(run)}", "good")


def file_url(path: Path) -> str:
    """Return the address of a published file, relative to the page."""
    return f"gradio_api/file={quote(str(path))}"


def _warmup(steps: int | float | None) -> str:
    if steps is None:
        return ""
    return f", warm-up {100 * steps:.4g} % of the steps" if isinstance(steps, float) else f", {steps} warm-up steps"


def _size(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{max(size / 1e3, 0.1):.1f} kB"
