"""Write the generated tables into the pages: `python docs/write_tables.py` (or `make tables`).

A table stands between `<!-- NAME:begin -->` and `<!-- NAME:end -->`. A test checks that the pages are up to date.
"""

import re
from pathlib import Path

from diffsieve.processors import supported_models

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/supported-models.md")


def supported_models_table() -> str:
    """The supported models as a Markdown table, from the registry of the adapters."""
    lines = ["| family | pipelines | transformers |", "|---|---|---|"]
    for row in supported_models():
        cells = (row["family"], *(_code(row[name]) for name in ("pipelines", "transformers")))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def with_tables(text: str) -> str:
    """Return a page with its tables written anew."""
    for name, table in (("supported-models", supported_models_table()),):
        pattern = rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)"
        text = re.sub(pattern, lambda found, table=table: f"{found[1]}{table}\n{found[2]}", text, flags=re.DOTALL)
    return text


def _code(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", "))


if __name__ == "__main__":
    for page in PAGES:
        path = ROOT / page
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
