"""`diffsieve vbench`: the videos of VBench's prompt suite, its scores, a table."""

from pathlib import Path
from typing import Annotated, Any

import typer

from . import legs
from . import run_options as flags
from .options import ConfigFile, DebugFlag, JsonFlag, emit

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="VBench: make the videos of its prompts, score them, show a table."
)

Dimension = Annotated[
    list[str] | None,
    typer.Option("--dimension", help="Of VBench, such as aesthetic_quality. May be repeated.", show_default="all"),
]
Limit = Annotated[int | None, typer.Option(help="Prompts, spread evenly over those of the dimensions.")]
FullInfo = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="VBench_full_info.json.", show_default="of the installed package"),
]
Python = Annotated[
    str | None,
    typer.Option("--python", metavar="PATH", help="Interpreter of VBench's own environment.", show_default="this one"),
]


@app.command()
def prompts(
    dimension: Dimension = None,
    limit: Limit = None,
    full_info: FullInfo = None,
    python: Python = None,
    json: JsonFlag = False,
    config: ConfigFile = None,
    debug: DebugFlag = False,
) -> None:
    """Print the prompts, one on each line: a prompt file for `compare`, `generate` and `study`."""
    from ..vbench import load_suite

    suite = load_suite(full_info, python).select(tuple(dimension or ()), limit)
    emit({"prompts": list(suite.prompts), "sha256": suite.sha256}, as_json=json, text="\n".join(suite.prompts))


@app.command()
def generate(
    model: flags.Model = "mini-wan",
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where the videos go.")] = Path("outputs/vbench"),
    dimension: Dimension = None,
    limit: Limit = None,
    videos: Annotated[int, typer.Option(help="Videos of each prompt; VBench scores 5.")] = 5,
    with_dense: Annotated[
        bool, typer.Option("--with-dense", help="Also the dense videos from the same noise, and paired metrics.")
    ] = False,
    full_info: FullInfo = None,
    python: Python = None,
    method: Annotated[
        str,
        typer.Option(
            "--method",
            help="ba-att, llsa, or dense for the pipeline as it is, without the flags below.",
            rich_help_panel="Method",
        ),
    ] = "ba-att",
    preset: flags.Preset = None,
    sparsity: flags.Sparsity = None,
    topk: flags.TopK = None,
    warmup: flags.Warmup = None,
    block_size: flags.BlockSize = None,
    min_tokens: flags.MinTokens = None,
    backend: flags.Backend = "auto",
    steps: flags.Steps = None,
    frames: flags.Frames = None,
    height: flags.Height = None,
    width: flags.Width = None,
    negative_prompt: flags.NegativePrompt = None,
    guidance_scale: flags.GuidanceScale = None,
    max_sequence_length: flags.MaxSequenceLength = None,
    fps: flags.Fps = None,
    device: flags.Device = None,
    dtype: flags.Dtype = None,
    shard: legs.ShardFlag = None,
    max_seconds: legs.MaxSeconds = None,
    json: JsonFlag = False,
    config: ConfigFile = None,
    debug: DebugFlag = False,
) -> None:
    """Make the videos of the official prompts under the official names; what is there is not made again."""
    values = {
        name: value
        for name, value in locals().items()
        if name not in ("dimension", "shard", "max_seconds", "json", "config", "debug")
    }
    part, deadline = legs.start_leg(shard, max_seconds)
    values |= {"device": device or part.device, "dimensions": tuple(dimension or ())}
    from .. import vbench as room

    result = room.generate_suite(room.VBenchConfig(**values), shard=part, deadline=deadline, progress=legs.say)
    emit(result, as_json=json, text=legs.leg_text(result, "videos"))
    legs.end_leg(result)


@app.command()
def score(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Of `vbench generate`.")],
    python: Python = None,
    dimension: Dimension = None,
    device: Annotated[str, typer.Option(help="For VBench: cuda or cpu.")] = "cuda",
    local: Annotated[
        bool, typer.Option("--local", help="VBench takes its networks from $VBENCH_CACHE_DIR, without a download.")
    ] = False,
    again: Annotated[bool, typer.Option("--again", help="Score anew what has a score.")] = False,
    json: JsonFlag = False,
    config: ConfigFile = None,
    debug: DebugFlag = False,
) -> None:
    """Run VBench on the videos, a process for each dimension. Exit code 1 when one has failed; the others are kept."""
    from ..vbench import ScoreConfig, score_videos

    given: dict[str, Any] = {} if python is None else {"python": python}
    settings = ScoreConfig(
        folder=folder, dimensions=tuple(dimension or ()), device=device, local=local, again=again, **given
    )
    result = score_videos(settings, progress=legs.say)
    lines = [
        f"{run}: {name} {100 * value:.2f} %" for run, found in result["scores"].items() for name, value in found.items()
    ]
    lines += [f"failed: {text}" for text in result["failures"]]
    emit(result, as_json=json, text="\n".join(lines))
    if result["failures"]:
        raise typer.Exit(1)


@app.command()
def table(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="Of `vbench generate`.")],
    json: JsonFlag = False,
    config: ConfigFile = None,
    debug: DebugFlag = False,
) -> None:
    """Show scores, paired metrics and densities of several folders side by side."""
    from ..vbench import score_table
    from ..vbench.table import table_rows
    from .study_table import render_table

    report = score_table(folders)
    emit(
        report,
        as_json=json,
        text="\n".join([render_table(table_rows(report)), *(f"note: {n}" for n in report["notes"])]),
    )
