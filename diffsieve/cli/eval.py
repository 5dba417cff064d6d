"""`diffsieve eval`: how far folders of sparse clips are from a folder of dense ones."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from ..errors import UserInputError
from .options import ConfigFile, DebugFlag, JsonFlag, emit

app = typer.Typer(add_completion=False)


@app.command(name="eval")
def evaluate(
    dense: Annotated[Path, typer.Argument(metavar="DENSE", help="Folder of the dense clips.")],
    sparse: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="SPARSE...",
            help="Folders of clips with the same names; none where DENSE is a folder of compare.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where the report goes.")] = Path("outputs/eval"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier report in the folder.")] = False,
    metrics: Annotated[
        str,
        typer.Option(help="Of psnr, ssim, ms_ssim, lpips, svg-compatible, temporal_flickering, with commas between."),
    ] = "psnr,ssim,ms_ssim,lpips",
    floor: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Dense clips of another attention kernel: the noise floor.")
    ] = None,
    lpips_net: Annotated[
        list[str] | None, typer.Option(help="alex, vgg or squeeze; may be repeated.", show_default="alex")
    ] = None,
    lpips_weights: Annotated[Path | None, typer.Option(help="File with the backbone of the one net.")] = None,
    download: Annotated[
        bool, typer.Option("--download", help="Fetch a missing LPIPS backbone from torchvision's server.")
    ] = False,
    require_lpips: Annotated[bool, typer.Option("--require-lpips", help="Fail when LPIPS has no value.")] = False,
    fd: Annotated[str | None, typer.Option(help="Also a Fréchet distance: effnet-lite0 or inception.")] = None,
    fd_weights: Annotated[Path | None, typer.Option(help="File of that network.")] = None,
    device: Annotated[
        str | None, typer.Option(help="Where to compute.", show_default="a GPU when there is one")
    ] = None,
    chunk_size: Annotated[
        int | None, typer.Option(help="Frames in work at once; no effect on results.", show_default="by frame size")
    ] = None,
    page_clips: Annotated[int, typer.Option(help="Clips shown on the page.")] = 8,
    fps: Annotated[int, typer.Option(help="Frames per second of the clips on the page.")] = 12,
    json: JsonFlag = False,
    config: ConfigFile = None,
    debug: DebugFlag = False,
) -> None:
    """Measure how far sparse clips are from dense ones of the same names.

    A clip is a video file, an .npy or .npz file, or a folder of pictures. Writes report.json, metrics.csv and one
    self-contained report.html. Settings, seeds and densities are read from the report.json of `diffsieve generate` or
    `compare`, where there is one.
    """
    from ..compare.evaluate import EvaluateConfig, evaluate
    from .run_tables import format_evaluation

    names = tuple(word.strip() for word in metrics.split(",") if word.strip())
    if not names:
        raise UserInputError("metrics must name at least one metric, got none")
    settings = EvaluateConfig(
        reference=dense,
        tests=tuple(sparse or ()),
        out=out,
        metrics=names,
        nets=tuple(dict.fromkeys(lpips_net or ("alex",))),
        lpips_weights=lpips_weights,
        download=download,
        require_lpips=require_lpips,
        floor=floor,
        fd=fd,
        fd_weights=fd_weights,
        device=device,
        chunk_size=chunk_size,
        page_clips=page_clips,
        fps=fps,
    )
    report = evaluate(
        settings,
        overwrite=overwrite,
        progress=lambda run, clip: typer.echo(f"{run}: {clip}", err=True),
        command=["diffsieve", *sys.argv[1:]],
    )
    emit(report, as_json=json, text=format_evaluation(report, out))
