"""`diffsieve app`: the web page on which dense and sparse clips play side by side."""

import threading
from pathlib import Path
from typing import Annotated

import typer

from . import run_options as flags
from .options import ConfigFile, DebugFlag

app = typer.Typer(add_completion=False)


@app.command(name="app")
def run(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            help="A model to offer beside the embedded ones: a folder in diffusers format, or a hub id; repeatable.",
            show_default="the embedded ones",
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            "--host",
            help="Address to listen at; one that others reach needs DIFFSIEVE_APP_USER and DIFFSIEVE_APP_PASSWORD.",
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option("--port", min=1, max=65535, show_default="the first free one from 7860")
    ] = None,
    share: Annotated[
        bool,
        typer.Option("--share", help="Make the page public through Gradio's server; needs the same two variables."),
    ] = False,
    folder: Annotated[
        Path | None,
        typer.Option("--folder", help="Private folder for the runs.", show_default="~/.cache/diffsieve/app"),
    ] = None,
    queue: Annotated[int, typer.Option("--queue", min=1, max=1000, help="Requests that may wait.")] = 64,
    device: flags.Device = None,
    dtype: flags.Dtype = None,
    config: ConfigFile = None,
    debug: DebugFlag = False,
) -> None:
    """Start the page and print its address; Ctrl-C ends it.

    The models can only be chosen here, never from the page.
    """
    from ..app.server import ServerConfig, serve

    settings = ServerConfig(
        models=tuple(model or ()),
        host=host,
        port=port,
        share=share,
        folder=folder,
        queue=queue,
        device=device,
        dtype=dtype,
    )
    typer.echo("loading the model", err=True)
    with serve(settings) as server:
        typer.echo(f"diffsieve is at {server.url} (Ctrl-C ends it)")
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            typer.echo("ending", err=True)
