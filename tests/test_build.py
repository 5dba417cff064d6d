"""The sdist and the wheel: what they hold, and that an installed wheel works away from the checkout."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import diffsieve

ROOT = Path(__file__).parents[1]
WEIGHTS = "diffsieve/pipelines/mini_wan"

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
from diffsieve import PixelDiTPipeline, PixelDiTTransformer2DModel
torch.manual_seed(0)
model = PixelDiTTransformer2DModel(sample_size=16, num_layers=1, num_attention_heads=2, attention_head_dim=16)
for parameter in model.parameters():
    torch.nn.init.normal_(parameter, std=0.1)
pipe = PixelDiTPipeline(model, FlowMatchEulerDiscreteScheduler())
pipe.save_pretrained(sys.argv[1])
def draw(pipe):
    return pipe(num_inference_steps=2, generator=torch.Generator().manual_seed(0), output_type="pt").images
print(diffsieve.__file__, torch.equal(draw(PixelDiTPipeline.from_pretrained(sys.argv[1])), draw(pipe)))
"""


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_built_wheel_works_outside_the_checkout(tmp_path):
    # Without isolation the build needs no network. The wheel is built from the sdist, so both are complete.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path, cwd=ROOT)
    stem = f"diffsieve-{diffsieve.__version__}"

    with tarfile.open(tmp_path / f"{stem}.tar.gz") as sdist:
        in_sdist = {name.removeprefix(f"{stem}/") for name in sdist.getnames()}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "Makefile", "constraints.txt", "docs/api.md"} <= in_sdist
    assert "tests/test_build.py" in in_sdist

    wheel = tmp_path / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
    files = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "diffsieve").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"diffsieve/py.typed", f"{WEIGHTS}/model_index.json"} <= files
    assert files <= in_wheel
    assert not any(name.startswith(("tests/", "benchmarks/", "docs/")) for name in in_wheel)

    site = tmp_path / "site"
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site, wheel, cwd=tmp_path)
    version = run(site / "bin" / "diffsieve", "--version", cwd=tmp_path, PYTHONPATH=str(site))
    assert version == f"diffsieve {diffsieve.__version__}\n"
    used = run(sys.executable, "-c", USE_IT, cwd=tmp_path, PYTHONPATH=str(site)).split()
    assert used[-2:] == [str(site / "diffsieve" / "__init__.py"), "WanPipeline"]
    saved = run(sys.executable, "-c", SAVE_AND_LOAD, tmp_path / "pixels", cwd=tmp_path, PYTHONPATH=str(site)).split()
    assert saved[-2:] == [str(site / "diffsieve" / "__init__.py"), "True"]
