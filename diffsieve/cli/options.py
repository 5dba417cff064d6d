"""What every command shares: `--json`, `--config FILE`, `--debug`, and how a result is printed.

A command takes the three options by their aliases and hands its result to `emit`::

    @app.command()
    def compare(steps: int = 14, json: JsonFlag = False, config: ConfigFile = None, debug: DebugFlag = False) -> None:
        ...
        emit(report.to_dict(), as_json=json, text=format_report(report))

Keep the imports of a command module light (no torch, no diffusers): `diffsieve --help` loads them all.
"""

import json as json_module
import logging
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import UserInputError

DEBUG_KEY = "diffsieve.debug"
_SHARED = frozenset({"config", "debug", "help", "json"})


def load_config(context: typer.Context, path: Path | None) -> Path | None:
    """Take the values of a TOML file as the defaults of this command; flags on the command line win over them.

    The keys are the names of the command's Python arguments. An unknown key is an error: it is most often a typing
    mistake, and a run with a value that was not meant is worse than no run.

    Raises:
        UserInputError: the file cannot be read, is not TOML, has an unknown key, or gives a value of the wrong form.
    """
    if path is None or context.resilient_parsing:
        return path
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserInputError(f"config must be a readable TOML file, got {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserInputError(f"config must be a TOML file, got {path}: {error}") from None
    options: dict[str, Any] = {p.name: p for p in context.command.params if p.name and p.name not in _SHARED}
    for key, value in values.items():
        if key not in options:
            raise UserInputError(f"config {path} has an unknown key {key!r}, expected some of: {', '.join(options)}")
        if isinstance(value, Mapping):
            raise UserInputError(f"config key {key!r} must be a plain value, got a table")
        if getattr(options[key], "multiple", False) != isinstance(value, list):
            form = "one value" if isinstance(value, list) else "a list"
            raise UserInputError(f"config key {key!r} must be {form}, got {value!r}")
        # The parser would take `steps = true` as 1 step.
        flag = getattr(options[key], "is_flag", False)
        if any(isinstance(item, bool) != flag for item in (value if isinstance(value, list) else [value])):
            form = "true or false" if flag else "a number or a text"
            raise UserInputError(f"config key {key!r} must be {form}, got {value!r}")
    context.default_map = values
    return path


def _set_debug(context: typer.Context, debug: bool) -> bool:
    if debug:
        context.meta[DEBUG_KEY] = True  # the dictionary is shared with the parent contexts
        logging.basicConfig()
        logging.getLogger("diffsieve").setLevel(logging.DEBUG)
    return debug


JsonFlag = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object; progress goes to stderr.")]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        is_eager=True,
        callback=load_config,
        help="TOML file with values for these options; flags win over it.",
    ),
]
DebugFlag = Annotated[
    bool,
    typer.Option("--debug", is_eager=True, callback=_set_debug, help="Log details and show the traceback of an error."),
]


def emit(result: Mapping[str, Any], *, as_json: bool, text: str) -> None:
    """Print a result on stdout: the whole of it as JSON, or its text for people.

    Args:
        result: JSON-ready values; NaN and infinity are refused, because they are not JSON.
        as_json: the command's `--json`.
        text: what a person reads.
    """
    typer.echo(json_module.dumps(result, indent=2, allow_nan=False) if as_json else text)
