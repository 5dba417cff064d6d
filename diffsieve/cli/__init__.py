"""The command line: `diffsieve COMMAND`. One file per command, loaded when it is called."""

from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from ..errors import DiffsieveError, is_out_of_memory
from .memory import memory_message
from .options import DEBUG_KEY, PARAMETERS_KEY

# Commands of one step: the module's `app` holds one command.
_COMMANDS = ("generate", "compare", "eval", "capture", "bench", "tune", "app", "info")
# Commands with subcommands of their own: the module's `app` holds several.
_GROUPS = ("study", "vbench", "train", "data", "weights")

EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


class _Commands(TyperGroup):
    """Loads a command when it is named, and turns expected errors into one line and an exit code."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*_COMMANDS, *_GROUPS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in (*_COMMANDS, *_GROUPS):
            return None
        app = import_module(f"{__name__}.{cmd_name}").app
        build = typer.main.get_group if cmd_name in _GROUPS else typer.main.get_command
        command = build(app)
        command.name = cmd_name
        return command

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            _fail("interrupted")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except (DiffsieveError, OSError) as error:
            # A broken pipe is the reader's wish, not a failure to report; the caller of `invoke` handles it.
            if ctx.meta.get(DEBUG_KEY) or isinstance(error, BrokenPipeError):
                raise
            _fail(" ".join(str(error).split()))
            raise typer.Exit(EXIT_FAILURE) from None
        except (MemoryError, RuntimeError) as error:
            if ctx.meta.get(DEBUG_KEY) or not is_out_of_memory(error):
                raise
            _fail(memory_message(error, ctx.meta.get(PARAMETERS_KEY, ())))
            raise typer.Exit(EXIT_FAILURE) from None


def _fail(message: str) -> None:
    typer.echo(f"diffsieve: {message}", err=True)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Block-sparse attention for diffusion transformers: generate, compare with dense attention, train.",
)

_root = app  # loading the command module `app` puts that module in the place of the name


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"diffsieve {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave the process with its exit code.

    Exit codes: 0 success, 1 failure, 2 wrong usage, 130 interrupted. Every `DiffsieveError` and `OSError`, and memory
    that ran out, is told in one line on stderr; `--debug` shows where they were raised.

    Args:
        arguments: the words after `diffsieve`; default `sys.argv[1:]`.
    """
    typer.main.get_command(_root).main(args=None if arguments is None else list(arguments), prog_name="diffsieve")
