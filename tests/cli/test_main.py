"""The command line as a process: help, exit codes, one line for an expected error."""

import subprocess
import sys

import pytest

import diffsieve
from diffsieve import BackendUnavailableError, DiffsieveError, UserInputError
from diffsieve.cli import info, main

HEAVY = ("torch", "diffusers", "transformers", "triton", "numpy")


def run_main(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return caught.value.code or 0


def raiser(error: BaseException):
    def collect() -> dict[str, object]:
        raise error

    return collect


def test_help_lists_the_commands_without_loading_torch():
    code = (
        "import sys\nfrom diffsieve.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    code = end.code\n"
        f"print('heavy:', [name for name in {HEAVY} if name in sys.modules], 'code:', code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for command in ("generate", "compare", "info", "data", "train"):
        assert f" {command} " in done.stdout
    assert done.stdout.splitlines()[-1] == "heavy: [] code: 0"


def test_module_and_version():
    done = subprocess.run([sys.executable, "-m", "diffsieve", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"diffsieve {diffsieve.__version__}\n"


@pytest.mark.parametrize(
    "arguments", [("nonsense",), ("info", "--nonsense"), ("info", "extra")], ids=["command", "option", "argument"]
)
def test_wrong_usage_exits_with_2(arguments, capsys):
    assert run_main(*arguments) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "error",
    [
        DiffsieveError("density must be in (0, 1], got 1.5"),
        UserInputError("density must be in (0, 1], got 1.5"),
        BackendUnavailableError("density must be in (0, 1], got 1.5"),
        PermissionError("density must be in (0, 1], got 1.5"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_expected_error_is_one_line_on_stderr(error, monkeypatch, capsys):
    monkeypatch.setattr(info, "collect", raiser(error))
    assert run_main("info") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "diffsieve: density must be in (0, 1], got 1.5\n"


def test_an_error_of_several_lines_is_joined(monkeypatch, capsys):
    monkeypatch.setattr(info, "collect", raiser(UserInputError("first\n  second")))
    assert run_main("info") == 1
    assert capsys.readouterr().err == "diffsieve: first second\n"


def test_debug_lets_the_error_through(monkeypatch):
    monkeypatch.setattr(info, "collect", raiser(UserInputError("wrong")))
    with pytest.raises(UserInputError, match=r"^wrong$"):
        main(["info", "--debug"])


def test_an_unexpected_error_is_not_hidden(monkeypatch):
    monkeypatch.setattr(info, "collect", raiser(KeyError("a defect")))
    with pytest.raises(KeyError, match="a defect"):
        main(["info"])


def test_an_interrupt_exits_with_130(monkeypatch, capsys):
    monkeypatch.setattr(info, "collect", raiser(KeyboardInterrupt()))
    assert run_main("info") == 130
    assert capsys.readouterr().err == "diffsieve: interrupted\n"
