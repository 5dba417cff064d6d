"""`diffsieve generate`: clips from prompts, with sparse or dense attention."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from . import run_options as flags
from .options import ConfigFile, DebugFlag, JsonFlag, emit
from .run_progress import RunProgress
from .run_tables import format_generation

app = typer.Typer(add_completion=False)


@app.command()
def generate(
    model: flags.Model = "mini-wan",
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where the clips go.")] = Path(
        "outputs/generate"
    ),
    prompt: flags.Prompt = None,
    prompt_file: flags.PromptFile = None,
    seed: flags.Seed = None,
    overwrite: flags.Overwrite = False,
    method: Annotated[
        str,
        typer.Option(
            "--method",
            help="ba-att, llsa, or dense for the pipeline as it is, without the flags below. auto: ba-att; a pixel DiT "
            "attends as trained.",
            rich_help_panel="Method",
        ),
    ] = "auto",
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
    json: JsonFlag = False,
    config: ConfigFile = None,
    debug: DebugFlag = False,
) -> None:
    """Generate one mp4 for each prompt and seed (a pixel DiT: one png for each class and seed), and a report.json."""
    values = {name: value for name, value in locals().items() if name not in ("overwrite", "json", "config", "debug")}
    from .. import compare as room

    settings = room.GenerateConfig(**flags.run_arguments(values))
    with RunProgress(model) as progress:
        report = room.generate(settings, overwrite=overwrite, progress=progress, command=["diffsieve", *sys.argv[1:]])
    emit(report, as_json=json, text=format_generation(report, out))
