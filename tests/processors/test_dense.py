"""Dense calls by our own kernel: when they are handed to it, and that the result stays the same."""

import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import attention_backend
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch._dynamo.testing import CompileCounterWithBackend

from diffsieve import BAAttConfig, apply_sparse_attention, sparsity_summary
from diffsieve.kernels.block_sparse import dense, fallbacks
from diffsieve.processors import ba_att, controller
from diffsieve.processors import dense as room
from tests import tiny
from tests.kernels.failing import raise_in

LAYERS, STEPS, BRANCHES = 3, 5, 2
DENSE_ATTENTION = ba_att.dense_attention


def _config(**options):
    return BAAttConfig(**{"block_size": 8, "min_tokens": 0, "warmup_steps": 2, "dense_layers": (0,)} | options)


@pytest.fixture
def calls(monkeypatch):
    """As on a GPU where our kernel wins; returns the shapes of the queries that it was given."""
    found = []

    def attend(query, key, value, *, backend, fall_back):
        found.append((tuple(query.shape), backend, fall_back))
        return real(query, key, value, backend="torch", fall_back=fall_back)

    real = ba_att.dense_attention
    monkeypatch.setattr(controller, "backend_of_dense_calls", lambda *_: "hopper")
    monkeypatch.setattr(ba_att, "dense_attention", attend)
    return found


def test_warm_up_and_dense_layers_go_to_the_kernel(calls):
    expected = tiny.wan_pipeline(LAYERS)
    with mock.patch.object(controller, "backend_of_dense_calls", return_value=None):
        apply_sparse_attention(expected, _config())
        latents = tiny.generate(expected, steps=STEPS)
    assert sparsity_summary(expected).dense_backends == {}
    assert calls == []
    pipe = tiny.wan_pipeline(LAYERS)
    apply_sparse_attention(pipe, _config())
    out = tiny.generate(pipe, steps=STEPS)
    # Two steps with all layers, and three with the first one; of both branches of guidance.
    assert len(calls) == BRANCHES * (2 * LAYERS + 3)
    assert {shape[1:3] for shape, *_ in calls} == {(tiny.HEADS, tiny.TOKENS)}
    assert {tuple(choice) for _, *choice in calls} == {("hopper", True)}
    assert torch.allclose(out, latents, atol=1e-4)
    summary = sparsity_summary(pipe)
    assert sum(summary.dense_reasons.values()) == len(calls)
    assert summary.dense_backends == {"hopper": len(calls)}
    assert f"; {len(calls)} by hopper, all blocks listed" in str(summary)


def test_the_summary_counts_only_calls_that_the_kernel_did(calls, monkeypatch):
    def run(*_):
        raise_in("triton", RuntimeError("the compiler gave up"))

    monkeypatch.setattr(dense, "run_backend", run)
    monkeypatch.setattr(fallbacks, "FAILED", {})
    pipe = tiny.wan_pipeline(LAYERS)
    apply_sparse_attention(pipe, _config())
    tiny.generate(pipe, steps=STEPS)
    summary = sparsity_summary(pipe)
    assert sum(summary.dense_reasons.values()) == len(calls) > 0
    assert summary.dense_backends == {}
    assert "all blocks listed" not in str(summary)


def test_a_forward_with_gradients_in_a_step_that_began_without_is_the_models_own(calls):
    model = tiny.transformer()
    apply_sparse_attention(model, _config(warmup_steps=1))
    inputs = torch.randn(1, 16, 3, 8, 8), torch.ones(1), torch.zeros(1, 4, 16)
    with torch.no_grad():
        model(*inputs)
    before = len(calls)
    assert before
    model(*inputs)[0].sum().backward()
    assert len(calls) == before


def test_a_chosen_backend_and_a_processor_of_ones_own_are_kept(calls):
    class Own(WanAttnProcessor):
        pass

    pipe = tiny.wan_pipeline(LAYERS)
    pipe.transformer.blocks[1].attn1.set_processor(Own())
    apply_sparse_attention(pipe, _config(warmup_steps=STEPS))
    tiny.generate(pipe, steps=STEPS)
    assert len(calls) == BRANCHES * STEPS * (LAYERS - 1)
    calls.clear()
    with attention_backend("native"):  # which puts back what the next line changes for all of diffusers
        pipe.transformer.set_attention_backend("_native_math")
        tiny.generate(pipe, steps=STEPS)
    assert calls == []


def test_a_backend_chosen_between_two_forwards_of_a_step_counts_at_once(calls):
    model = tiny.transformer(LAYERS)
    apply_sparse_attention(model, _config(warmup_steps=1))
    inputs = torch.randn(1, 16, 3, 8, 8), torch.ones(1), torch.zeros(1, 4, 16)

    def replaced():
        calls.clear()
        with torch.no_grad():
            model(*inputs)
        return len(calls)

    assert replaced() == LAYERS
    with attention_backend("_native_math"):
        assert replaced() == 0
    assert replaced() == LAYERS
    model.set_attention_backend("native")  # of each layer: that of diffusers as a whole stays what it was
    assert replaced() == 0
    model.reset_attention_backend()
    assert replaced() == LAYERS
    assert sparsity_summary(model).dense_backends == {"hopper": 3 * LAYERS}, "one step, with five forwards"


def test_diffusers_is_asked_once_a_forward(calls, monkeypatch):
    asked, registry = [], attention_dispatch._AttentionBackendRegistry
    ask = registry.get_active_backend

    def count():
        asked.append(sys._getframe(1).f_globals["__name__"])  # diffusers asks, too
        return ask()

    pipe = tiny.wan_pipeline(LAYERS)
    apply_sparse_attention(pipe, _config())
    monkeypatch.setattr(registry, "get_active_backend", count)
    tiny.generate(pipe, steps=STEPS)
    assert calls
    assert asked.count(room.__name__) == BRANCHES * STEPS


@pytest.mark.slow
def test_it_compiles(calls):
    torch._dynamo.reset()
    eager = tiny.wan_pipeline()
    apply_sparse_attention(eager, _config())
    expected = tiny.generate(eager, steps=STEPS)
    assert calls
    pipe, counter = tiny.wan_pipeline(), CompileCounterWithBackend("eager")
    apply_sparse_attention(pipe, _config())
    with (
        mock.patch.object(ba_att, "dense_attention", DENSE_ATTENTION),  # without a list that grows
        mock.patch.object(controller, "backend_of_dense_calls", return_value="torch"),
    ):
        pipe.transformer.compile(backend=counter, fullgraph=True)
        out = tiny.generate(pipe, steps=STEPS)
    assert torch.allclose(out, expected, atol=1e-5)
    assert counter.frame_count == 3
    assert sparsity_summary(pipe).dense_backends == {"torch": len(calls)}
    torch._dynamo.reset()


def test_what_is_asked_before_a_forward(monkeypatch):
    transformer = SimpleNamespace(config=SimpleNamespace(attention_head_dim=128))
    hidden = mock.Mock(device=torch.device("cuda:0"), dtype=torch.bfloat16)
    asked = mock.Mock(return_value="hopper")
    monkeypatch.setattr(room, "dense_backend", asked)
    monkeypatch.setattr(torch, "empty", lambda shape, **_: SimpleNamespace(shape=shape))
    config = _config(backend="hopper-exact")
    assert room.backend_of_dense_calls(transformer, hidden, 75_600, config) is None, "gradients are wanted"
    with torch.no_grad():
        assert room.backend_of_dense_calls(transformer, hidden, 75_600, config) == "hopper"
        assert asked.call_args.args[0].shape[3] == 128
        assert asked.call_args.args[1] == 75_600
        assert asked.call_args.kwargs == {"backend": "hopper-exact"}
        asked.reset_mock()
        on_cpu = mock.Mock(device=torch.device("cpu"), dtype=torch.bfloat16)
        assert room.backend_of_dense_calls(transformer, on_cpu, 75_600, config) is None
        unknown = SimpleNamespace(config=SimpleNamespace())
        assert room.backend_of_dense_calls(unknown, hidden, 75_600, config) is None
    asked.assert_not_called()


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu(compiled, monkeypatch):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the GPU is not a Hopper")
    torch._dynamo.reset()
    monkeypatch.setattr(dense, "_FEWEST_BLOCKS", {("hopper", 64): 1})
    model = tiny.transformer(attention_head_dim=64).to("cuda", torch.bfloat16)
    inputs = [
        torch.randn(2, 16, 3, 16, 16, device="cuda"),
        torch.ones(2, device="cuda"),
        torch.zeros(2, 4, 16, device="cuda"),
    ]
    inputs = [x.bfloat16() for x in inputs]
    with torch.no_grad():
        expected = model(*inputs)[0].float()
        apply_sparse_attention(model, _config(warmup_steps=1))
        if compiled:
            model.compile(fullgraph=True)
        out = model(*inputs)[0].float()
    assert sparsity_summary(model).dense_backends == {"hopper": len(model.blocks)}
    assert (out - expected).square().mean().sqrt() < 0.02 * expected.square().mean().sqrt()
