"""`diffsieve tune`: find the fastest tiles of the Triton kernel on this GPU, once, and keep them."""

from typing import Annotated

import typer

from . import legs
from .options import ConfigFile, DebugFlag, JsonFlag, emit

app = typer.Typer(add_completion=False)


@app.command()
def tune(
    dim: Annotated[
        list[int] | None,
        typer.Option(
            "--dim", help="Channels of a head: 16, 32, 64, 128 or 256. May be repeated.", show_default="64, 128"
        ),
    ] = None,
    block_size: Annotated[
        list[int] | None,
        typer.Option("--block-size", help="Tokens per block. May be repeated.", show_default="64, 128"),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cuda:1.", show_default="cuda")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float16.")] = "bfloat16",
    budget_ms: Annotated[float, typer.Option(help="Milliseconds for the repeats of a shape's tiles.")] = 2000.0,
    json: JsonFlag = False,
    config: ConfigFile = None,
    debug: DebugFlag = False,
) -> None:
    """Time a few tiles of the triton backend for each shape, and keep the fastest in the user's cache folder.

    Processes that start afterwards use them. To go back to the table that is shipped, delete the file.
    """
    from pathlib import Path

    from ..bench.config import BenchConfig
    from ..bench.tuning import tune as run
    from ..kernels.block_sparse.tuned_tiles import tuned_tiles_file

    settings = BenchConfig(out=Path(), device=device or "cuda", dtype=dtype, budget_ms=budget_ms)
    found = run(
        settings, dims=tuple(dim or (64, 128)), block_sizes=tuple(block_size or (64, 128)), progress=legs.say
    )  # fmt: skip
    result = {"file": str(tuned_tiles_file()), "tiles": [tuned.to_dict() for tuned in found]}
    emit(result, as_json=json, text=f"kept in {result['file']}")
