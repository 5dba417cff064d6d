"""Measure folders of sparse clips against a folder of dense ones: report.json, metrics.csv and report.html."""

from __future__ import annotations

import json
import platform
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ..errors import DiffsieveError, UserInputError
from ..eval import (
    DEFAULT_METRICS,
    METRICS,
    FeatureNetwork,
    LoadedLpips,
    MetricResult,
    MissingWeightsError,
    frechet,
    load_features,
    load_lpips,
    measure,
    open_clip,
    summarize,
)
from ..eval.features import NETWORKS
from ..eval.frechet import too_few
from ..eval.lpips_net import NETS
from .evaluate_page import ClipView, evaluation_page, view_clip
from .evaluate_table import write_csv
from .files import write_json
from .folder import check_writable, make_output
from .page import write_page
from .pairing import pair_clips
from .provenance import comparison_clips, disagreements, is_comparison, provenance
from .report import now, versions

EVAL_SCHEMA = "diffsieve.eval/1"
FLOOR = "noise floor"
REPORT, TABLE, PAGE = "report.json", "metrics.csv", "report.html"

EvaluateProgress = Callable[[str, str], None]
"""Told the run and the clip that is measured next."""


@dataclass(frozen=True)
class EvaluateConfig:
    """What to measure.

    Args:
        reference: folder of the dense clips, or one of `diffsieve compare`.
        tests: folders of the clips to compare, each with the same file names; may be empty where `reference` is one of
            `diffsieve compare`, which holds both.
        out: folder for the report.
        metrics: some of `diffsieve.eval.METRICS`; PSNR is always among them.
        nets: backbones of LPIPS.
        lpips_weights: file with the backbone, for a single net.
        download: whether torchvision's server may be asked for a missing backbone.
        require_lpips: whether missing LPIPS values are a failure.
        floor: folder of dense clips made with another attention kernel; their distance is the noise floor. A folder of
            `diffsieve compare` may hold them itself.
        fd: feature network of the Fréchet distance, or `None` for no such distance.
        fd_weights: file of that network.
        device: where metrics are computed; default: a GPU when there is one.
        chunk_size: frames in work at once; default: by their size.
        page_clips: how many clips the page shows; 0 for the figures alone.
        fps: frames per second of the clips on the page.
    """

    reference: Path
    tests: tuple[Path, ...]
    out: Path
    metrics: tuple[str, ...] = DEFAULT_METRICS
    nets: tuple[str, ...] = ("alex",)
    lpips_weights: Path | None = None
    download: bool = False
    require_lpips: bool = False
    floor: Path | None = None
    fd: str | None = None
    fd_weights: Path | None = None
    device: str | None = None
    chunk_size: int | None = None
    page_clips: int = 8
    fps: int = 12

    def __post_init__(self) -> None:
        for name, values, known in (("metrics", self.metrics, METRICS), ("nets", self.nets, NETS)):
            if unknown := [value for value in values if value not in known]:
                raise UserInputError(f"{name} must be some of {', '.join(known)}, got {', '.join(unknown)}")
        if self.fd is not None and self.fd not in NETWORKS:
            raise UserInputError(f"fd must be one of {', '.join(NETWORKS)}, got {self.fd}")
        if not self.tests:
            if not is_comparison(self.reference):
                raise UserInputError("tests must have at least one folder, got none")
            object.__setattr__(self, "tests", (self.reference,))
        if self.lpips_weights is not None and len(self.wanted_nets()) != 1:
            raise UserInputError(f"lpips_weights must go with one net, got {', '.join(self.wanted_nets()) or 'none'}")
        for name, value, least in (("page_clips", self.page_clips, 0), ("fps", self.fps, 1)):
            if value < least:
                raise UserInputError(f"{name} must be at least {least}, got {value}")

    def wanted_nets(self) -> tuple[str, ...]:
        """Return the backbones that the metrics need."""
        own = self.nets if "lpips" in self.metrics else ()
        return tuple(dict.fromkeys([*own, *(["vgg"] if "svg-compatible" in self.metrics else [])]))

    def settings(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return json.loads(json.dumps(asdict(self), default=str))


@dataclass
class _Context:
    config: EvaluateConfig
    device: torch.device
    models: dict[str, LoadedLpips | str]
    scratch: Path
    progress: EvaluateProgress | None
    views: dict[str, list[ClipView]] = field(default_factory=dict)


def evaluate(
    config: EvaluateConfig,
    *,
    overwrite: bool = False,
    progress: EvaluateProgress | None = None,
    command: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Measure every pair of clips and write the report.

    Args:
        config: see `EvaluateConfig`.
        overwrite: replace the report of an earlier evaluation in `config.out`.
        progress: told before every clip.
        command: the words of the command line, for the report.

    Returns:
        What report.json holds.

    Raises:
        UserInputError: folders or clips that do not fit together, files that cannot be read, an occupied folder.
        MissingWeightsError: LPIPS is required and its weights are missing.
        DiffsieveError: LPIPS is required and has no value for a clip, or ffmpeg failed.
    """
    check_writable(config.out)
    _check_free(config.out, overwrite)
    folders: dict[str, Path] = dict(zip(_labels(config.tests), config.tests, strict=True))
    if config.floor is not None:
        folders[FLOOR] = config.floor
    elif is_comparison(config.reference) and comparison_clips(config.reference, "floor", raw=False):
        folders[FLOOR] = config.reference
    pairs = {
        label: pair_clips(config.reference, folder, "floor" if label == FLOOR else "sparse")
        for label, folder in folders.items()
    }
    made = provenance(config.reference, dense=True)
    device = _device(config.device)
    models = _models(config, device)
    network = _network(config, device)
    with tempfile.TemporaryDirectory(prefix="diffsieve-eval-") as scratch:
        context = _Context(config, device, models, Path(scratch), progress)
        runs = {label: _run(context, label, folders[label], pairs[label], network) for label in folders}
        floor = runs.pop(FLOOR, None)
        report = {
            "schema": EVAL_SCHEMA,
            "created": now(),
            "command": None if command is None else list(command),
            "settings": config.settings(),
            "environment": _environment(device),
            "weights": [model.to_dict() for model in models.values() if isinstance(model, LoadedLpips)],
            "reference": made,
            "notes": _notes([*runs.values(), *([floor] if floor else [])], made),
            "runs": list(runs.values()),
            "floor": floor,
        }
        make_output(config.out)
        write_csv(config.out / TABLE, report)
        write_page(config.out / PAGE, evaluation_page(report, context.views))
        write_json(config.out / REPORT, report)
    return report


def _run(
    context: _Context,
    label: str,
    folder: Path,
    pairs: Sequence[tuple[str, Path, Path]],
    network: FeatureNetwork | str | None,
) -> dict[str, Any]:
    """Measure one folder against the dense one."""
    config = context.config
    metrics = tuple(dict.fromkeys(["psnr", *config.metrics]))
    own = {net: model for net, model in context.models.items() if net in config.nets}
    clips: list[dict[str, Any]] = []
    for index, (name, dense, other) in enumerate(pairs):
        if context.progress is not None:
            context.progress(label, name)
        results: dict[str, MetricResult] = {}
        # VGG is loaded for the svg-compatible column without being asked for as a column of its own.
        for group, models in ((tuple(m for m in metrics if m != "svg-compatible"), own), (("svg-compatible",), None)):
            if set(group) <= set(metrics):
                found = measure(
                    dense,
                    other,
                    metrics=group,
                    lpips=context.models if models is None else models,
                    device=context.device,
                    chunk_size=config.chunk_size,
                )
                results |= found
        if config.require_lpips:
            for result in results.values():
                if "lpips" in result.name and result.reason is not None:
                    raise DiffsieveError(f"{result.name} is required, and {name} of {label} has none: {result.reason}")
        clips.append(
            {
                "name": name,
                "frames": len(results["psnr"].per_frame),
                "from_video": "video" in (open_clip(dense).kind, open_clip(other).kind),
                "metrics": {key: result.to_dict() for key, result in results.items()},
            }
        )
        if index < config.page_clips and label != FLOOR:
            view = view_clip(name, label, (dense, other), results, context.scratch, fps=config.fps)
            context.views.setdefault(name, []).append(view)
    records: list[dict[str, Any]] = [clip["metrics"] for clip in clips]
    made = provenance(folder, dense=label == FLOOR) or {}
    for clip in clips:
        clip |= made.get("clips", {}).get(clip["name"], {})
    every = {name: [record.get(name, {}).get("mean") for record in records] for name in records[0]}
    return {
        "label": label,
        "folder": str(folder),
        **{name: made.get(name) for name in ("density_overall", "density_sparse_steps")},
        "made": {key: value for key, value in made.items() if key != "clips"} or None,
        "summary": {name: summarize(values).to_dict() for name, values in every.items()},
        "frechet": _frechet(pairs, network, [clip["frames"] for clip in clips]),
        "clips": clips,
    }


def _frechet(
    pairs: Sequence[tuple[str, Path, Path]], network: FeatureNetwork | str | None, frames: Sequence[int]
) -> dict[str, Any] | None:
    if network is None:
        return None
    if isinstance(network, str):
        return {"value": None, "reason": network}
    name = f"{'fd' if max(frames) == 1 else 'fd-frames'}[{network.name}]"
    if obstacle := too_few(name, sum(frames), sum(frames), network.dimensions):
        return obstacle.to_dict()
    dense, other = ([open_clip(pair[side]) for pair in pairs] for side in (1, 2))
    return frechet(dense, other, network, name=name).to_dict()


def _models(config: EvaluateConfig, device: torch.device) -> dict[str, LoadedLpips | str]:
    models: dict[str, LoadedLpips | str] = {}
    for net in config.wanted_nets():
        try:
            models[net] = load_lpips(net, weights=config.lpips_weights, download=config.download, device=device)
        except MissingWeightsError as error:
            if config.require_lpips:
                raise
            models[net] = str(error)
    return models


def _network(config: EvaluateConfig, device: torch.device) -> FeatureNetwork | str | None:
    if config.fd is None:
        return None
    try:
        return load_features(config.fd, weights=config.fd_weights, device=device)
    except MissingWeightsError as error:
        return str(error)


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device, dtype=torch.float64)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise UserInputError(f"device must be one that has float64, got {name}: {str(error).splitlines()[0]}") from None
    return device


def _labels(folders: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that tell the folders apart."""
    parts = [folder.resolve().parts for folder in folders]
    if len(set(parts)) < len(parts):
        raise UserInputError(f"tests must be different folders, got {', '.join(map(str, folders))}")
    for length in range(1, max(map(len, parts)) + 1):
        labels = ["/".join(part[-length:]) for part in parts]
        if len(set(labels)) == len(labels) and FLOOR not in labels:
            return labels
    raise UserInputError(f"tests must not be called {FLOOR!r}, got {', '.join(map(str, folders))}")


def _check_free(out: Path, overwrite: bool) -> None:
    taken = [name for name in (REPORT, TABLE, PAGE) if (out / name).exists()]
    if not taken:
        return
    if not overwrite:
        raise UserInputError(f"out must not hold {taken[0]} already, got {out}; overwrite replaces an evaluation")
    try:
        schema = json.loads((out / REPORT).read_text(encoding="utf-8"))["schema"]
    except (OSError, ValueError, KeyError, TypeError):
        schema = None
    if schema != EVAL_SCHEMA:
        raise UserInputError(f"out must hold an evaluation to overwrite, got {out} with another {taken[0]}")


def _environment(device: torch.device) -> dict[str, Any]:
    found = versions()
    for package in ("imageio-ffmpeg", "lpips", "numpy", "timm"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "versions": found,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": device.type,
        "device_name": name,
        "threads": torch.get_num_threads(),
    }


def _notes(runs: Sequence[dict[str, Any]], reference: dict[str, Any] | None) -> list[str]:
    """Say what a reader of the numbers must know."""
    clips: list[dict[str, Any]] = [clip for run in runs for clip in run["clips"]]
    notes = []
    if any(clip["from_video"] for clip in clips):
        notes.append("frames were read from video files: an encoder changed both clips, and with them the values")
    reasons = {
        f"{name} not computed: {result['reason']}"
        for clip in clips
        for name, result in clip["metrics"].items()
        if result["reason"]
    }
    distances: list[dict[str, Any]] = [run["frechet"] for run in runs if run["frechet"]]
    frechets = {f"Fréchet distance not computed: {f['reason']}" for f in distances if f["reason"]}
    for run in runs:
        other = provenance(Path(run["folder"]), dense=run["label"] == FLOOR)
        if differences := disagreements(reference, other):
            notes.append(f"{run['label']} was not made as the dense clips were: {'; '.join(differences)}")
    return [*notes, *sorted(reasons), *sorted(frechets)]
