"""The study on a CUDA GPU: selections as on the CPU, a whole small study of mini-wan in bfloat16."""

import json

import pytest
import torch

from diffsieve.kernels.ba_att import TokenOrders, block_mask
from diffsieve.study import CaptureConfig, RecallConfig, StudyConfig, capture, study_clips, study_recall
from diffsieve.study.bound import bound_and_deviation
from diffsieve.study.mass import block_mass
from diffsieve.study.selections import antidiagonal, head_budgets, oracle

pytestmark = pytest.mark.gpu
CLIP = {"frames": 13, "height": 192, "width": 192, "steps": 5, "seed": (0,), "device": "cuda"}
VARIANTS = (
    "paper", "default", "hindsight", "order by recall", "head budgets", "measured budgets", "oracle",
    "antidiagonal 16", "random", "sort keys",
)  # fmt: skip


@pytest.mark.parametrize(
    "custom", [oracle(), antidiagonal(16), head_budgets()], ids=["oracle", "antidiagonal", "budgets"]
)
def test_selections_agree_with_the_cpu(custom, generator):
    q, k = (torch.randn(1, 3, 1000, 64, generator=generator) for _ in range(2))
    arguments = {"kept": 4, "block_size": 128, "scale": 0.125}
    masks = [
        block_mask(*custom.select(x.to(device), y.to(device), **arguments), 8).cpu()
        for device, (x, y) in (("cpu", (q, k)), ("cuda", (q, k)))
    ]
    assert (masks[0] == masks[1]).float().mean() > 0.99  # near ties may fall either way


def test_exact_figures_agree_with_the_cpu(generator):
    q, k = (torch.randn(1, 3, 1000, 64, generator=generator) for _ in range(2))
    for measure in (block_mass, bound_and_deviation):
        results = [
            measure(q.to(device), k.to(device), TokenOrders(None, None), block_size=128, scale=0.125)
            for device in ("cpu", "cuda")
        ]
        for own, other in zip(*(x if isinstance(x, tuple) else (x,) for x in results), strict=True):
            torch.testing.assert_close(own, other.cpu(), rtol=1e-3, atol=1e-3)


def test_a_small_study(tmp_path):
    config = StudyConfig(**CLIP, prompts=1, block_size=64, suites=(), variants=VARIANTS, out=tmp_path / "study")
    assert study_clips(config)["missing"] == 0
    captures = CaptureConfig(**CLIP, layers=(2, 5), out=tmp_path / "captures")
    capture(captures)
    recall = RecallConfig(
        captures=captures.out, out=config.out, suites=(), variants=VARIANTS, block_size=64, device="cuda"
    )
    assert study_recall(recall)["missing"] == 0
    report = json.loads((config.out / "study.json").read_text(encoding="utf-8"))
    rows = {row["variant"]: row for row in report["clips"]["rows"]}
    assert rows["noise floor"]["metrics"]["psnr"]["mean"] > rows["random"]["metrics"]["psnr"]["mean"]
    assert rows["noise floor"]["kernels"] == ["_native_efficient"]
    assert rows["oracle"]["metrics"]["psnr"]["mean"] > rows["random"]["metrics"]["psnr"]["mean"]
    for name in ("head budgets", "measured budgets"):
        assert rows[name]["density_sparse_steps"] == pytest.approx(rows["paper"]["density_sparse_steps"])
    recalls = {row["variant"]: row["recall"]["mean"] for row in report["recall"]["rows"] if row["calls"]}
    assert recalls["oracle"] >= recalls["default"] > recalls["random"]
