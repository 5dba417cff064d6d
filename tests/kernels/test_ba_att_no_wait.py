"""A BA-Att call on a GPU never waits for the device: the host reads nothing of it and sends nothing to it."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from diffsieve.kernels.ba_att import CANDIDATE_ORDERS, ba_attention
from diffsieve.kernels.ba_att.budget_calibration import _calibrate_budgets_op
from diffsieve.kernels.ba_att.calibration import _calibrate_op
from diffsieve.kernels.ba_att.ordering import _sort_all_heads, _sort_known_heads

GRID, LENGTH, HEADS = (5, 9, 10), 450, 4
CASES = [
    {"orders": "raster"},
    {"orders": "hilbert"},
    {"orders": "hilbert_window"},
    {"orders": "norm_sort"},
    {"orders": "table"},
    {"orders": "table", "score": "residual", "compensate": "centroid"},
    {"orders": "table", "score": "halfk", "top_p": 0.8, "compensate": "centroid", "text_suffix": 20},
    {"orders": "hilbert", "budgets": (1, 15, 4, 7), "compensate": "centroid"},
    {"orders": "hilbert", "budgets": (1, 15, 4, 7), "text_suffix": 20},
]
# They read a table on the CPU: of the ids of orders, of budgets.
READERS = ("head_orders", "list_blocks_by_head")


def options_of(case):
    """The arguments of a case, tables as tensors on the CPU."""
    tables = {"orders": torch.tensor([0, 1, 3, 4])} if case["orders"] == "table" else {}
    return case | tables | ({"budgets": torch.tensor(case["budgets"])} if "budgets" in case else {})


class NoWait(TorchDispatchMode):
    """Fails at operations that read values on the host (fake tensors have none) or touch tensors of two devices."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
        devices = {x.device.type for x in tensors}
        if len(devices) > 1 and not any(reader in str(func) for reader in READERS):
            pytest.fail(f"{func} connects {sorted(devices)}: a copy between them makes the host wait")
        return result


def on_a_gpu(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, device="cuda", dtype=dtype)


def case_id(case):
    return "-".join(str(value) for value in case.values())


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_whole_call(case, backend, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    # It looks at the values of a table on the CPU, which fake tensors do not have.
    monkeypatch.setattr("diffsieve.kernels.ba_att.ordering._check_orders", lambda *_: None)
    monkeypatch.setattr("diffsieve.kernels.ba_att.attention._equal_budget", lambda *_: None)
    with FakeTensorMode():
        options = options_of(case)
        length = LENGTH + case.get("text_suffix", 0)
        inputs = [on_a_gpu(1, length, HEADS, 64).transpose(1, 2) for _ in range(3)]
        with NoWait():
            out, info = ba_attention(
                *inputs, grid_thw=GRID, density=0.5, block_size=32, backend=backend, return_info=True, **options
            )
        assert info.backend == ("torch" if backend == "torch" else "triton")
        assert out.shape == (1, HEADS, length, 64)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("table", [[0, 0, 0, 0], [0, 1, 2, 0], [3, 3, 0, 1], [4, 3, 4, 2]], ids=str)
def test_orders_of_heads(table, fused):
    with FakeTensorMode():
        query, key = on_a_gpu(2, HEADS, LENGTH, 16), on_a_gpu(2, 2, LENGTH, 16)
        kept = on_a_gpu(5, LENGTH, dtype=torch.int64)
        on_device = torch.empty(HEADS, dtype=torch.int64, device="cuda")
        with NoWait():
            _sort_known_heads(query, key, table, kept, 64, True, fused)
            _sort_all_heads(query, key, on_device, kept, 64, True)


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("compensate", ["none", "centroid"])
def test_calibration(compensate, backend, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    # What the operations do, which their fakes stand in for otherwise. beta, center_keys, log_count, descending,
    # window, second_order; then compensate, score, text_prefix, text_suffix, scale, probe_blocks.
    options = (GRID, 0.5, 32, 0.5, True, True, True, 64, True, compensate, "residual", 20, 0, 0.125, 4, backend)
    with FakeTensorMode():
        inputs = [on_a_gpu(2, LENGTH + 20, heads, 64).transpose(1, 2) for heads in (HEADS, 2, 2)]
        with NoWait():
            errors = _calibrate_op._init_fn(*inputs, None, *options)
            # The ids come out of `choose_orders`, on the device.
            ids = torch.empty(HEADS, dtype=torch.int64, device="cuda")
            by_number = _calibrate_budgets_op._init_fn(*inputs, None, ids, "", *options)
    assert (errors.shape, errors.dtype) == ((HEADS, len(CANDIDATE_ORDERS)), torch.float32)
    assert (by_number.shape, by_number.dtype) == ((HEADS, 2), torch.float32)


def test_a_wait_is_noticed():
    with FakeTensorMode():
        scores = on_a_gpu(4)
        with NoWait(), pytest.raises(Exception, match="local_scalar_dense"):
            scores.max().item()
        with NoWait(), pytest.raises(pytest.fail.Exception, match="connects"):
            scores.cpu()
        with NoWait(), pytest.raises(pytest.fail.Exception, match="connects"):
            scores[torch.tensor([0, 2])]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_on_a_gpu(case):
    length = LENGTH + case.get("text_suffix", 0)
    inputs = [torch.randn(1, length, HEADS, 64, device="cuda").bfloat16().transpose(1, 2) for _ in range(3)]
    options = options_of(case) | {"grid_thw": GRID, "density": 0.5, "block_size": 32, "return_info": True}
    ba_attention(*inputs, **options)  # compiles kernels and keeps the table of the grid
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ba_attention(*inputs, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
