"""Rules on the source tree: imports between rooms go one way, dependencies are declared, no path of one machine."""

import ast
import dataclasses
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import diffsieve
import write_tables

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "diffsieve"
# A room may import from itself and from rooms of a lower rank.
RANKS = {
    "errors": 0, "pictures": 0, "folders": 1, "kernels": 1, "processors": 2, "pipelines": 3, "eval": 3, "compare": 4,
    "study": 5, "vbench": 5, "bench": 5, "app": 6, "cli": 7,
}  # fmt: skip


def source_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Absolute dotted names of everything that a file imports, inside functions too."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            start = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{start}.{alias.name}" for alias in node.names)


def room_violations(path: Path) -> list[str]:
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if room in ("__init__", "__main__"):  # the top of the package may reach every room
        return []
    wrong = []
    for name in imports(path):
        parts = name.split(".")
        if parts[0] != "diffsieve" or parts[1:] == ["__version__"]:
            continue
        other = parts[1] if len(parts) > 1 else "__init__"
        if other != room and not RANKS.get(other, 99) < RANKS[room]:
            wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    return wrong


def test_imports_between_rooms_go_one_way():
    assert [line for path in source_files() for line in room_violations(path)] == []


def test_the_scan_of_imports_sees_a_violation(tmp_path, monkeypatch):
    bad = tmp_path / "diffsieve" / "kernels" / "sub" / "bad.py"
    bad.parent.mkdir(parents=True)
    bad.write_text(
        "from .. import orders\nfrom ...errors import UserInputError\ndef f():\n    from ...eval import psnr\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path / "diffsieve")
    assert room_violations(bad) == ["diffsieve/kernels/sub/bad.py imports diffsieve.eval.psnr"]


def test_the_app_needs_no_training_code():
    found = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in source_files()
        if path.relative_to(PACKAGE).parts[0] == "app"
        for name in imports(path)
        if name.startswith("diffsieve.pipelines.training")
    ]
    assert found == []


def test_only_what_is_on_the_page_imports_gradio():
    """Handlers, limits, models and views are tested without a server; what runs them imports it when it starts."""
    app = PACKAGE / "app"
    found = {path.relative_to(app).parts[0].removesuffix(".py") for path in app.rglob("*.py")
             if any(name.split(".")[0] == "gradio" for name in imports(path))}  # fmt: skip
    assert found == {"api", "components", "events", "look", "page", "server"}


def test_the_app_generates_nothing_itself():
    """All that it takes of models is how to load them and what they are run with; `compare` runs them."""
    used = {
        name
        for path in (PACKAGE / "app").rglob("*.py")
        for name in imports(path)
        if name.startswith(("diffsieve.pipelines", "diffsieve.processors", "diffsieve.kernels", "diffusers"))
    }
    loading = ("diffsieve.pipelines.defaults.", "diffsieve.pipelines.loading.")
    others = {name for name in used if not name.startswith(loading)}
    assert others == {"diffsieve.processors.LLSAConfig", "diffsieve.processors.trained_llsa"}


def normalised(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def test_every_import_is_a_declared_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    requirements = [*project["dependencies"], *extras["eval"], *extras["app"]]
    declared = {normalised(re.split(r"[<>=!~;\[ ]", line)[0]) for line in requirements}
    declared.add("triton")  # comes with PyTorch where it exists
    distributions = packages_distributions()
    undeclared = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in source_files()
        for name in {name.split(".")[0] for name in imports(path)}
        if name != "diffsieve"
        and name not in sys.stdlib_module_names
        and not {normalised(d) for d in distributions.get(name, [name])} & declared
    }
    assert undeclared == set()


def tracked_text_files() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listing.returncode:
        pytest.skip("needs a git checkout (it reads the list of tracked files)")
    paths = [ROOT / name for name in listing.stdout.decode().split("\0") if name]
    return [path for path in paths if path.is_file() and b"\0" not in path.read_bytes()[:4096]]


def test_no_path_of_one_machine_in_the_repository():
    roots = "|".join(("work", "root", "home", "opt", "mnt", "Users"))
    pattern = re.compile(rf"(?<![\w.)/}}])/(?:{roots})/[\w.-]+")
    found = [
        f"{path.relative_to(ROOT)}: {hit}"
        for path in tracked_text_files()
        for hit in pattern.findall(path.read_text(encoding="utf-8", errors="replace"))
    ]
    assert found == []


def test_the_api_page_lists_every_public_name():
    page = (ROOT / "docs" / "api.md").read_text()
    listed = re.findall(r"^### `(\w+)", page, re.MULTILINE)
    assert sorted(listed) == sorted(name for name in diffsieve.__all__ if name != "__version__")


def test_the_options_page_lists_every_field():
    page = (ROOT / "docs" / "options.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert sorted(listed) == sorted(field.name for field in dataclasses.fields(diffsieve.BAAttConfig))


def test_the_generated_tables_are_up_to_date():
    pages = {page: page.read_text() for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
    stale = [page.name for page, text in pages.items() if text != write_tables.with_tables(text)]
    assert stale == [], "run: make tables"
    places = [name for text in pages.values() for name in re.findall(r"<!-- ([\w-]+):begin -->", text)]
    assert set(places) == set(write_tables.tables())
    assert {ROOT / name for name in write_tables.PAGES} == {
        page for page, text in pages.items() if ":begin -->" in text
    }


def test_links_between_pages_lead_somewhere():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert broken == []
