"""`diffsieve train`: train the models that ship with the package, and pixel DiTs on pictures of one's own."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from .legs import EXIT_PAUSED
from .options import ConfigFile, DebugFlag, JsonFlag, emit

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Train the models that ship with the package, or a pixel DiT."
)

Out = Annotated[Path, typer.Option(help="Folder of the run.")]
CopyTo = Annotated[
    Path | None, typer.Option(help="Folder that gets weights and results after every save, without the state.")
]
Settings = Annotated[Path | None, typer.Option(metavar="FILE", help="TOML or JSON file of training settings.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="PART.NAME=VALUE", help="Change one training setting.")
]


@app.callback()
def _group() -> None:
    """Train the models that ship with the package, or a pixel DiT."""


@app.command("mini-wan")
def mini_wan(
    out: Out,
    sprites: Annotated[Path, typer.Option(help="File of `diffsieve data sprites`.")] = Path(".data/sprites.npz"),
    stage: Annotated[
        str,
        typer.Option(
            help="all: autoencoder, transformer, export, measurement. continue: decoder, transformer, export, "
            "measurement. Or one of vae, decoder, dit, finish."
        ),
    ] = "all",
    max_seconds: Annotated[
        float | None, typer.Option(help="Length of this call; the schedules are fitted to it, export included.")
    ] = None,
    pause: Annotated[
        bool, typer.Option("--pause", help="Stop after --max-seconds with unchanged schedules; --resume goes on.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoints in --out.")] = False,
    start_from: Annotated[
        Path | None, typer.Option(help="Trained weights to begin with: an exported model, a run, or a stage of one.")
    ] = None,
    copy_to: CopyTo = None,
    settings: Settings = None,
    overrides: Overrides = None,
    json: JsonFlag = False,
    config: ConfigFile = None,
    debug: DebugFlag = False,
) -> None:
    """Train mini-wan on clips that are drawn while it trains. Exit code 3: the leg paused, go on with --resume."""
    from ..pipelines.training.config import TrainConfig
    from ..pipelines.training.run import train_mini_wan
    from .train_progress import TrainProgress

    given = TrainConfig.load(settings, overrides or ()) if settings is not None or overrides else None
    with TrainProgress() as progress:
        summary = train_mini_wan(
            out,
            sprites,
            given,
            stage=stage,
            max_seconds=max_seconds,
            pause=pause,
            resume=resume,
            start_from=start_from,
            copy_to=copy_to,
            report=progress.report,
            announce=progress.announce,
        )
    _end(summary, _text, as_json=json)


@app.command("pixel-dit")
def pixel_dit(
    out: Out,
    data: Annotated[Path, typer.Option(help="Folder or archive of pictures; its subfolders are the classes.")] = Path(
        ".data/emoji"
    ),
    max_seconds: Annotated[
        float | None, typer.Option(help="Length of this call; the schedule is fitted to it, export included.")
    ] = None,
    pause: Annotated[
        bool, typer.Option("--pause", help="Stop after --max-seconds with an unchanged schedule; --resume goes on.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint in --out.")] = False,
    start_from: Annotated[
        Path | None,
        typer.Option(help="Weights to begin with, of any picture size: an exported model, a run, or its stage."),
    ] = None,
    copy_to: CopyTo = None,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Folder for a TensorBoard log; needs the package tensorboard.")
    ] = None,
    settings: Settings = None,
    overrides: Overrides = None,
    json: JsonFlag = False,
    config: ConfigFile = None,
    debug: DebugFlag = False,
) -> None:
    """Train a pixel DiT on pictures. Exit code 3: the leg paused, go on with --resume."""
    from ..pipelines.training.pixel_dit.config import PixelTrainConfig
    from ..pipelines.training.pixel_dit.run import train_pixel_dit
    from ..pipelines.training.tensorboard import TensorBoardLog
    from .train_progress import TrainProgress

    given = PixelTrainConfig.load(settings, overrides or ()) if settings is not None or overrides else None
    with TrainProgress() as progress, TensorBoardLog(tensorboard) as log:

        def report(entry: Any) -> None:
            progress.report(entry)
            log.report(entry)

        summary = train_pixel_dit(
            out,
            data,
            given,
            max_seconds=max_seconds,
            pause=pause,
            resume=resume,
            start_from=start_from,
            copy_to=copy_to,
            report=report,
            announce=progress.announce,
        )
    _end(summary, _pixel_text, as_json=json)


def _end(summary: dict[str, Any], text: Callable[[dict[str, Any]], str], *, as_json: bool) -> None:
    """Print the result in the main process, and leave with exit code 3 when the leg paused."""
    if summary.pop("main_process"):
        emit(summary, as_json=as_json, text=text(summary))
    if not summary["finished"]:
        raise typer.Exit(EXIT_PAUSED)


def _pixel_text(summary: dict[str, Any]) -> str:
    end = "finished" if summary["finished"] else "paused; go on with --resume"
    lines = [f"{summary['step']} steps, {summary['seconds']:.0f} s, {end}; {summary['pictures']} pictures"]
    if summary["skipped"]:
        lines.append(f"{len(summary['skipped'])} unreadable pictures were skipped:")
        lines += [f"  {name}: {reason}" for name, reason in summary["skipped"]]
    if "model" in summary:
        size = f"{summary['bytes'] / 1e6:.1f} MB, {summary['parameters'] / 1e6:.1f} M parameters"
        lines.append(f"{summary['model']}: {size}; {summary['out']}/sheet.png")
    return "\n".join(lines)


def _text(summary: dict[str, Any]) -> str:
    lines = []
    for name in ("vae", "decoder", "dit"):
        if name in summary:
            stage = summary[name]
            end = "finished" if stage["finished"] else "paused; go on with --resume"
            lines.append(f"{name}: {stage['step']} steps, {stage['seconds']:.0f} s, {end}")
    if "vae_quality" in summary:
        figures = summary["vae_quality"]
        lines.append(
            f"autoencoder: subject right in {figures['reconstruction_subject']:.1%} of {figures['clips']} clips, "
            f"{figures['psnr_db']:.1f} dB"
        )
    if "quality" in summary:
        figures = summary["quality"]
        rates = ", ".join(f"{name} {figures[name]:.1%}" for name in ("subject", "motion", "colour"))
        lines.append(f"model: {rates} right of {figures['prompts']} held-out prompts; {summary['out']}/model")
    return "\n".join(lines)
