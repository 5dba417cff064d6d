"""`diffsieve vbench generate`: the videos of the suite, dense, sparse or both from the same noise."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from ..compare import folder as folders
from ..compare.claim import claim_settings, read_settings
from ..compare.clip import Clip, generate_clip
from ..compare.config import DENSE, RunConfig
from ..compare.files import remove_parts
from ..compare.lines import LineWriter, line_writer, read_lines
from ..compare.methods import METHODS
from ..compare.pair_metrics import load_alex, measure_clips
from ..compare.prepare import Prepared, prepare, resolve_place
from ..compare.report import environment
from ..compare.shards import Deadline, Shard
from ..compare.ticker import Ticker
from ..compare.video import to_uint8, write_mp4
from ..errors import UserInputError
from ..eval import LoadedLpips
from ..pipelines.loading import weights_digest
from .suite import Suite, load_suite, video_name

SETTINGS, MANIFEST = "vbench.settings.json", "videos"
SETTINGS_SCHEMA = "diffsieve.vbench/1"
RUNS = ("dense", "sparse")
_MOST_VIDEOS = 25


@dataclass(frozen=True, kw_only=True)
class VBenchConfig(RunConfig):
    """What to generate; see `RunConfig` for the clips. `method="dense"` leaves the pipeline as it is.

    Args:
        dimensions: of VBench; the prompts are those that they are scored on. Empty: the whole suite.
        limit: prompts, spread evenly over those; `None` for all.
        videos: of each prompt. VBench scores 5; the number i is also the start value of the noise.
        with_dense: also the dense video from the same noise, with paired metrics on raw frames.
        full_info: `VBench_full_info.json`; default: that of the installed package.
        python: interpreter whose environment has the package.
    """

    _without_method: ClassVar[tuple[str, ...]] = (DENSE,)

    dimensions: tuple[str, ...] = ()
    limit: int | None = None
    videos: int = 5
    with_dense: bool = False
    full_info: Path | None = None
    python: str | None = None
    out: Path = Path("outputs/vbench")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.videos <= _MOST_VIDEOS:
            raise UserInputError(f"videos must be from 1 to {_MOST_VIDEOS}, got {self.videos}")
        if self.with_dense and self.method == DENSE:
            raise UserInputError("with_dense must go with a sparse method, got method dense")

    @property
    def runs(self) -> tuple[str, ...]:
        """Folders of videos that are written."""
        if self.with_dense:
            return RUNS
        return ("dense",) if self.method == DENSE else ("sparse",)


def generate_suite(
    config: VBenchConfig,
    *,
    pipe: Any | None = None,
    attention: Any | None = None,
    shard: Shard | None = None,
    deadline: Deadline | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Generate the videos: `dense/` and `sparse/` in `config.out` hold mp4 files alone, under their official names.

    `videos-<shard>.jsonl` says of each how it was made: prompt, number, start value of the noise, measured density,
    seconds, and with `with_dense` the paired metrics. Videos that are there are not made again.

    Args:
        config: see `VBenchConfig`.
        pipe: a loaded text-to-video pipeline; default: load `config.model`.
        attention: configuration of the sparse attention in place of the one that `config` describes.
        shard: the share of this process.
        deadline: ends the run between two videos.
        progress: told a line for each video.

    Returns:
        `{"out", "done", "missing", "other_shards_missing"}` in prompts times videos.

    Raises:
        UserInputError: an argument is wrong, or the folder holds videos of other settings.
        DiffsieveError: a clip holds NaN, or ffmpeg failed.
    """
    shard, deadline = shard or Shard(), deadline or Deadline(None)
    suite = load_suite(config.full_info, config.python).select(config.dimensions, config.limit)
    config = resolve_place(replace(config, prompt=suite.prompts), pipe)
    folders.check_writable(config.out)
    ready = prepare(config, pipe=pipe, attention=attention)
    config = ready.config
    folders.make_output(config.out)
    claim_settings(config.out / SETTINGS, SETTINGS_SCHEMA, _settings(ready, suite))
    for run in config.runs:
        (config.out / run).mkdir(exist_ok=True)
    items = [(prompt, index) for prompt in suite.prompts for index in range(config.videos)]
    mine = shard.of(items)
    lpips = {"alex": load_alex(ready.pipe._execution_device)} if config.with_dense else {}
    with line_writer(config.out / f"{MANIFEST}-{shard.index}.jsonl") as lines:
        finished = finished_videos(config.out, config.runs)
        todo = [item for item in mine if item not in finished]
        ticker = Ticker(len(todo), progress)
        for prompt, index in todo:
            if deadline.passed:
                break
            deadline.begin()
            _make(ready, prompt, index, lpips, lines)
            deadline.end()
            ticker.tick(video_name(prompt, index))
    finished = finished_videos(config.out, config.runs)
    return {
        "out": str(config.out),
        "done": len(set(items) & finished),
        "missing": len(set(mine) - finished),
        "other_shards_missing": len(set(items) - set(mine) - finished),
    }


def finished_videos(out: Path, runs: Sequence[str]) -> set[tuple[str, int]]:
    """Return (prompt, number) of the videos that the manifest names and that are there in all runs."""
    return {
        (line["prompt"], line["index"])
        for line in read_lines(out, MANIFEST)
        if all((out / run / video_name(line["prompt"], line["index"])).is_file() for run in runs)
    }


def read_generated(out: Path) -> tuple[dict[str, Any], Suite]:
    """Return the settings of a folder of `generate_suite` and its part of the suite.

    Raises:
        UserInputError: it is no such folder.
    """
    settings = read_settings(out / SETTINGS, SETTINGS_SCHEMA)
    suite = settings["suite"]
    return settings, Suite(tuple(suite["entries"]), suite["source"], suite["sha256"])


def _make(
    ready: Prepared[VBenchConfig],
    prompt: str,
    index: int,
    lpips: dict[str, LoadedLpips | str],
    lines: LineWriter,
) -> None:
    from ..processors import sparse_attention

    config, pipe = ready.config, ready.pipe
    assert config.fps is not None
    record: dict[str, Any] = {"prompt": prompt, "index": index, "seed": index, "seconds": {}, "sparsity": None}
    clips: dict[str, Clip] = {}
    for run in config.runs:
        if run == "dense":
            clips[run] = generate_clip(pipe, config, prompt=prompt, seed=index, name=run)
        else:
            with sparse_attention(pipe, ready.attention):
                clips[run] = generate_clip(pipe, config, prompt=prompt, seed=index, name=run)
                summary = METHODS[config.method].measured(pipe, config.steps or 0)
            kept = ("density_overall", "density_sparse_steps", "steps_dense", "steps_total", "backend", "notes")
            record["sparsity"] = {name: summary[name] for name in kept}
        record["seconds"][run] = round(clips[run].seconds_total, 4)
    if config.with_dense:
        results = measure_clips(pipe, clips["dense"], clips["sparse"], lpips)
        record["metrics"] = {name: result.mean for name, result in results.items()}
        record["reasons"] = {name: result.reason for name, result in results.items() if result.reason}
    for run, clip in clips.items():
        folder = config.out / run
        write_mp4(folder / video_name(prompt, index), to_uint8(clip.frames), fps=config.fps)
    lines.append(record)


def _settings(ready: Prepared[VBenchConfig], suite: Suite) -> dict[str, Any]:
    """What decides the videos; shards run on other GPUs, and the suite may be read from elsewhere."""
    config, place = ready.config, environment(ready.pipe)
    chosen = config.settings()
    for name in ("device", "full_info", "python", "dimensions", "limit"):
        del chosen[name]
    return json.loads(json.dumps(chosen)) | {
        "attention": None if ready.attention is None else ready.attention.to_dict(),
        "weights": weights_digest(ready.pipe),
        "suite": {
            "sha256": suite.sha256,
            "dimensions": list(config.dimensions),
            "limit": config.limit,
            "prompts": len(suite.prompts),
            "source": Path(suite.source).name,
            "entries": list(suite.entries),
        },
        "environment": {key: place[key] for key in ("versions", "device", "device_name", "vae_dtype", "pipeline")},
    }


def clear_parts(out: Path, runs: Sequence[str]) -> None:
    """Remove what a killed process left half-written among the videos: VBench takes any file for a video."""
    for run in runs:
        if (out / run).is_dir():
            remove_parts(out / run)
