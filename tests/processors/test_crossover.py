"""From which length on calls are sparse, by device, and what the summary says of shorter ones."""

import json
from pathlib import Path

import pytest
import torch

from diffsieve import BAAttConfig, apply_sparse_attention, sparsity_summary
from diffsieve.processors import controller
from diffsieve.processors.crossover import Crossover, crossover
from tests import tiny

RESULTS = Path(__file__).parents[2] / "benchmarks/results"


def test_of_each_device():
    assert crossover("cuda", (9, 0), "NVIDIA H200") == Crossover(16_384)
    for gpu in ("NVIDIA H100 80GB HBM3", "NVIDIA GH200 480GB", None):  # of the same capability, not measured
        assert crossover("cuda", (9, 0), gpu) == Crossover(16_384, estimate=True)
    for capability in ((8, 0), (12, 0), None):
        assert crossover("cuda", capability) == Crossover(16_384, estimate=True)
    assert crossover("cuda", (10, 0)) == crossover("cuda", (10, 3)) == Crossover(32_768, estimate=True)
    assert crossover("mps") == Crossover(8_192, estimate=True)
    # The default clip of the embedded model has 4,032 tokens and must be sparse on a CPU.
    assert crossover("cpu").tokens <= 4_032


@pytest.mark.parametrize(
    ("path", "device", "method"),
    [
        ("h200/bench/ba-att.json", ("cuda", (9, 0), "NVIDIA H200"), "default"),
        ("cpu/bench/block-sparse.json", ("cpu",), "torch"),
    ],
)
def test_what_is_called_measured_was(path, device, method):
    report = json.loads((RESULTS / path).read_text(encoding="utf-8"))
    rows = report["rows"]
    assert len(device) == 1 or device[2] in json.dumps(report)
    shortest = crossover(*device)
    assert not shortest.estimate
    rows = [row for row in rows if row.get("sparsity") == 0.5 and row.get("method") == method]
    won = {row["tokens"]: next(iter(row["speedup"].values())) > 1 for row in rows if row["tokens"] >= shortest.tokens}
    assert won[shortest.tokens]
    assert all(won.values())
    dense = {row["tokens"]: row["ms"] for row in report["rows"] if row.get("method", "").startswith("dense, cuDNN")}
    assert all(row["ms"] < dense[row["tokens"]] for row in rows if row["tokens"] in dense and row["tokens"] in won), (
        "eager calls hold the host's time"
    )


def test_the_summary_says_where_it_is_an_estimate(monkeypatch):
    monkeypatch.setattr(controller, "crossover", lambda *_: Crossover(49, estimate=True))
    pipe = tiny.wan_pipeline()
    apply_sparse_attention(pipe, BAAttConfig(block_size=8))
    tiny.generate(pipe)
    assert set(sparsity_summary(pipe).dense_reasons) == {"short sequence (48 < 49 tokens, an estimate)"}


def test_the_setting_comes_first(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA B200")
    device = torch.device("cuda:0")
    assert controller._crossover(BAAttConfig(), device) == Crossover(32_768, estimate=True)
    assert controller._crossover(BAAttConfig(min_tokens=7), device) == Crossover(7)
