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
from collections.abc import Callable, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from ..errors import UserInputError, os_reason

DEBUG_KEY = "diffsieve.debug"
PARAMETERS_KEY = "diffsieve.parameters"  # names of the parameters of the command that runs
_SHARED = frozenset({"config", "debug", "help", "json"})


def load_config(context: typer.Context, path: Path | None) -> Path | None:
    """Take the values of a TOML file as the defaults of this command; flags on the command line win over them.

    The keys are the names of the command's Python arguments. An unknown key is an error, and so is a text where a
    number is meant: most often it is a typing mistake, and a run with a value that was not meant is worse than no run.

    Raises:
        UserInputError: the file cannot be read, is not TOML, has an unknown key, or gives a value of the wrong type.
    """
    if path is None or context.resilient_parsing:
        return path
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserInputError(f"config must be a readable TOML file, got {path}: {os_reason(error)}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserInputError(f"config must be a TOML file, got {path}: {error}") from None
    command = context.command.callback
    assert command is not None  # only groups have none
    forms = _forms(command)
    for key, value in values.items():
        if key not in forms:
            raise UserInputError(f"config {path} has an unknown key {key!r}, expected some of: {', '.join(forms)}")
        if isinstance(value, Mapping):
            raise UserInputError(f"config key {key!r} must be a plain value, got a table")
        multiple, types = forms[key]
        if multiple != isinstance(value, list):
            form = "one value" if isinstance(value, list) else "a list"
            raise UserInputError(f"config key {key!r} must be {form}, got {value!r}")
        # The parser of the command line would turn each of these into another type where it can, 14.5 steps into 14.
        wanted, name = next((admitted, name) for known, admitted, name in _FORMS if known in types)
        if any(type(item) not in wanted for item in (value if isinstance(value, list) else [value])):
            raise UserInputError(f"config key {key!r} must be {name}, got {value!r}")
    context.default_map = values
    return path


# (type of a parameter, types of TOML that stand for it, name for people); the first that fits counts.
_FORMS: tuple[tuple[type, tuple[type, ...], str], ...] = (
    (bool, (bool,), "true or false"),
    (float, (int, float), "a number"),
    (int, (int,), "a whole number"),
    (object, (str,), "a text"),
)


def _forms(command: Callable[..., Any]) -> dict[str, tuple[bool, tuple[type, ...]]]:
    """For each parameter that a file may give: whether it takes a list, and its types, `object` among them."""
    forms = {}
    for name, hint in get_type_hints(command, include_extras=True).items():
        if name in _SHARED or name == "return":
            continue
        parsers = [extra.parser for extra in getattr(hint, "__metadata__", ()) if getattr(extra, "parser", None)]
        plain = get_type_hints(parsers[0])["return"] if parsers else get_type_hints(command)[name]
        parts = get_args(plain) if isinstance(plain, UnionType) else (plain,)
        lists = [part for part in parts if get_origin(part) is list]
        forms[name] = (bool(lists), (*(get_args(lists[0]) if lists else parts), object))
    return forms


def _set_debug(context: typer.Context, debug: bool) -> bool:
    # the dictionary is shared with the parent contexts
    context.meta[PARAMETERS_KEY] = frozenset(parameter.name for parameter in context.command.params)
    if debug:
        context.meta[DEBUG_KEY] = True
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
