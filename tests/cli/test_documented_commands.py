"""Every `diffsieve ...` line of the pages is a command with options that exist."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from diffsieve.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile", *sorted((ROOT / "docs").rglob("*.md"))]


def documented_commands() -> list[str]:
    found = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        if page.suffix == ".md":
            fences = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
            text = "".join(block for language, block in fences if not language)
        text = re.sub(r"\$\((\w+)\)", r"\1", text.replace("$(VENV)/bin/diffsieve", "diffsieve"))
        for line in re.findall(r"^\s*(diffsieve [a-z].*)$", text, re.MULTILINE):
            found.setdefault(" ".join(line.split("#")[0].split()), page.name)
    return list(found)


def test_there_are_documented_commands():
    assert len(documented_commands()) > 5


@pytest.mark.parametrize("line", documented_commands())
def test_a_documented_command_parses(line):
    words = shlex.split(line)[1:]
    command, context = typer.main.get_command(app), None
    while hasattr(command, "get_command"):
        name = words.pop(0)
        command = command.get_command(context, name)
        assert command is not None, name
    words = [word for word in words if word not in ("APP_ARGS", "DEMO_ARGS")]
    command.make_context(command.name, words)
