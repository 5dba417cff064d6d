"""`diffsieve study`: which way to choose blocks is how close to dense attention."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from . import legs
from . import run_options as flags
from .options import ConfigFile, DebugFlag, JsonFlag, emit

_REPORT = "study.json, study.html"

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Compare ways to choose blocks: presets, parts, other methods."
)

Out = Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Folder of the study.")]
Suite = Annotated[
    list[str] | None,
    typer.Option(
        "--suite",
        help="Variants: fidelity (most), orders (presets, orders, mean pooling), sort (the paper's sort). Repeatable.",
        show_default="fidelity",
    ),
]
VariantFlag = Annotated[
    list[str] | None,
    typer.Option("--variant", help="Further variants; without --suite these alone. `study variants` lists them."),
]
Sparsities = Annotated[
    list[float] | None,
    typer.Option("--sparsity", help="Of the sparse steps; may be repeated.", show_default="of the suites"),
]
BlockSizeFlag = Annotated[int, typer.Option("--block-size", help="Tokens of a block.")]


@app.command()
def clips(
    model: flags.Model = "mini-wan",
    out: Out = Path("outputs/study"),
    suite: Suite = None,
    variant: VariantFlag = None,
    sparsity: Sparsities = None,
    prompt: flags.Prompt = None,
    prompt_file: flags.PromptFile = None,
    prompts: Annotated[int, typer.Option(help="Held-out prompts of mini-wan, where no prompt is given.")] = 24,
    seed: Annotated[
        list[int] | None,
        typer.Option("--seed", help="Start of the noise; may be given several times.", show_default="0, 1"),
    ] = None,
    floor: Annotated[
        bool, typer.Option("--floor/--no-floor", help="Also the dense clip with another attention kernel.")
    ] = True,
    lpips_weights: Annotated[Path | None, typer.Option(help="File with AlexNet, for LPIPS.")] = None,
    warmup: flags.Warmup = 0.2,
    block_size: BlockSizeFlag = 128,
    backend: flags.Backend = "auto",
    steps: flags.Steps = None,
    frames: flags.Frames = None,
    height: flags.Height = None,
    width: flags.Width = None,
    negative_prompt: flags.NegativePrompt = None,
    guidance_scale: flags.GuidanceScale = None,
    max_sequence_length: flags.MaxSequenceLength = None,
    device: flags.Device = None,
    dtype: flags.Dtype = None,
    shard: legs.ShardFlag = None,
    max_seconds: legs.MaxSeconds = None,
    json: JsonFlag = False,
    config: ConfigFile = None,
    debug: DebugFlag = False,
) -> None:
    """Make every clip dense and with all variants from the same noise, and measure how far they are.

    Every measured clip is a line in the folder; what is there is not made again. When all is there: study.json.
    """
    values = {
        name: value
        for name, value in locals().items()
        if name not in ("suite", "variant", "sparsity", "shard", "max_seconds", "json", "config", "debug")
    }
    part, deadline = legs.start_leg(shard, max_seconds)
    values |= {"device": device or part.device, "seed": seed or [0, 1]}
    from .. import study as room

    settings = room.StudyConfig(
        **flags.run_arguments(values),
        suites=_suites(suite, variant),
        variants=tuple(variant or ()),
        sparsities=tuple(sparsity or ()),
    )
    result = room.study_clips(
        settings, shard=part, deadline=deadline, progress=legs.say, command=["diffsieve", *sys.argv[1:]]
    )
    emit(result, as_json=json, text=legs.leg_text(result, "clips", _REPORT))
    legs.end_leg(result)


@app.command()
def recall(
    captures: Annotated[Path, typer.Argument(metavar="CAPTURES", help="Folder of `diffsieve capture`.")],
    out: Out = Path("outputs/study"),
    suite: Suite = None,
    variant: VariantFlag = None,
    sparsity: Sparsities = None,
    warmup: flags.Warmup = 0.2,
    block_size: BlockSizeFlag = 128,
    backend: flags.Backend = "auto",
    device: flags.Device = None,
    shard: legs.ShardFlag = None,
    max_seconds: legs.MaxSeconds = None,
    json: JsonFlag = False,
    config: ConfigFile = None,
    debug: DebugFlag = False,
) -> None:
    """Measure what each variant keeps of the attention mass of captured calls, by layer, step and head."""
    part, deadline = legs.start_leg(shard, max_seconds)
    from .. import study as room

    settings = room.RecallConfig(
        captures=captures,
        out=out,
        suites=_suites(suite, variant),
        variants=tuple(variant or ()),
        sparsities=tuple(sparsity or ()),
        warmup=warmup,
        block_size=block_size,
        backend=backend,
        device=device or part.device,
    )
    result = room.study_recall(
        settings, shard=part, deadline=deadline, progress=legs.say, command=["diffsieve", *sys.argv[1:]]
    )
    emit(result, as_json=json, text=legs.leg_text(result, "captured calls", _REPORT))
    legs.end_leg(result)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the study.")],
    json: JsonFlag = False,
    config: ConfigFile = None,
    debug: DebugFlag = False,
) -> None:
    """Write study.json and study.html from what is there, finished or not, and print the table."""
    from ..study import write_report
    from .study_table import format_study

    written = write_report(folder, command=["diffsieve", *sys.argv[1:]])
    emit(written, as_json=json, text=format_study(written, folder))


@app.command()
def variants(json: JsonFlag = False, config: ConfigFile = None, debug: DebugFlag = False) -> None:
    """List the variants and the suites that hold them."""
    from ..study import SUITES, VARIANTS

    listed = {name: {"about": found.about, "suites": list(found.suites)} for name, found in VARIANTS.items()}
    lines = [f"{name:<20} {found.about} ({', '.join(found.suites)})" for name, found in VARIANTS.items()]
    lines += [f"suite {name}: sparsity {', '.join(map(str, values))}" for name, values in SUITES.items()]
    emit({"variants": listed, "suites": {k: list(v) for k, v in SUITES.items()}}, as_json=json, text="\n".join(lines))


def _suites(suite: list[str] | None, variant: list[str] | None) -> tuple[str, ...]:
    return tuple(suite or ()) if suite or variant else ("fidelity",)
