"""What "auto" does when a kernel cannot be built, on a GPU that is not there."""

import importlib.util
import logging
from unittest import mock

import pytest
import torch

from diffsieve.errors import BackendUnavailableError, UserInputError
from diffsieve.kernels import testing
from diffsieve.kernels.block_sparse import backends, block_sparse_attention, choose_backend, fallbacks, op
from diffsieve.kernels.testing import AttentionCase

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton has no build for this platform"
)
CASE = AttentionCase(heads=2, kv_heads=2, dim=64, block_size=64, len_q=150, len_k=150)


@pytest.fixture
def hopper(monkeypatch):
    """CPU tensors count as tensors on a Hopper GPU; the backends for these compute nothing but what a test puts in."""
    failing = {}

    def run(name, inputs, options):
        if name in failing:
            raise failing[name]
        out, lse = real("torch", inputs, options)
        return out + len(name) / 100, lse

    def chosen(query, key, *, block_size, backend="auto"):
        gpu = mock.Mock(is_cuda=True, dtype=query.dtype, shape=query.shape, device=torch.device("cuda:0"))
        return choose_backend(gpu, gpu, block_size=block_size, backend=backend)

    real = op._run
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(op, "choose_backend", chosen)
    monkeypatch.setattr(op, "_run", run)
    return failing


@pytest.fixture(autouse=True)
def nothing_failed(monkeypatch):
    monkeypatch.setattr(fallbacks, "_said", set())
    with mock.patch.dict(fallbacks.FAILED, clear=True):
        yield


def attend(**options):
    inputs = testing.make_inputs(CASE, dtype=torch.bfloat16)
    return block_sparse_attention(*inputs.tensors(), block_size=64, **options)


def test_auto_takes_the_next_one_and_says_so_once(hopper, caplog):
    first = attend()
    assert caplog.messages == []
    hopper["hopper"] = RuntimeError("PassManager::run failed")
    second, third = attend(), attend()
    said = (
        "block_sparse_attention takes hopper-exact: hopper could not be built (RuntimeError: PassManager::run failed)"
    )
    assert caplog.messages == [said]
    assert caplog.records[0].levelno == logging.WARNING
    # Every stand-in adds its own number: these are of another backend than the first.
    assert not torch.equal(first, second)
    assert torch.equal(second, third)


def test_auto_ends_at_torch(hopper, caplog):
    for name in ("hopper", "hopper-exact", "triton"):
        hopper[name] = AttributeError(f"no {name}")
    attend()
    assert set(fallbacks.FAILED) == {"hopper", "hopper-exact", "triton"}
    assert caplog.messages[-1].startswith("block_sparse_attention takes torch: hopper could not be built")


def test_a_named_backend_is_not_replaced(hopper, caplog):
    hopper["hopper"] = ValueError("first line\nlast line")
    for _ in range(2):
        with pytest.raises(BackendUnavailableError) as caught:
            attend(backend="hopper")
        assert str(caught.value) == (
            'backend="hopper" could not be built (ValueError: last line); use backend="auto" or "torch"'
        )
        assert isinstance(caught.value.__cause__, ValueError)
    assert fallbacks.FAILED == {}
    assert caplog.messages == []


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        RuntimeError("CUDA error: device-side assert triggered"),
        UserInputError("query must be something else"),
    ],
    ids=str,
)
def test_faults_of_the_gpu_and_of_the_caller_are_no_failed_compilations(hopper, error):
    hopper["hopper"] = error
    with pytest.raises(type(error)):
        attend()
    assert fallbacks.FAILED == {}


def test_gradients_go_to_torch_where_their_kernel_cannot_be_built(hopper, caplog):
    from diffsieve.kernels.block_sparse import triton_backward

    inputs = testing.make_inputs(CASE, dtype=torch.float32)

    def gradients(backend):
        leaves = [x.detach().clone().requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]
        out = block_sparse_attention(*leaves, inputs.block_index, inputs.block_count, block_size=64, backend=backend)
        out.square().sum().backward()
        return [x.grad for x in leaves]

    failing = mock.Mock(side_effect=RuntimeError("no registers left"))
    with (
        mock.patch.object(triton_backward, "block_sparse_attention_triton_backward", failing),
        mock.patch.object(op, "choose_backend", return_value=backends.BackendChoice("triton", "")),
    ):
        assert all(x is not None for x in gradients("auto"))
        gradients("auto")
        with pytest.raises(BackendUnavailableError, match=r"could not be built \(RuntimeError: no registers left"):
            gradients("triton")
    assert failing.call_count == 2
    assert len(caplog.messages) == 1
