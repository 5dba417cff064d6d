"""Write the generated tables into the pages and draw the plots: `python docs/write_tables.py` (or `make tables`).

A table stands between `<!-- NAME:begin -->` and `<!-- NAME:end -->`; `page_tables` makes it. Tests check that pages and
plots are up to date.
"""

import json
import re

from diffsieve.bench.plots import draw_plots
from page_tables import ba_att, block_sparse, llsa, models, pixel_dit, study
from page_tables.results import RESULTS, ROOT

IMAGES = ROOT / "docs" / "images"
PAGES = (
    "docs/ba-att.md",
    "docs/benchmarks.md",
    "docs/llsa.md",
    "README.md",
    "docs/supported-models.md",
    "docs/mini-wan.md",
    "docs/reproduce.md",
    "docs/pixel-dit.md",
)


def tables() -> dict[str, str]:
    """All generated tables by the name of their place."""
    return {
        "supported-models": models.supported_models_table(),
        "results": f"{block_sparse.kernel_table()}\n\n{ba_att.call_table()}\n\n{block_sparse.cpu_table()}",
        "calibration": ba_att.calibration_table(),
        "budgets-time": ba_att.budgets_time_table(),
        "study": study.study_table(),
        "study-parts": study.study_parts_table(),
        "study-sort": study.study_sort_table(),
        "study-recall": study.study_recall_table(),
        "study-in-brief": study.study_in_brief_table(),
        "kernel-rates": block_sparse.kernel_rates_table(),
        "wan": ba_att.wan_table(),
        "hopper-rates": block_sparse.hopper_rates_table(),
        "dense-lengths": block_sparse.dense_lengths_table(),
        "ba-att-steps": ba_att.steps_table(),
        "llsa-results": llsa.llsa_table(),
        "llsa-tests": llsa.llsa_tests(),
        "mini-wan-results": models.mini_wan_table(),
        "reproduction": ba_att.reproduction_table(),
        "pixel-dit-study": pixel_dit.pixel_dit_study_table(),
        "pixel-dit-speed": pixel_dit.pixel_dit_speed_table(),
    }


def with_tables(text: str) -> str:
    """Return a page with its tables written anew."""
    for name, table in tables().items():
        pattern = rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)"
        text = re.sub(pattern, lambda found, table=table: f"{found[1]}{table}\n{found[2]}", text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    for page in PAGES:
        path = ROOT / page
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
    for result in sorted((RESULTS / "h200" / "bench").glob("*.json")):
        draw_plots(json.loads(result.read_text(encoding="utf-8")), IMAGES, "bench-")
