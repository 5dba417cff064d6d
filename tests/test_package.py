"""The package as a whole: its public names, what importing it loads, its version."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

import diffsieve

ROOT = Path(__file__).parents[1]
PUBLIC = [
    "BAAttConfig",
    "BAAttProcessor",
    "BackendUnavailableError",
    "DiffsieveError",
    "LLSAConfig",
    "LLSAProcessor",
    "LLSASummary",
    "PixelDiTPipeline",
    "PixelDiTTransformer2DModel",
    "SparsitySummary",
    "UserInputError",
    "__version__",
    "apply_sparse_attention",
    "ba_attention",
    "block_sparse_attention",
    "llsa_attention",
    "load_pipeline",
    "remove_sparse_attention",
    "save_orders",
    "sparse_attention",
    "sparsity_summary",
]
OPTIONAL = ("accelerate", "diffusers", "gradio", "imageio", "lpips", "skimage", "transformers", "triton", "typer")


def loaded_by(code: str) -> set[str]:
    """Top-level modules and `torch._dynamo`, where loaded, after running `code` in a fresh process."""
    script = f"import sys\n{code}\nprint(*{{*(n.split('.')[0] for n in sys.modules), *sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_public_names():
    assert diffsieve.__all__ == PUBLIC
    assert set(PUBLIC) <= set(dir(diffsieve))


@pytest.mark.parametrize("name", PUBLIC)
def test_each_public_name_is_there_and_documented(name):
    value = getattr(diffsieve, name)
    assert value is getattr(diffsieve, name)
    if name != "__version__":
        assert value.__name__ == name
        assert value.__doc__


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'diffsieve' has no attribute 'nonsense'"):
        diffsieve.nonsense  # noqa: B018


def test_importing_the_package_loads_nothing_else():
    assert not loaded_by("import diffsieve; diffsieve.UserInputError") & {"torch", "numpy", *OPTIONAL}


@pytest.mark.parametrize("name", ["block_sparse_attention", "ba_attention", "llsa_attention"])
def test_the_kernels_load_torch_alone(name):
    loaded = loaded_by(f"import diffsieve; diffsieve.{name}")
    assert "torch" in loaded
    assert not loaded & {"torch._dynamo", "torch._inductor", *OPTIONAL}


def test_one_version_everywhere():
    assert re.fullmatch(r"\d+\.\d+\.\d+", diffsieve.__version__)
    assert importlib.metadata.version("diffsieve") == diffsieve.__version__
    newest = re.search(r"^## \[?(\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == diffsieve.__version__
