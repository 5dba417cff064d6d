"""What all tests share: the GPU marker, a fixed generator, a place without weights, a closing list of skips."""

import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

SEED = 20_250_119


def _cuda_available() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _cuda_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
    if not any(shutil.which(name) for name in ("g++", "clang++")):
        for item in items:
            if item.get_closest_marker("compiler"):
                item.add_marker(pytest.mark.skip(reason="needs a C++ compiler, for inductor on the CPU"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say at the end how many tests were skipped, and why."""
    skips = terminalreporter.stats.get("skipped", [])
    reasons = Counter(re.sub(r"^Skipped: ", "", str(report.longrepr[2])) for report in skips)
    terminalreporter.section("skipped tests")
    terminalreporter.write_line(f"{sum(reasons.values())} skipped" + ("" if reasons else ": none"))
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count:6d}  {reason}")


@pytest.fixture
def generator():
    """A CPU generator that starts every test at the same value."""
    import torch

    return torch.Generator("cpu").manual_seed(SEED)


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Hide the weights of metrics that a user has in caches; returns the folder, not made, that stands in for both."""
    return hide_weights(monkeypatch, tmp_path / "caches")


def hide_weights(patch: pytest.MonkeyPatch, home: Path) -> Path:
    """What `no_weights` does, for a fixture of a wider scope."""
    patch.setenv("XDG_CACHE_HOME", str(home))
    patch.setenv("TORCH_HOME", str(home / "torch"))
    return home
