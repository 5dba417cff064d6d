"""What `study report` and `vbench table` print for people."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from .run_tables import render

if TYPE_CHECKING:
    from ..compare.page import Table as Rows

_NARROWEST = 160  # in a file


def format_study(report: Mapping[str, Any], folder: Path) -> str:
    """Lay out the table of a study and what a reader must know."""
    from ..study.study_page import study_page

    page = study_page(report)
    lines = [render_table(page.table), *page.facts, *(f"note: {note}" for note in page.notes)]
    return "\n".join([*lines, "", f"written to {folder}: study.json, study.html"])


def render_table(rows: "Rows") -> str:
    """Draw rows under headings for a terminal; the first column is text, the others are figures."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, heading in enumerate(rows.headings):
        table.add_column(Text(heading), justify="right" if number else "left")
    for row in rows.rows:
        table.add_row(*(Text(cell) for cell in row))  # as they are: "lpips[alex]" is no markup
    return render(table, _NARROWEST)
