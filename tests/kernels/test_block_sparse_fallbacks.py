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
from tests.kernels.failing import raise_in

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton has no build for this platform"
)
CASE = AttentionCase(heads=2, kv_heads=2, dim=64, block_size=128, len_q=150, len_k=150)


@pytest.fixture
def hopper(monkeypatch):
    """CPU tensors count as tensors on a Hopper GPU; the backends for these compute nothing but what a test puts in."""
    failing = {}

    def run(name, inputs, options):
        if name in failing:
            raise_in("triton", failing[name])
        out, lse = real("torch", inputs, options)
        return out + len(name) / 100, lse

    def chosen(query, key, *, block_size, backend="auto"):
        gpu = mock.Mock(is_cuda=True, dtype=query.dtype, shape=query.shape, device=torch.device("cuda:0"))
        return choose_backend(gpu, gpu, block_size=block_size, backend=backend)

    real = op.run_backend
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(fallbacks, "_capability", lambda _: (9, 0))
    monkeypatch.setattr(op, "choose_backend", chosen)
    monkeypatch.setattr(op, "run_backend", run)
    return failing


@pytest.fixture(autouse=True)
def nothing_failed(monkeypatch):
    monkeypatch.setattr(fallbacks, "_said", set())
    with mock.patch.dict(fallbacks.FAILED, clear=True):
        yield


def attend(**options):
    inputs = testing.make_inputs(CASE, dtype=torch.bfloat16)
    return block_sparse_attention(*inputs.tensors(), block_size=CASE.block_size, **options)


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
    assert {backend for backend, _ in fallbacks.FAILED} == {"hopper", "hopper-exact", "triton"}
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


@pytest.mark.parametrize("backend", ["auto", "hopper"])
def test_an_error_of_our_own_code_is_no_failed_compilation(hopper, monkeypatch, backend):
    def run(name, inputs, options):
        raise TypeError("descriptors take five arguments")

    monkeypatch.setattr(op, "run_backend", run)
    with pytest.raises(TypeError, match="five arguments"):
        attend(backend=backend)
    assert fallbacks.FAILED == {}


def test_an_error_of_the_compiler_is_known_by_where_it_came_from():
    from triton.compiler import ASTSource

    with pytest.raises(Exception) as caught:  # noqa: PT011
        ASTSource(None, {})
    assert fallbacks.is_build_failure(caught.value)
    assert not fallbacks.is_build_failure(AttributeError("never raised"))


def test_what_failed_on_one_kind_of_gpu_is_tried_on_another(monkeypatch):
    capabilities = {0: (9, 0), 1: (8, 0), 2: (9, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device.index])
    first, other, alike = (torch.device("cuda", i) for i in range(3))
    assert fallbacks.failure("triton", first) is None
    fallbacks.give_up("triton", first, RuntimeError("no registers left"), asked="auto")
    reason = "could not be built (RuntimeError: no registers left)"
    assert fallbacks.failure("triton", first) == fallbacks.failure("triton", alike) == reason
    assert fallbacks.failure("triton", other) is None
    assert fallbacks.failure("hopper", first) is None
    gpu = {"is_cuda": True, "dtype": torch.bfloat16, "shape": (1, 2, 4096, 96)}
    names = [choose_backend(x, x, block_size=128).name for x in (mock.Mock(**gpu, device=d) for d in (first, other))]
    assert names == ["torch", "triton"]


def test_gradients_go_to_torch_where_their_kernel_cannot_be_built(hopper, caplog):
    from diffsieve.kernels.block_sparse import triton_backward

    inputs = testing.make_inputs(CASE, dtype=torch.float32)

    def gradients(backend):
        leaves = [x.detach().clone().requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]
        out = block_sparse_attention(
            *leaves, inputs.block_index, inputs.block_count, block_size=CASE.block_size, backend=backend
        )
        out.square().sum().backward()
        return [x.grad for x in leaves]

    failing = mock.Mock(side_effect=lambda *_, **__: raise_in("triton", RuntimeError("no registers left")))
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
