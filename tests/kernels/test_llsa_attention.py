"""LLSA: the meaning of the attention, the PyTorch backend, gradients."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from diffsieve.kernels import testing
from diffsieve.kernels.llsa import enriched_attention, hierarchical_topk, llsa_attention, torch_backend
from diffsieve.kernels.llsa.levels import level_lengths, most_levels, token_counts
from diffsieve.kernels.llsa.reference import token_weights
from tests.kernels import llsa_cases
from tests.kernels.llsa_cases import BASE, CASES

BACKENDS = ["reference", "torch"]
DEPTHS = [
    replace(BASE, length=27, dim=4, block_size=4, topk=2),
    replace(BASE, length=39, dim=4, block_size=4, topk=2, levels=2),
    replace(BASE, length=43, dim=4, block_size=3, topk=2, levels=3, heads=2, kv_heads=1),
]
FORMS = {"paper": {}, "disjoint": {"disjoint": True}, "fine": {"enrich": False}}


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", DEPTHS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_repeating_the_mean_of_each_pooled_token(backend, case, form):
    """No code in common: lists of Python ints, means of slices, and a pooled token c times in the sequence."""
    case = replace(case, **FORMS[form])
    size, length, depth = case.block_size, case.length, case.levels
    query, key, value = llsa_cases.make_inputs(case, dtype=torch.float64)
    indices = hierarchical_topk(query, key, **case.selection, backend=backend)
    out, lse = llsa_attention(query, key, value, **case.selection, **FORMS[form], return_lse=True, backend=backend)
    for head in range(case.heads):
        k, v = (x[0, head * case.kv_heads // case.heads] for x in (key, value))
        for t in range(length):
            kept = {
                level: [j for j in indices[level - 1][0, head, t // size**level].tolist() if j >= 0]
                for level in range(1, depth + 1)
            }
            spans = []  # (first raw token, one past the last, are they pooled)
            for level in range(depth + 1 if case.enrich else 1):
                last = -(-length // size**level)
                if level < depth:
                    tokens = [j for j in range(last) if j // size in kept[level + 1]]
                else:
                    tokens = list(range(last))
                if case.disjoint and level:
                    tokens = [j for j in tokens if j not in kept[level]]
                spans += [slice(j * size**level, min((j + 1) * size**level, length)) for j in tokens]
            keys, values = (
                torch.cat([x[s].mean(0, keepdim=True).expand(s.stop - s.start, -1) for s in spans]) for x in (k, v)
            )
            logits = keys @ query[0, head, t] * case.dim**-0.5
            close(out[0, head, t], logits.softmax(0) @ values)
            close(lse[0, head, t], logits.logsumexp(0))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_errors_are_at_most_twice_those_of_dense_attention(case, dtype):
    inputs = llsa_cases.make_inputs(case, dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    indices = hierarchical_topk(*inputs[:2], **case.selection, backend="torch")
    grad_out = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(0))
    expected = llsa_cases.exact(case, inputs, indices, grad_out)
    rounded = llsa_cases.dense_low_precision(case, inputs, indices, grad_out)
    with testing.poisoned_memory():
        actual = llsa_cases.solve(case, inputs, indices, grad_out, "torch")
    for name, result in rounded.items():
        assert actual[name].dtype == inputs[0].dtype
        if name in ("dq", "dk") and case.length == 1:
            assert actual[name].abs().max() < 1e-2  # one key: exactly 0
            continue
        bound = testing.error_bound(result, expected[name])
        assert testing.error_ratio(actual[name], expected[name]) <= bound, name
    assert testing.lse_error(actual["lse"], expected["lse"]) <= 1e-5 * (1 + expected["lse"].abs().max().item())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", DEPTHS, ids=str)
def test_gradcheck_with_frozen_keys(case, form, backend):
    case = replace(case, heads=min(case.heads, 2 * case.kv_heads), kv_heads=1, dim=3)
    inputs = llsa_cases.make_inputs(case, dtype=torch.float64)
    indices = hierarchical_topk(*inputs[:2], **case.selection)
    assert torch.autograd.gradcheck(
        lambda q, k, v: enriched_attention(
            q, k, v, indices, block_size=case.block_size, **FORMS[form], return_lse=True, backend=backend
        ),
        inputs,
        fast_mode=True,
        atol=1e-8,
    )


@pytest.mark.parametrize("case", DEPTHS, ids=str)
def test_every_entry_of_the_gradients_equals_autograd_through_the_definition(case):
    """At level 1 a backward without the counts is wrong by the block size in the pooled part."""
    inputs = llsa_cases.make_inputs(case, dtype=torch.float64)
    indices = hierarchical_topk(*inputs[:2], **case.selection)
    grad_out = torch.randn(inputs[0].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = llsa_cases.dense_low_precision(case, inputs, indices, grad_out)
    for backend in BACKENDS:
        actual = llsa_cases.solve(case, inputs, indices, grad_out, backend)
        for name, result in expected.items():
            close(actual[name], result)


@pytest.mark.parametrize("length", [3, 5, 64, 97, 203])
@pytest.mark.parametrize("levels", [1, 2, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_disjoint_with_all_kept_is_dense_attention(backend, levels, length):
    levels = min(levels, most_levels(length, 4))
    case = replace(BASE, length=length, block_size=4, topk=length, levels=levels, disjoint=True, dim=8)
    inputs = llsa_cases.make_inputs(case, dtype=torch.float64)
    dense = scaled_dot_product_attention(*inputs)
    grad_out = torch.randn(dense.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    out = llsa_attention(*inputs, **case.selection, disjoint=True, backend=backend)
    close(out, dense)
    actual, expected = (torch.autograd.grad(x, inputs, grad_out) for x in (out, dense))
    for ours, theirs in zip(actual, expected, strict=True):
        close(ours, theirs)


def test_published_form_with_all_kept_counts_each_region_at_every_level():
    case = replace(BASE, length=61, topk=99)
    query, key, value = llsa_cases.make_inputs(case, dtype=torch.float64)
    k, v = (
        torch.cat([x, *(x[:, :, s : s + 8].mean(2, keepdim=True) for s in range(0, 61, 8))], 2) for x in (key, value)
    )
    weights = torch.tensor([1.0] * 61 + [8.0] * 7 + [5.0], dtype=torch.float64)
    expected = scaled_dot_product_attention(query, k, v, attn_mask=weights.log().expand(61, -1))
    out = llsa_attention(query, key, value, **case.selection)
    close(out, expected)
    assert testing.error_ratio(out, scaled_dot_product_attention(query, key, value)) > 0.05


@pytest.mark.parametrize("case", DEPTHS, ids=str)
def test_weights_of_the_disjoint_form_sum_to_the_length(case):
    query, key, _ = llsa_cases.make_inputs(case, dtype=torch.float64)
    indices = hierarchical_topk(query, key, **case.selection)
    options = {"length": case.length, "block_size": case.block_size, "enrich": True}
    assert (sum(w.sum(-1) for w in token_weights(indices, **options, disjoint=True)) == case.length).all()
    assert (sum(w.sum(-1) for w in token_weights(indices, **options, disjoint=False)) > case.length).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", DEPTHS, ids=str)
def test_constant_values_come_out_and_constant_keys_give_the_weighted_mean(case, backend):
    query, key, value = llsa_cases.make_inputs(case, dtype=torch.float64)
    indices = hierarchical_topk(query, key, **case.selection)
    options = {"block_size": case.block_size, "backend": backend}
    constant = torch.full_like(value, 0.37)
    close(enriched_attention(query, key, constant, indices, **options), torch.full_like(query, 0.37))
    out = enriched_attention(query, torch.ones_like(key), value, indices, **options)
    weights = token_weights(indices, length=case.length, block_size=case.block_size, enrich=True, disjoint=False)
    group = case.heads // case.kv_heads
    total, mass = 0, 0
    for level, weight in enumerate(weights):
        span = case.block_size**level
        pooled = [value[:, :, s : s + span].mean(2) for s in range(0, case.length, span)]
        total = total + weight.double() @ torch.stack(pooled, dim=2).repeat_interleave(group, dim=1)
        mass = mass + weight.sum(-1, keepdim=True)
    close(out, total / mass)


@pytest.mark.parametrize("layout", testing.LAYOUTS)
def test_layout_changes_no_bit_and_results_follow_their_inputs(layout):
    case = replace(BASE, length=97, block_size=4, levels=2, batch=2, heads=4, kv_heads=4)
    results = []
    for kind in ("contiguous", layout):
        inputs = llsa_cases.make_inputs(replace(case, layout=kind), dtype=torch.float32)
        out = llsa_attention(*inputs, **case.selection)
        results.append((out, *torch.autograd.grad(out.sin().sum(), inputs)))
        for result, x in zip(results[-1], (inputs[0], *inputs), strict=True):
            assert result.stride() == torch.empty_like(x).stride()
    for plain, other in zip(*results, strict=True):
        assert torch.equal(plain, other)


def test_expanded_inputs():
    case = replace(BASE, length=97, block_size=4, levels=2)
    query, key, value = (x.detach() for x in llsa_cases.make_inputs(case, dtype=torch.float32))
    expanded = [x.expand(3, -1, -1, -1) for x in (query, key, value)]
    out = llsa_attention(*expanded, **case.selection)
    assert torch.equal(out[2], llsa_attention(query, key, value, **case.selection)[0])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", DEPTHS, ids=str)
def test_the_way_of_other_devices_is_that_of_a_cpu(case, form, monkeypatch):
    """On a CPU a chunk goes to PyTorch's own attention; what runs elsewhere runs here too, with the same meaning."""
    case = replace(case, **FORMS[form])
    query, key, value = (x.detach() for x in llsa_cases.make_inputs(case, dtype=torch.float64))
    options = case.selection | FORMS[form] | {"return_lse": True, "backend": "torch"}
    expected = llsa_attention(query, key, value, **options)
    chunk, calls = torch_backend._Chunk, []
    elsewhere = chunk._attend_elsewhere
    monkeypatch.setattr(chunk, "_attend_on_cpu", lambda *given: calls.append(given) or elsewhere(*given))
    for actual, wanted in zip(llsa_attention(query, key, value, **options), expected, strict=True):
        close(actual, wanted)
    assert calls


@pytest.mark.parametrize("disjoint", [False, True])
@pytest.mark.parametrize("case", DEPTHS, ids=str)
def test_chunks_do_not_change_the_result(case, disjoint, monkeypatch):
    case = replace(case, length=4 * case.length, disjoint=disjoint)
    inputs = llsa_cases.make_inputs(case, dtype=torch.float64)
    indices = llsa_cases.choose_keys(case, *inputs[:2], "torch")
    whole = llsa_cases.solve(case, inputs, indices, torch.ones_like(inputs[0]), "torch")
    monkeypatch.setitem(torch_backend._CHUNK_BYTES, "cpu", 1)
    again = llsa_cases.choose_keys(case, *inputs[:2], "torch")
    assert all(torch.equal(a, b) for a, b in zip(indices, again, strict=True))
    for name, result in llsa_cases.solve(case, inputs, indices, torch.ones_like(inputs[0]), "torch").items():
        close(result, whole[name])


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest result of any operation, in bytes."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, torch.Tensor):
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return result


def test_no_tensor_grows_with_the_square_of_the_length(monkeypatch):
    monkeypatch.setitem(torch_backend._CHUNK_BYTES, "cpu", 2**17)
    largest = {}
    for length in (1_024, 4_096):
        case = replace(BASE, length=length, heads=1, kv_heads=1, dim=16, levels=2)
        query, key, value = (x.detach() for x in llsa_cases.make_inputs(case, dtype=torch.float32))
        indices = llsa_cases.choose_keys(case, query, key, "torch")
        pyramids = [llsa_cases.pyramid(x, block_size=8, levels=2) for x in (key, value)]
        options = {"block_size": 8, "scale": 0.25, "enrich": True, "disjoint": False}
        with LargestTensor() as recorder:
            torch_backend.hierarchical_topk_torch(
                llsa_cases.pyramid(query, block_size=8, levels=2), pyramids[0], topk=[3, 3], block_size=8
            )
            out, lse = torch_backend.enriched_attention_torch(query, *pyramids, indices, **options)
            torch_backend.enriched_attention_backward_torch(out, None, query, *pyramids, out, lse, indices, **options)
        largest[length] = recorder.bytes
    assert largest[4_096] <= 2**18 + 4_096 * 16 * 4
    assert largest[4_096] <= 4 * largest[1_024]


def test_two_runs_are_bitwise_equal():
    case = replace(BASE, length=500, levels=2, heads=4, kv_heads=2)
    results = []
    for _ in range(2):
        inputs = llsa_cases.make_inputs(case, dtype=torch.float32)
        out = llsa_attention(*inputs, **case.selection)
        results.append((out, *torch.autograd.grad(out.sin().sum(), inputs)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_counts_sum_to_the_length_at_every_level():
    for level, tokens in enumerate(level_lengths(203, 4, 4)):
        counts = token_counts(203, 4, level)
        assert counts.shape == (tokens,)
        assert counts.sum() == 203
