"""`diffsieve bench`: check and time kernels, whole calls and transformers, beside dense attention and other kernels."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import legs
from .options import ConfigFile, DebugFlag, JsonFlag, emit

if TYPE_CHECKING:
    from ..bench import BenchConfig

app = typer.Typer(add_completion=False)

_SIZES, _MACHINE = "Sizes", "Machine"


@app.command()
def bench(
    operations: Annotated[
        list[str] | None,
        typer.Argument(metavar="[OPERATION]...", help="block-sparse, ba-att, llsa, wan.", show_default="all"),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", metavar="FOLDER", help="Where results and plots go; rows that are there are kept.")
    ] = Path("outputs/bench"),
    list_only: Annotated[
        bool,
        typer.Option("--list", help="Say what would be measured, and what cannot be and why; run nothing."),
    ] = False,
    tokens: Annotated[
        list[int] | None,
        typer.Option(
            "--tokens",
            help="For block-sparse and llsa. May be repeated.",
            show_default="8K to 256K; 64² to 1024²",
            rich_help_panel=_SIZES,
        ),
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            "--grid",
            metavar="TxHxW",
            help="In tokens, for ba-att and wan. May be repeated.",
            show_default="clips of 8K to 256K tokens; 480p and 720p",
            rich_help_panel=_SIZES,
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            help="For wan: wan2.1-1.3b, wan2.1-14b or mini-wan. May be repeated.",
            show_default="the two large ones on CUDA, else mini-wan",
            rich_help_panel=_SIZES,
        ),
    ] = None,
    sparsity: Annotated[
        list[float] | None,
        typer.Option(
            "--sparsity",
            help="Share of block pairs to skip. May be repeated.",
            show_default="0.5, 0.75, 0.9, 0.95",
            rich_help_panel=_SIZES,
        ),
    ] = None,
    heads: Annotated[
        int | None, typer.Option(help="Attention heads.", show_default="12 on CUDA, 4 for llsa", rich_help_panel=_SIZES)
    ] = None,
    dim: Annotated[
        int | None,
        typer.Option(help="Channels of a head.", show_default="128 on CUDA, 64 for llsa", rich_help_panel=_SIZES),
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens per block, of all but llsa.", rich_help_panel=_SIZES)] = 128,
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Also other kernels that are installed.")] = True,
    compiled: Annotated[
        bool | None,
        typer.Option("--compile/--no-compile", help="Compile the transformers.", show_default="on CUDA"),
    ] = None,
    backend: Annotated[str, typer.Option(help="In BA-Att and transformers.")] = "auto",
    budget_ms: Annotated[float, typer.Option(help="Milliseconds for the repeats of one figure.")] = 250.0,
    device: Annotated[
        str | None,
        typer.Option(help="cuda, cuda:1 or cpu.", show_default="cuda if present", rich_help_panel=_MACHINE),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="bfloat16, float16 or float32.",
            show_default="bfloat16 on CUDA, else float32",
            rich_help_panel=_MACHINE,
        ),
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Of PyTorch on a CPU.", rich_help_panel=_MACHINE)] = None,
    max_seconds: legs.MaxSeconds = None,
    json: JsonFlag = False,
    config: ConfigFile = None,
    debug: DebugFlag = False,
) -> None:
    """Check, then time: kernels, the whole BA-Att call, LLSA, a forward of the Wan transformers.

    Nothing gets a figure that is not within its error bound against fp64. Exit code 1 when something of ours failed,
    3 when the time was over before all was measured.
    """
    _, deadline = legs.start_leg(None, max_seconds)
    from .. import bench as room
    from ..bench.config import parse_grid

    settings = room.BenchConfig(
        out=out, operations=tuple(operations or ()), device=device, dtype=dtype,
        tokens=tuple(tokens) if tokens else None, grids=tuple(map(parse_grid, grid)) if grid else None,
        heads=heads, dim=dim, block_size=block_size, models=tuple(model) if model else None, backend=backend,
        compiled=compiled, peers=peers, budget_ms=budget_ms, threads=threads,
        **({"sparsities": tuple(sparsity)} if sparsity else {}),
    )  # fmt: skip
    if list_only:
        plan = room.plan(settings)
        emit(plan, as_json=json, text=_plan_text(plan))
        return
    result = room.run_bench(settings, deadline=deadline, progress=legs.say, command=["diffsieve", *sys.argv[1:]])
    result["plots"] = _plots(settings, result["files"])
    emit(result, as_json=json, text=_text(result))
    if result["failed"]:
        raise typer.Exit(1)
    legs.end_leg(result)


def _plots(settings: "BenchConfig", files: list[str]) -> list[str]:
    from ..bench.plots import draw_plots
    from ..bench.results import read_results

    return [str(plot) for path in files for plot in draw_plots(read_results(Path(path)), settings.out)]


def _text(result: dict[str, Any]) -> str:
    from ..bench.results import read_results
    from ..bench.tables import markdown

    results = [read_results(Path(path)) for path in result["files"]]
    lines = [f"{found['operation']}, {found['device']}:\n\n{markdown(found)}\n" for found in results if found["rows"]]
    lines.append(legs.leg_text(result, "rows with figures", "results, plots and tables"))
    lines += [f"failed: {name}: {reason}" for name, reason in result["failed"].items()]
    lines += [f"failed, a kernel of others: {name}: {reason}" for name, reason in result["failed_peers"].items()]
    return "\n".join(lines)


def _plan_text(plan: dict[str, Any]) -> str:
    lines = []
    for name, operation in plan["operations"].items():
        lines.append(f"{name}: {operation['summary']}")
        lines += [f"  {problem}: {'; '.join(variants)}" for problem, variants in operation["problems"].items()]
        lines += [f"  not measured: {what}: {why}" for what, why in operation["absent"].items()]
    return "\n".join(lines)
