"""The page of an evaluation: the table, quality against sparsity, and each clip beside its dense one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ..eval import ClipReader, MetricResult, open_clip
from .charts import Series, line_chart
from .evaluate_table import metric_names, summary_table
from .files import write_png
from .page import Page, PageClip, frame_charts, metric_title
from .pictures import difference_picture, shown_frames, side_by_side
from .video import to_uint8, write_mp4_chunks

_WIDEST = 640  # pixels of one half of a clip on the page; wider ones are averaged down by a whole number
_CHUNK = 4


@dataclass(frozen=True)
class ClipView:
    """What a page shows of one clip of one run.

    Args:
        label: of the run.
        media: captions and files.
        metrics: as in the report.
    """

    label: str
    media: tuple[tuple[str, Path], ...]
    metrics: Mapping[str, Any]


def view_clip(
    name: str,
    label: str,
    sources: tuple[Path, Path],
    results: Mapping[str, MetricResult],
    folder: Path,
    *,
    fps: int,
) -> ClipView:
    """Write both clips side by side and the picture of their differences into a folder, frame by frame.

    Args:
        name: of the clip.
        label: of the run.
        sources: dense clip and other clip.
        results: with `psnr`.
        folder: where the files go.
        fps: frames per second.
    """
    stem = hashlib.sha256(f"{label}\0{name}".encode()).hexdigest()[:16]
    video, picture = folder / f"{stem}.mp4", folder / f"{stem}.png"
    readers = open_clip(sources[0]), open_clip(sources[1])
    count = len(results["psnr"].per_frame)
    numbers = shown_frames(count)
    kept: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])

    def chunks() -> Iterator[torch.Tensor]:
        pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number, pair in enumerate(zip(*(_float_frames(reader) for reader in readers), strict=True)):
            if number in numbers:
                for frames, frame in zip(kept, pair, strict=True):
                    frames.append(frame)
            pending.append(pair)
            if len(pending) == _CHUNK or number == count - 1:
                dense, other = (to_uint8(_shrink(torch.stack(side))) for side in zip(*pending, strict=True))
                yield side_by_side(dense, other, labels=("dense", label))
                pending = []

    write_mp4_chunks(video, chunks(), fps=fps)
    drawn = difference_picture(
        torch.stack(kept[0]),
        torch.stack(kept[1]),
        title=name,
        labels=("dense", label),
        psnr=results["psnr"],
        ssim=results["ssim"] if "ssim" in results and results["ssim"].per_frame else None,
        numbers=numbers,
    )
    write_png(picture, drawn)
    media = ((f"dense and {label}", video), (f"difference of {label} from dense", picture))
    return ClipView(label, media, {key: result.to_dict() for key, result in results.items()})


def evaluation_page(report: Mapping[str, Any], views: Mapping[str, Sequence[ClipView]]) -> Page:
    """Lay out an evaluation.

    Args:
        report: what report.json holds.
        views: by clip, what to show of it for each run.
    """
    place = report["environment"]
    total = len(report["runs"][0]["clips"])
    facts = [
        f"dense: {report['settings']['reference']}",
        f"{report['created']}; {place['device_name']}; "
        + ", ".join(f"{name} {number}" for name, number in place["versions"].items() if number),
    ]
    if 0 < len(views) < total:
        facts.append(f"the first {len(views)} of {total} clips are shown below; the figures are of all")
    clips = []
    for name, shown in views.items():
        text = ", ".join(f"{view.label}: {_first_figures(view.metrics)}" for view in shown)
        charts = frame_charts({view.label: view.metrics for view in shown})
        clips.append(PageClip(name, text, [item for view in shown for item in view.media], charts))
    title = "Sparse clips against dense ones"
    return Page(title, facts, summary_table(report), report["notes"], sparsity_charts(report), clips)


def sparsity_charts(report: Mapping[str, Any]) -> list[str]:
    """Draw every metric over the measured sparsity of the runs, with the noise floor; without densities none."""
    runs = [run for run in report["runs"] if run["density_overall"] is not None]
    charts = []
    for name in metric_names(report) if runs else []:
        points = sorted((1.0 - run["density_overall"], run["summary"].get(name, {}).get("mean")) for run in runs)
        floor = ((report["floor"] or {}).get("summary", {}).get(name) or {}).get("mean")
        levels = [("noise floor", floor)] if floor is not None else []
        charts.append(
            line_chart(
                f"{metric_title(name)} against sparsity",
                [Series(metric_title(name), points)],
                x_label="measured sparsity of the whole run",
                y_label=metric_title(name),
                levels=levels,
                marks=True,
            )
        )
    return [chart for chart in charts if chart]


def _first_figures(metrics: Mapping[str, Any]) -> str:
    mean = metrics["psnr"]["mean"]
    return f"PSNR {mean:.2f} dB" + "".join(
        f", {metric_title(name)} {metrics[name]['mean']:.4f}"
        for name in metrics
        if name not in ("psnr", "psnr_from_mean_mse") and metrics[name]["mean"] is not None
    )


def _float_frames(reader: ClipReader) -> Iterator[torch.Tensor]:
    for frame in reader.frames():
        yield frame.float() / 255.0 if frame.dtype == torch.uint8 else frame.float()


def _shrink(frames: torch.Tensor) -> torch.Tensor:
    factor = -(-frames.shape[-1] // _WIDEST)
    return F.avg_pool2d(frames, factor) if factor > 1 else frames
