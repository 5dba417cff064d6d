"""`diffsieve compare`: the same noise twice, dense and sparse; metrics, clips or pictures, report."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from . import run_options as flags
from .options import ConfigFile, DebugFlag, JsonFlag, emit
from .run_progress import RunProgress
from .run_tables import format_comparison

app = typer.Typer(add_completion=False)


@app.command()
def compare(
    model: flags.Model = "mini-wan",
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where the results go.")] = Path(
        "outputs/compare"
    ),
    prompt: flags.Prompt = None,
    prompt_file: flags.PromptFile = None,
    seed: flags.Seed = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in the folder; its settings must be the same.")
    ] = False,
    overwrite: flags.Overwrite = False,
    save_frames: Annotated[
        bool, typer.Option("--save-frames", help="Keep the raw frames of both runs as .npz, float32.")
    ] = False,
    floor: Annotated[
        bool, typer.Option("--floor", help="Also the dense clip with another attention kernel: the noise floor.")
    ] = False,
    save_masks: Annotated[
        bool, typer.Option("--save-masks", help="Keep the block masks (LLSA: chosen keys) of layers and steps as .npz.")
    ] = False,
    method: Annotated[
        str,
        typer.Option(
            "--method",
            help="ba-att or llsa. auto: llsa for a pixel DiT that was trained with it, else ba-att.",
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
    mask_layer: Annotated[
        int | None,
        typer.Option(
            "--mask-layer", help="Layer of mask.png.", show_default="the middle one", rich_help_panel="Method"
        ),
    ] = None,
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
    """Generate clips or pictures twice from the same noise, dense and sparse, and measure how far apart they are.

    Writes for each prompt and seed both clips, a side-by-side clip, a picture of the differences and one of the block
    mask, and a report.json over all; with a pixel DiT, pictures for each class and seed. PSNR and SSIM are taken on raw
    frames.
    """
    values = {
        name: value
        for name, value in locals().items()
        if name not in ("resume", "overwrite", "json", "config", "debug")
    }
    from .. import compare as room

    settings = room.CompareConfig(**flags.run_arguments(values))
    try:
        with RunProgress(model, ("dense", "sparse", "floor") if floor else ("dense", "sparse")) as progress:
            report = room.compare(
                settings, resume=resume, overwrite=overwrite, progress=progress, command=["diffsieve", *sys.argv[1:]]
            )
    except KeyboardInterrupt:
        if out.exists():
            typer.echo(f"diffsieve: what is finished lies in {out}; the same command with --resume goes on", err=True)
        raise
    emit(report, as_json=json, text=format_comparison(report, out))
