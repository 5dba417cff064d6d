"""torch.compile of the transformer in its three forms: full graphs, at most three of them in a run."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from diffsieve import BAAttConfig, apply_sparse_attention, remove_sparse_attention, sparsity_summary
from diffsieve.processors.install import controllers_of
from tests import tiny

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _config(**options):
    return BAAttConfig(**{"block_size": 8, "min_tokens": 0, "warmup_steps": 2} | options)


def _compile(pipe, form, backend):
    if form == "wrapped":
        pipe.transformer = torch.compile(pipe.transformer, backend=backend, fullgraph=True)
    elif form == "in-place":
        pipe.transformer.compile(backend=backend, fullgraph=True)
    else:
        pipe.transformer.compile_repeated_blocks(backend=backend, fullgraph=True)


@pytest.mark.parametrize(
    ("form", "options", "graphs"),
    [
        ("wrapped", {}, 3),  # dense, calibrating, sparse
        ("in-place", {}, 3),
        ("repeated", {}, 3),
        ("wrapped", {"block_size": 4}, 3),
        ("repeated", {"block_size": 4}, 3),
        ("repeated", {"budgets": "equal"}, 3),
        ("wrapped", {"preset": "paper"}, 2),  # nothing to calibrate
        ("repeated", {"preset": "paper"}, 3),  # the ends score with the second-order term, those between without
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_graphs_of_a_run(form, options, graphs):
    layers = 3 if form == "repeated" else 2
    config = _config(**options)
    eager = tiny.wan_pipeline(layers)
    apply_sparse_attention(eager, config)
    expected, expected_again = tiny.generate(eager, steps=4), tiny.generate(eager, steps=5)

    pipe = tiny.wan_pipeline(layers)
    counter = CompileCounterWithBackend("eager")
    if form == "in-place":  # either order of the two works
        _compile(pipe, form, counter)
        apply_sparse_attention(pipe, config)
    else:
        apply_sparse_attention(pipe, config)
        _compile(pipe, form, counter)
    assert torch.allclose(tiny.generate(pipe, steps=4), expected, atol=1e-5)
    assert torch.allclose(tiny.generate(pipe, steps=5), expected_again, atol=1e-5)
    assert counter.frame_count == graphs
    summary, reference = sparsity_summary(pipe), sparsity_summary(eager)
    assert (summary.steps, summary.dense_reasons) == (reference.steps, reference.dense_reasons)
    assert (summary.orders, summary.backend) == (reference.orders, reference.backend)
    assert summary.budgets == reference.budgets
    assert bool(summary.budgets) == (not {"budgets", "preset"} & options.keys())
    assert summary.attention_seconds is None  # compiled code is not timed


def test_remove_after_compile_restores():
    pipe = tiny.wan_pipeline(layers=1)
    counter = CompileCounterWithBackend("eager")
    _compile(pipe, "wrapped", counter)
    dense = tiny.generate(pipe, steps=2)
    apply_sparse_attention(pipe, _config(order="raster", warmup_steps=0, dense_layers=()))
    assert not torch.equal(tiny.generate(pipe, steps=2), dense)
    remove_sparse_attention(pipe)
    assert torch.equal(tiny.generate(pipe, steps=2), dense)


def test_another_resolution_under_compile():
    pipe = tiny.wan_pipeline(layers=1)
    apply_sparse_attention(pipe, _config(order="hilbert", warmup_steps=1, dense_layers=()))
    expected = [tiny.generate(pipe, steps=2, height=height) for height in (32, 48, 64)]
    _compile(pipe, "repeated", CompileCounterWithBackend("eager"))
    for height, latents in zip((32, 48, 64), expected, strict=True):
        assert torch.allclose(tiny.generate(pipe, steps=2, height=height), latents, atol=1e-5)


@pytest.mark.compiler
def test_inductor():
    pipe = tiny.wan_pipeline(layers=1)
    apply_sparse_attention(pipe, _config(dense_layers=(), warmup_steps=1))
    expected = tiny.generate(pipe, steps=3, guidance=1.0)
    _compile(pipe, "repeated", "inductor")
    # Fused kernels round differently; near ties of the selection could flip blocks, which would show as a jump.
    assert torch.allclose(tiny.generate(pipe, steps=3, guidance=1.0), expected, atol=1e-3)
    assert sparsity_summary(pipe).density_sparse_steps == 0.5


@pytest.mark.parametrize("form", ["wrapped", "repeated"])
def test_cuda_graphs_leave_out_what_reads_orders_and_budgets(form):
    """They lie on the CPU and change with every calibration: a graph recorded with them would keep the old ones."""
    pipe = tiny.wan_pipeline(layers=3)
    apply_sparse_attention(pipe, _config(budgets="auto"))
    layers = controllers_of(pipe)[0].layers
    ids = {id(x) for layer in layers for x in (layer.processor._orders, layer.processor._budgets)}
    readers = []

    def look(graph, example_inputs):
        placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        for node, value in zip(placeholders, example_inputs, strict=True):
            if id(value) in ids:
                readers.extend(user.target for user in node.users)
        return graph.forward

    _compile(pipe, form, look)
    tiny.generate(pipe, steps=4)
    assert {str(reader) for reader in readers} == {
        "diffsieve.head_orders.default",
        "diffsieve.list_blocks_by_head.default",
    }
    assert all(torch.Tag.cudagraph_unsafe in reader.tags for reader in readers)
