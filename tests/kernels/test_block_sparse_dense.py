"""Dense attention by the kernels for lists: the measurements it goes by, what it refuses, and its result."""

import importlib.util
import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from diffsieve.kernels import testing
from diffsieve.kernels.block_sparse import choose_backend, dense, dense_attention, dense_backend, fallbacks
from diffsieve.kernels.testing import AttentionCase

RESULTS = Path(__file__).parents[2] / "benchmarks/results/h200"
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton has no build for this platform"
)


def test_the_table_is_what_was_measured():
    report = json.loads((RESULTS / "dense_full_lists.json").read_text(encoding="utf-8"))
    ours = ("hopper", "hopper-exact")
    for row in report["rows"]:
        if row["len_q"] != row["len_k"]:
            continue
        assert all(row["checks"][name]["ok"] for name in ours)
        times = [row[part] for part in ("graph_ms", "eager_ms") if row[part]]
        expected = {name: tuple(round(part[name], 3) for part in times) for name in ours}
        expected["sdpa"] = tuple(round(min(part[name] for name in part if name not in ours), 3) for part in times)
        assert dense.MEASURED_SM90[row["dim"], row["len_q"]] == expected
    table = {tuple(map(int, key.split(", "))): times for key, times in report["table"].items()}
    assert {key: {name: list(ms) for name, ms in times.items()} for key, times in dense.MEASURED_SM90.items()} == table
    # 16,384, 32,768 and 75,648 tokens; the exact form loses at the longest with 64 channels.
    assert dense._FEWEST_BLOCKS == {("hopper", 128): 128, ("hopper", 64): 256, ("hopper-exact", 128): 591}


def test_it_starts_at_the_length_from_which_on_every_measurement_is_won(monkeypatch):
    lost = (99.0, 99.0)
    measured = {
        (64, 1_000): {"sdpa": (2.0, 2.0), "hopper": (1.0, 1.0), "hopper-exact": lost},
        (64, 2_000): {"sdpa": (4.0, 4.0), "hopper": (3.0, 5.0), "hopper-exact": lost},  # the host is too slow
        (64, 4_000): {"sdpa": (8.0, 9.0), "hopper": (7.0, 8.0), "hopper-exact": (8.0, 8.0)},
        (64, 8_000): {"sdpa": (16.0,), "hopper": (13.0,), "hopper-exact": (15.0,)},
        (128, 8_000): {"sdpa": (16.0,), "hopper": (16.0,), "hopper-exact": (17.0,)},
    }
    monkeypatch.setattr(dense, "MEASURED_SM90", measured)
    assert dense._fewest_blocks() == {("hopper", 64): 32, ("hopper-exact", 64): 63}


def probe(**changes):
    values = {"is_cuda": True, "dtype": torch.bfloat16, "shape": (1, 1, 1, 128), "device": torch.device("cuda:0")}
    return mock.Mock(**values | changes)


@needs_triton
def test_it_is_used_only_where_it_is_known_to_win(monkeypatch):
    monkeypatch.setattr(dense, "_FEWEST_BLOCKS", {("hopper", 128): 100, ("hopper-exact", 128): 200})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    assert dense_backend(probe(), 12_673) == "hopper"  # the hundredth block is short
    assert dense_backend(probe(), 12_672) is None
    assert dense_backend(probe(), 20_000, backend="hopper") == "hopper"
    assert dense_backend(probe(), 20_000, backend="hopper-exact") is None
    assert dense_backend(probe(), 25_600, backend="hopper-exact") == "hopper-exact"
    assert dense_backend(probe(), 99_999, backend="triton") is None
    for changes in ({"dtype": torch.float16}, {"shape": (1, 1, 1, 64)}, {"is_cuda": False}):
        assert dense_backend(probe(**changes), 99_999) is None
    monkeypatch.setitem(fallbacks.FAILED, "hopper", "could not be built")
    assert choose_backend(probe(), probe(), block_size=128).name == "hopper-exact"
    assert dense_backend(probe(), 20_000) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
    assert dense_backend(probe(), 99_999) is None


@pytest.mark.parametrize(("len_q", "len_k"), [(300, 300), (40, 700)])
def test_it_attends_to_all_keys(len_q, len_k):
    case = AttentionCase(heads=4, kv_heads=2, dim=64, len_q=len_q, len_k=len_k, layout="blhd")
    query, key, value, *_ = testing.make_inputs(case, dtype=torch.float32).tensors()
    out = dense_attention(query, key, value)
    assert torch.allclose(out, scaled_dot_product_attention(query, key, value, enable_gqa=True), atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["hopper", "hopper-exact"])
@pytest.mark.parametrize(("len_q", "len_k", "gain"), [(4_000, 4_000, 1.0), (300, 5_000, 1.0), (1_000, 1_000, 200.0)])
def test_error_on_a_gpu(backend, len_q, len_k, gain):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the GPU is not a Hopper")
    case = AttentionCase(heads=4, kv_heads=2, dim=128, len_q=len_q, len_k=len_k, density=1.0, gain=gain)
    inputs = testing.make_inputs(case, dtype=torch.bfloat16, device="cuda")
    with testing.poisoned_memory():
        out, again = (dense_attention(*inputs.tensors()[:3], backend=backend) for _ in range(2))
    exact, _ = testing.exact_attention(inputs, block_size=case.block_size)
    bound = testing.error_bound(testing.masked_sdpa(inputs, block_size=case.block_size), exact)
    if gain > 1:
        # One key takes all of the weight. That of PyTorch is exactly 1; ours is only near it, since a fused multiply-add
        # takes a rounded maximum from a product that is not rounded, and is rounded to the dtype after that.
        bound += torch.finfo(out.dtype).eps / 4
    assert testing.error_ratio(out, exact) <= bound
    assert torch.equal(out, again)
