"""`diffsieve capture`: queries, keys and values of a dense run, into files."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from . import legs
from . import run_options as flags
from .options import ConfigFile, DebugFlag, JsonFlag, emit

app = typer.Typer(add_completion=False)


@app.command()
def capture(
    model: flags.Model = "mini-wan",
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where the files go.")] = Path("outputs/capture"),
    prompt: flags.Prompt = None,
    prompt_file: flags.PromptFile = None,
    seed: flags.Seed = None,
    layer: Annotated[
        list[int] | None, typer.Option("--layer", help="May be repeated; -1 is the last.", show_default="five, spread")
    ] = None,
    step: Annotated[
        list[int] | None,
        typer.Option(
            "--step", help="From 0; may be repeated.", show_default="the last one of the warm-up and three after it"
        ),
    ] = None,
    both_branches: Annotated[
        bool, typer.Option("--both-branches", help="Also the branch of guidance with the negative prompt.")
    ] = False,
    warmup: flags.Warmup = 0.2,
    steps: flags.Steps = None,
    frames: flags.Frames = None,
    height: flags.Height = None,
    width: flags.Width = None,
    negative_prompt: flags.NegativePrompt = None,
    guidance_scale: flags.GuidanceScale = None,
    max_sequence_length: flags.MaxSequenceLength = None,
    device: flags.Device = None,
    dtype: flags.Dtype = None,
    shard: legs.ShardFlag = None,
    max_seconds: legs.MaxSeconds = None,
    json: JsonFlag = False,
    config: ConfigFile = None,
    debug: DebugFlag = False,
) -> None:
    """Save what the self-attention of a dense run attends with: Q, K, V after norm and position encoding.

    One safetensors file for each layer, step and branch, with the token grid, noise level and scale in its metadata.
    """
    values = {
        name: value
        for name, value in locals().items()
        if name not in ("layer", "step", "shard", "max_seconds", "json", "config", "debug")
    }
    part, deadline = legs.start_leg(shard, max_seconds)
    values["device"] = device or part.device
    from .. import study as room

    settings = room.CaptureConfig(
        **flags.run_arguments(values), layers=tuple(layer or ()), steps_kept=tuple(step or ())
    )
    result = room.capture(
        settings, shard=part, deadline=deadline, progress=legs.say, command=["diffsieve", *sys.argv[1:]]
    )
    left = f"; {result['missing']} clips left: the same command goes on" if result["missing"] else ""
    emit(result, as_json=json, text=f"{result['files']} files of {result['clips']} clips in {result['out']}{left}")
    legs.end_leg(result)
