"""What `study report` prints for people."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

_NARROWEST = 140  # in a file


def format_study(report: Mapping[str, Any], folder: Path) -> str:
    """Lay out the table of a study and what a reader must know."""
    from ..study.study_page import study_page

    page = study_page(report)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, heading in enumerate(page.table.headings):
        table.add_column(Text(heading), justify="right" if number else "left")
    for row in page.table.rows:
        table.add_row(*(Text(cell) for cell in row))  # as they are: "lpips[alex]" is no markup
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, _NARROWEST)
    with console.capture() as capture:
        console.print(table)
    lines = [capture.get().rstrip(), *page.facts, *(f"note: {note}" for note in page.notes)]
    return "\n".join([*lines, "", f"written to {folder}: study.json, study.html"])
