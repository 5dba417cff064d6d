"""The flags that `generate` and `compare` share, named like the fields of `diffsieve.compare.RunConfig`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import UserInputError

_METHOD, _CLIP, _MACHINE = "Method", "Clip", "Machine"


def parse_warmup(value: Any) -> int | float:
    """Read `3` as three steps and `0.2` as a fifth of the steps.

    Raises:
        UserInputError: neither a whole number nor a decimal fraction.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    text = str(value).strip()
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise UserInputError(f"warmup must be a whole number of steps or a share such as 0.2, got {value!r}") from None


Model = Annotated[
    str,
    typer.Option(
        "--model",
        help="mini-wan or mini-pixel-dit, which ship with diffsieve; a folder in diffusers format; a hub id.",
    ),
]
Preset = Annotated[
    str | None,
    typer.Option(
        "--preset", help="Preset of the method: default or paper.", show_default="default", rich_help_panel=_METHOD
    ),
]
Sparsity = Annotated[
    float | None,
    typer.Option(
        "--sparsity",
        help="BA-Att: share of block pairs skipped in sparse steps.",
        show_default="0.5",
        rich_help_panel=_METHOD,
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(
        "--topk", help="LLSA: blocks kept per level.", show_default="as trained, else 8", rich_help_panel=_METHOD
    ),
]
Warmup = Annotated[
    Any,
    typer.Option(
        "--warmup",
        parser=parse_warmup,
        metavar="STEPS|SHARE",
        help="Dense steps at the start: 3, or 0.2 for a fifth of the steps.",
        show_default="of the preset",
        rich_help_panel=_METHOD,
    ),
]
BlockSize = Annotated[
    int | None,
    typer.Option("--block-size", help="Tokens of a block.", show_default="of the method", rich_help_panel=_METHOD),
]
MinTokens = Annotated[
    int | None,
    typer.Option(
        "--min-tokens",
        help="Shorter sequences run dense.",
        show_default="where sparse attention pays on the device",
        rich_help_panel=_METHOD,
    ),
]
Backend = Annotated[
    str,
    typer.Option(
        "--backend",
        help="Block-sparse kernel: auto, reference, torch, triton, hopper, hopper-exact, flash4.",
        rich_help_panel=_METHOD,
    ),
]
Prompt = Annotated[
    list[str] | None,
    typer.Option(
        "--prompt",
        help="One clip for each; for a pixel DiT, a class. May be given several times.",
        show_default="one that suits the model",
    ),
]
PromptFile = Annotated[
    Path | None, typer.Option("--prompt-file", metavar="FILE", help="Text file with one more prompt on each line.")
]
Seed = Annotated[
    list[int] | None, typer.Option("--seed", help="Start of the noise; may be given several times.", show_default="0")
]
Steps = Annotated[
    int | None, typer.Option("--steps", help="Denoising steps.", show_default="of the model", rich_help_panel=_CLIP)
]
Frames = Annotated[
    int | None, typer.Option("--frames", help="Frames of the clip.", show_default="of the model", rich_help_panel=_CLIP)
]
Height = Annotated[
    int | None, typer.Option("--height", help="Pixels.", show_default="of the model", rich_help_panel=_CLIP)
]
Width = Annotated[
    int | None, typer.Option("--width", help="Pixels.", show_default="of the model", rich_help_panel=_CLIP)
]
NegativePrompt = Annotated[
    str | None, typer.Option("--negative-prompt", help="What guidance moves away from.", rich_help_panel=_CLIP)
]
GuidanceScale = Annotated[
    float | None,
    typer.Option(
        "--guidance-scale",
        help="Classifier-free guidance; 1 turns it off.",
        show_default="of the model",
        rich_help_panel=_CLIP,
    ),
]
MaxSequenceLength = Annotated[
    int | None,
    typer.Option("--max-sequence-length", help="Text tokens.", show_default="of the model", rich_help_panel=_CLIP),
]
Fps = Annotated[
    int | None,
    typer.Option("--fps", help="Frames per second of the files.", show_default="of the model", rich_help_panel=_CLIP),
]
Device = Annotated[
    str | None,
    typer.Option("--device", help="cpu, cuda, cuda:1, mps.", show_default="cuda if present", rich_help_panel=_MACHINE),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help="float32, bfloat16 or float16; the VAE stays in float32.",
        show_default="bfloat16 on CUDA, else float32",
        rich_help_panel=_MACHINE,
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the results that are in the folder.")]


def run_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """Turn a command's values into arguments of a `RunConfig`: prompts of the file joined on, lists made tuples.

    Raises:
        UserInputError: the prompt file cannot be read or holds no prompt.
    """
    arguments = dict(values)
    prompts = list(arguments.pop("prompt") or [])
    file = arguments.pop("prompt_file")
    if file is not None:
        prompts += _read_prompts(file)
    arguments["prompt"] = tuple(prompts)
    arguments["seed"] = tuple(arguments["seed"] or (0,))
    return arguments


def _read_prompts(file: Path) -> list[str]:
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserInputError(f"prompt_file must be a readable text file, got {file}: {error}") from None
    prompts = [line for line in lines if line]
    if not prompts:
        raise UserInputError(f"prompt_file must hold at least one prompt, got {file} without any")
    return prompts
