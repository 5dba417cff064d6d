"""The sdist and the wheel: what they hold, and that the wheel installs and runs in an environment of its own."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import diffsieve

ROOT = Path(__file__).parents[1]
WEIGHTS = ("diffsieve/pipelines/mini_wan", "diffsieve/pipelines/mini_pixel_dit")

USE_IT = """
import diffsieve
from diffsieve import BAAttProcessor, load_pipeline
pipe = load_pipeline("mini-wan")
pipe.set_attn_processor(BAAttProcessor())
print(diffsieve.__file__, type(pipe).__name__)
"""

SAVE_AND_LOAD = """
import sys, torch
from diffusers import FlowMatchEulerDiscreteScheduler
import diffsieve
from diffsieve import PixelDiTPipeline, PixelDiTTransformer2DModel, load_pipeline
torch.manual_seed(0)
model = PixelDiTTransformer2DModel(sample_size=16, num_layers=1, num_attention_heads=2, attention_head_dim=16)
for parameter in model.parameters():
    torch.nn.init.normal_(parameter, std=0.1)
pipe = PixelDiTPipeline(model, FlowMatchEulerDiscreteScheduler())
pipe.save_pretrained(sys.argv[1])
def draw(pipe, **size):
    return pipe(num_inference_steps=2, generator=torch.Generator().manual_seed(0), output_type="pt", **size).images
same = torch.equal(draw(PixelDiTPipeline.from_pretrained(sys.argv[1])), draw(pipe))
mini = load_pipeline("mini-pixel-dit", device="cpu")
mini.save_pretrained(sys.argv[1] + "-mini")
again = PixelDiTPipeline.from_pretrained(sys.argv[1] + "-mini")
size = {"class_labels": "Flags", "height": 32, "width": 32}
print(diffsieve.__file__, same, torch.equal(draw(again, **size), draw(mini, **size)))
"""


def run(*command: str | Path, cwd: Path) -> str:
    # What points to other packages is hidden: another path, an index or folder that pip is configured with.
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if name not in hidden and not name.startswith("PIP_")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=kept | {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def required(root: Distribution) -> Iterator[Distribution]:
    """What a distribution requires without extras, and what that requires in turn, as it is installed here."""
    seen, todo = set(), [(root, frozenset({""}))]
    while todo:
        parent, extras = todo.pop()
        for line in parent.requires or ():
            needed = Requirement(line)
            wanted = needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras)
            if wanted and canonicalize_name(needed.name) not in seen:
                seen.add(canonicalize_name(needed.name))
                found = distribution(needed.name)
                yield found
                todo.append((found, frozenset({"", *needed.extras})))


def link_files(parts: Iterator[Distribution], folder: Path) -> None:
    """Put links to the installed modules and metadata of some distributions into a folder, and nothing else."""
    folder.mkdir()
    for part in parts:
        names = {file.parts[0] for file in part.files or ()}
        for name in names - {"..", "__pycache__"}:
            if not name.endswith(".pth") and not (folder / name).exists():
                (folder / name).symlink_to(Path(str(part.locate_file(name))))


def check_contents(sdist: Path, wheel: Path) -> None:
    with tarfile.open(sdist) as archive:
        stem = sdist.name.removesuffix(".tar.gz")
        in_sdist = {name.removeprefix(f"{stem}/") for name in archive.getnames()}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "Makefile", "constraints.txt", "docs/api.md"} <= in_sdist
    assert "tests/test_build.py" in in_sdist
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
    files = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "diffsieve").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"diffsieve/py.typed", *(f"{folder}/model_index.json" for folder in WEIGHTS)} <= files
    assert files <= in_wheel
    assert not any(name.startswith(("tests/", "benchmarks/", "docs/")) for name in in_wheel)


@pytest.mark.slow
def test_the_built_wheel_runs_in_an_empty_environment(tmp_path):
    """Build, install into a fresh virtual environment, and use it away from the checkout.

    Proves: sdist and wheel build, the wheel from the sdist; they hold what they must; pip installs the wheel with its
    resolver on and finds no broken requirement; the command and the package work there with what the wheel's metadata
    requires, and with that alone: the environment sees no other distribution of the one that runs the tests.

    Does not prove: that an index has the requirements, as they are links to what is installed here, in these versions
    (setting up `.venv` and `.venv-oldest` shows that); that the build requirements suffice, as the build is not
    isolated; anything about the extras.
    """
    # From a copy: a build writes beside its sources, and takes over what an earlier one has left there.
    left_out = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "outputs")
    shutil.copytree(ROOT, tmp_path / "source", ignore=left_out)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path, cwd=tmp_path / "source")
    stem = f"diffsieve-{diffsieve.__version__}"
    wheel = tmp_path / f"{stem}-py3-none-any.whl"
    check_contents(tmp_path / f"{stem}.tar.gz", wheel)

    home, away = tmp_path / "env", tmp_path / "away"
    away.mkdir()
    run(sys.executable, "-m", "venv", "--without-pip", home, cwd=away)
    python, command = (home / "bin" / name for name in ("python", "diffsieve"))
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=away).strip())
    assert list(site.iterdir()) == []
    with zipfile.ZipFile(wheel) as archive:
        metadata = PathDistribution(zipfile.Path(archive, f"{stem}.dist-info/"))
        link_files(required(metadata), tmp_path / "required")
    (site / "required.pth").write_text(f"{tmp_path / 'required'}\n")
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--no-index", wheel, cwd=away)
    run(*pip, "check", cwd=away)

    assert run(command, "--version", cwd=away) == f"diffsieve {diffsieve.__version__}\n"
    versions = json.loads(run(command, "info", "--json", cwd=away))["versions"]
    assert versions["diffsieve"] == diffsieve.__version__
    assert versions["gradio"] is versions["lpips"] is None  # what the extras need is out of sight
    clip = ("--frames", "9", "--height", "64", "--width", "64", "--steps", "3", "--device", "cpu")
    sparse = ("--min-tokens", "0", "--block-size", "16", "--warmup", "1")
    report = json.loads(run(command, "generate", "--out", "clips", "--json", *clip, *sparse, cwd=away))
    assert (away / "clips" / report["clips"][0]["file"]).stat().st_size > 1000
    assert report["clips"][0]["sparsity"]["density_sparse_steps"] < 1
    tiny = ("--prompt", "Flags", "--height", "32", "--width", "32", "--steps", "2", "--device", "cpu", "--json")
    drawn = json.loads(run(command, "generate", "--model", "mini-pixel-dit", "--out", "pictures", *tiny, cwd=away))
    assert (away / "pictures" / drawn["clips"][0]["file"]).stat().st_size > 500
    used = run(python, "-c", USE_IT, cwd=away).split()
    assert used[-2:] == [str(site / "diffsieve" / "__init__.py"), "WanPipeline"]
    saved = run(python, "-c", SAVE_AND_LOAD, tmp_path / "pixels", cwd=away).split()
    assert saved[-3:] == [str(site / "diffsieve" / "__init__.py"), "True", "True"]
