"""`llsa_attention` as an operation: refusals, backends, compilation, autocast, checkpointing, training."""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from diffsieve import BackendUnavailableError, UserInputError
from diffsieve.kernels.llsa import choose_backend, enriched_attention, hierarchical_topk, llsa_attention
from tests.kernels import llsa_cases
from tests.kernels.llsa_cases import BASE

CASE = replace(BASE, length=97, block_size=4, levels=2)
OPTIONS = CASE.selection


def inputs(dtype=torch.float32, **changes):
    return llsa_cases.make_inputs(replace(CASE, **changes), dtype=dtype)


class Layer(nn.Module):
    """Projections around the attention."""

    def __init__(self, **options):
        super().__init__()
        self.qkv, self.out, self.options = nn.Linear(8, 24), nn.Linear(8, 8), options

    def forward(self, x):
        query, key, value = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return self.out(llsa_attention(query, key, value, **self.options).transpose(1, 2).flatten(2))


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


def layer(**options):
    torch.manual_seed(0)
    return Layer(**OPTIONS | options), torch.randn(2, 97, 8)


@pytest.mark.parametrize("length", [1, 5, 15])
def test_less_than_one_block_is_dense(length):
    query, key, value = inputs(torch.float64, length=length)
    for options in ({}, {"disjoint": True}, {"levels": 3}, {"enrich": False}):
        out = llsa_attention(query, key, value, block_size=16, **options)
        torch.testing.assert_close(out, scaled_dot_product_attention(query, key, value), rtol=1e-12, atol=1e-12)


def test_given_keys_replace_the_choice():
    query, key, value = inputs()
    chosen = hierarchical_topk(query, key, **OPTIONS)
    out = llsa_attention(query, key, value, **OPTIONS)
    assert torch.equal(llsa_attention(query, key, value, block_size=4, indices=chosen), out)
    assert torch.equal(enriched_attention(query, key, value, chosen, block_size=4), out)
    other = [chosen[0], torch.zeros_like(chosen[1][..., :1])]
    assert not torch.equal(enriched_attention(query, key, value, other, block_size=4), out)


def test_lse_and_its_dtype():
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        out, lse = llsa_attention(*inputs(dtype), **OPTIONS, return_lse=True)
        assert (out.dtype, lse.dtype, lse.shape) == (dtype, expected, (1, 2, 97))


REFUSALS = {
    "no tensor": ({"query": 3}, "query must be a tensor, got int"),
    "three dimensions": ({"key": ones(2, 97, 32)}, "key must be 4-dimensional, got (2, 97, 32)"),
    "empty": ({"query": ones(1, 2, 0, 32)}, "query must be not empty, got (1, 2, 0, 32)"),
    "integers": ({"query": ones(1, 2, 97, 32, dtype=torch.int32)}, "query must be floating point, got torch.int32"),
    "cross-attention": ({"key": ones(1, 2, 50, 32)}, "key must be of 97 tokens like query (self-attention), got 50"),
    "head dimension": ({"key": ones(1, 2, 97, 16)}, "key must be of head dimension 32 like query, got 16"),
    "batch": ({"key": ones(2, 2, 97, 32)}, "key must be of batch size 1 like query, got 2"),
    "heads": ({"key": ones(1, 3, 97, 32)}, "key must be of a number of heads that divides 2, got 3"),
    "value": ({"value": ones(1, 2, 97, 16)}, "value must be of shape (1, 2, 97, 32) like key, got (1, 2, 97, 16)"),
    "mixed dtypes": ({"value": ones(1, 2, 97, 32).half()}, "value must be float32 like query, got float16"),
    "block": ({"block_size": 1}, "block_size must be an int >= 2, got 1"),
    "topk": ({"topk": 0}, "topk must be at least 1, got 0"),
    "topk of a wrong type": ({"topk": 2.5}, "topk must be an int >= 1, or one per level, got 2.5"),
    "topk per level": ({"topk": (3, 3, 3)}, "topk must be an int or 2 ints, one per level, got (3, 3, 3)"),
    "levels": ({"levels": 9}, "levels must be an int in [1, 4], \"auto\" or \"paper\", got 9"),
    "levels by name": ({"levels": "many"}, "levels must be an int, \"auto\" or \"paper\", got 'many'"),
    "levels that do not fit": ({"levels": 3, "block_size": 16}, "levels must be at most 2 for 97 tokens in blocks"),
    "disjoint alone": ({"disjoint": True, "enrich": False}, "disjoint must be False without enrich"),
    "float8": (
        {x: ones(1, 2, 97, 32).to(torch.float8_e4m3fn) for x in ("query", "key", "value")},
        "query must be floating point of 16 bits or more, got torch.float8_e4m3fn",
    ),
    "scale": ({"scale": 0.0}, "scale must be a finite number > 0 or None, got 0.0"),
    "backend": ({"backend": "cuda"}, "backend must be one of auto, reference, torch, triton, got 'cuda'"),
    "causal": ({"is_causal": True}, "is_causal must be False, got True: a pooled token mixes past and future tokens"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_name_the_argument(name):
    changes, message = REFUSALS[name]
    arguments = dict(zip(("query", "key", "value"), inputs(), strict=True)) | OPTIONS | changes
    with pytest.raises(UserInputError, match=re.escape(message)):
        llsa_attention(**arguments)


INDEX_REFUSALS = {
    "nothing": (lambda i: [], {}, "indices must be a list of tensors, one per level, got none"),
    "one tensor": (lambda i: i[0], {}, "indices must be a list of tensors, one per level, got Tensor"),
    "number": (lambda i: [i[0]], {"levels": 2}, "indices must be 2 tensors, one per level, got 1"),
    "too many": (lambda i: [*i] * 4, {}, "indices must be 1 to 4 tensors, got 8"),
    "dtype": (lambda i: [i[0].long(), i[1]], {}, "indices[0] must be int32, got int64"),
    "shape": (lambda i: [i[0], i[1][:, :, 1:]], {}, "indices[1] must be of shape (1, 2, 7, K), got (1, 2, 6, 3)"),
    "range": (lambda i: [i[0], i[1] + 6], {}, "indices[1] must be in [0, 6], -1 only after the last entry of a row"),
    "empty row": (lambda i: [i[0] * 0 - 1, i[1]], {}, "indices[0] must be in [0, 24], -1 only after the last entry"),
    "order": (lambda i: [i[0].flip(-1), i[1]], {}, "indices[0] must be ascending in each row, got a row that is not"),
}


@pytest.mark.parametrize("name", INDEX_REFUSALS)
def test_wrong_lists_are_refused(name):
    change, options, message = INDEX_REFUSALS[name]
    query, key, value = inputs()
    chosen = change(hierarchical_topk(query, key, **OPTIONS))
    with pytest.raises(UserInputError, match=re.escape(message)):
        llsa_attention(query, key, value, block_size=4, indices=chosen, **options)


@pytest.mark.parametrize("where", ["query", "key", "value"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_bad_values_are_seen_in_the_output(backend, bad, where):
    tensors = dict(zip(("query", "key", "value"), (x.detach() for x in inputs()), strict=True))
    tensors[where][0, 1, 40] = bad
    out = llsa_attention(**tensors, **OPTIONS, backend=backend)
    assert out[0, 0].isfinite().all()
    assert not out[0, 1, 40].isfinite().all()
    if where != "query":  # everybody sees the coarsest level
        assert not out[0, 1].isfinite().all(-1).any()


def test_choice_of_the_backend():
    query = inputs()[0]
    assert choose_backend(query).name == "torch"
    assert "cpu tensors" in choose_backend(query).reason
    assert choose_backend(query, backend="reference").name == "reference"
    wide = choose_backend(torch.empty(1, 1, 97, 257, device="meta"))
    assert (wide.name, wide.reason) == ("torch", "triton needs an NVIDIA GPU, got meta tensors")
    with pytest.raises(UserInputError, match="backend must be one of"):
        choose_backend(query, backend="fast")


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"dtype": torch.float64}, {}, "needs dtype bfloat16, float16, float32, got float64"),
        ({"dim": 257}, {}, "needs a head dimension D <= 256, got 257"),
        ({}, {"block_size": 12}, "needs a block_size of 8, 16, 32, 64, 128, got 12"),
    ],
)
def test_triton_by_name_runs_or_raises(changes, options, message):
    pytest.importorskip("triton", reason="needs the package triton")
    with pytest.raises(BackendUnavailableError, match=f'backend="triton" {message}'):
        choose_backend(inputs(**changes)[0], backend="triton", **options)


@pytest.mark.parametrize("form", [(True, False), (True, True), (False, False)], ids=["paper", "disjoint", "fine"])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_opcheck(backend, form):
    query, key, value = inputs(heads=4, dim=4)
    chosen = hierarchical_topk(query, key, **OPTIONS)
    arguments = (query, key, value, chosen, [], 4, 0.5, *form, False, backend)
    torch.library.opcheck(torch.ops.diffsieve.llsa_attention, arguments)
    selected = (query.detach(), key.detach(), value.detach(), 4, [3, 9], backend)
    torch.library.opcheck(torch.ops.diffsieve.llsa_select, selected)


@pytest.mark.parametrize("options", [{}, {"disjoint": True}, {"enrich": False}, {"levels": 1, "topk": 99}], ids=str)
def test_compiles_in_one_graph(options):
    model, x = layer(**options)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    results = []
    for call in (model, compiled):
        out = call(x)
        results.append((out, *torch.autograd.grad(out.sin().sum(), list(model.parameters()))))
    for eager, graph in zip(*results, strict=True):
        assert torch.equal(eager, graph)


@pytest.mark.parametrize("name", [name for name in REFUSALS if name != "no tensor"])
def test_compiled_code_refuses_the_same(name):
    changes, message = REFUSALS[name]
    arguments = dict(zip(("query", "key", "value"), inputs(), strict=True)) | OPTIONS | changes
    tensors = [arguments.pop(name) for name in ("query", "key", "value")]
    torch._dynamo.reset()  # sizes that differ from one compilation to the next would have no numbers
    with pytest.raises(Exception, match="raised exception UserInputError") as raised:
        torch.compile(partial(llsa_attention, **arguments), fullgraph=True, backend="eager")(*tensors)
    assert message in str(raised.value).replace("\\", "")


@pytest.mark.parametrize("name", [name for name in INDEX_REFUSALS if name not in ("range", "empty row", "order")])
def test_compiled_code_refuses_wrong_lists(name):
    change, options, message = INDEX_REFUSALS[name]
    query, key, value = inputs()
    chosen = change(hierarchical_topk(query, key, **OPTIONS))
    call = partial(llsa_attention, block_size=4, **options)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=re.escape(message)):
        torch.compile(lambda *x: call(*x, indices=chosen), fullgraph=True, backend="eager")(query, key, value)


def test_attention_with_lists_does_not_choose_by_itself():
    with pytest.raises(UserInputError, match="indices must be a list of tensors, one per level, got NoneType"):
        enriched_attention(*inputs(), None)


def test_a_choice_under_autocast_is_that_of_the_attention():
    query, key, value = inputs(heads=4, kv_heads=4, length=2_048)
    with torch.autocast("cpu", torch.bfloat16):
        chosen = hierarchical_topk(query, key, **OPTIONS)
        out = llsa_attention(query, key, value, **OPTIONS)
        assert torch.equal(enriched_attention(query, key, value, chosen, block_size=4), out)
    in_fp32 = hierarchical_topk(query, key, **OPTIONS)
    assert not all(map(torch.equal, chosen, in_fp32))


def test_meta_tensors_have_the_shapes_of_results():
    query, key, value = (x.detach().to("meta") for x in inputs(torch.bfloat16))
    out, lse = llsa_attention(query, key, value, **OPTIONS, return_lse=True)
    assert (out.is_meta, out.shape, out.dtype) == (True, query.shape, torch.bfloat16)
    assert (lse.shape, lse.dtype) == (query.shape[:3], torch.float32)


def test_activation_checkpointing_changes_no_bit():
    model, x = layer()
    x.requires_grad_()
    plain = torch.autograd.grad(model(x).sin().sum(), [x, *model.parameters()])
    again = torch.autograd.grad(checkpoint(model, x, use_reentrant=False).sin().sum(), [x, *model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_autocast_casts_the_inputs_and_nothing_inside():
    query, key, value = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        out = llsa_attention(query, key.half(), value, **OPTIONS)
        mine = torch.autograd.grad(out.float().sum(), query)[0]
    half = [x.detach().bfloat16().requires_grad_() for x in (query, key.half(), value)]
    expected = llsa_attention(*half, **OPTIONS)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, expected)
    assert torch.equal(mine, torch.autograd.grad(expected.float().sum(), half[0])[0].float())


def test_a_step_of_training_equals_that_of_the_definition():
    models = [layer(backend=backend)[0].double() for backend in ("reference", "torch")]
    x = layer()[1].double()
    for model in models:
        optimiser = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(2):
            optimiser.zero_grad()
            model(x).square().mean().backward()
            optimiser.step()
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_inference_mode_and_no_grad():
    query, key, value = inputs()
    expected = llsa_attention(query, key, value, **OPTIONS)
    with torch.inference_mode():
        assert torch.equal(llsa_attention(query, key, value, **OPTIONS), expected)
    with torch.no_grad():
        assert not llsa_attention(query, key, value, **OPTIONS).requires_grad


def test_gradient_through_the_log_sum_exp_alone():
    query, key, value = inputs(torch.float64)
    chosen = hierarchical_topk(query, key, **OPTIONS)
    grads = []
    for backend in ("reference", "torch"):
        lse = llsa_attention(query, key, value, block_size=4, indices=chosen, return_lse=True, backend=backend)[1]
        grads.append(torch.autograd.grad(lse.sin().sum(), (query, key)))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        assert one.abs().max() > 0


@pytest.mark.parametrize("loss", [torch.sum, lambda out: out.square().sum()], ids=["sum", "squares"])
def test_second_derivatives_are_refused_and_first_ones_may_ask_for_a_graph(loss):
    tensors = [x.requires_grad_() for x in inputs(torch.float64)]
    expected = torch.autograd.grad(loss(llsa_attention(*tensors, **OPTIONS)), tensors)
    grads = torch.autograd.grad(loss(llsa_attention(*tensors, **OPTIONS)), tensors, create_graph=True)
    assert all(map(torch.equal, grads, expected))
    for grad in grads:
        with pytest.raises(NotImplementedError, match="llsa_attention has no second derivative"):
            grad.sum().backward(retain_graph=True)
