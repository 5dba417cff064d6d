"""What `make` would run, without running it."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def recipe(target: str) -> str:
    """The commands of a target and of all that it depends on, as on a fresh clone."""
    command = ["make", "--dry-run", "--always-make", target]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("target", ["demo", "test", "test-oldest", "app"])
def test_set_up_installs_into_an_environment_of_its_own(target):
    commands = recipe(target)
    installs = [line for line in commands.splitlines() if " install " in line]
    assert len(installs) >= 2
    assert all(line.startswith((".venv/bin/python -m pip", ".venv-oldest/bin/python -m pip")) for line in installs)


def test_the_demo_is_sparse_on_a_gpu_too():
    assert " compare --model mini-wan --method ba-att --min-tokens 0 " in recipe("demo")


def test_the_browser_is_a_target_of_its_own_that_continuous_integration_calls():
    assert "apt-get" in recipe("browser")
    ci = (ROOT / ".ci/run").read_text()
    assert ci.index("\nmake browser") < ci.index("\nexec make test")


def test_continuous_integration_leaves_the_pictures_of_the_page_where_it_is_written():
    place = "outputs/screenshots"
    assert f"DIFFSIEVE_SCREENSHOTS={ROOT / place} " in recipe("test")
    for page in ("CONTRIBUTING.md", "docs/app.md"):
        assert f"`{place}`" in (ROOT / page).read_text()
