"""Block-sparse attention: meaning, torch backend, op, gradients, and what is refused."""

import re
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from diffsieve.errors import BackendUnavailableError, UserInputError
from diffsieve.kernels import testing
from diffsieve.kernels.block_sparse import block_sparse_attention, choose_backend, torch_backend
from diffsieve.kernels.block_sparse.backends import _triton_obstacle
from diffsieve.kernels.block_sparse.reference import expand_block_mask
from diffsieve.kernels.testing import AttentionCase, AttentionInputs

BASE = AttentionCase(heads=3, kv_heads=3, dim=32, block_size=16, len_q=90, len_k=90)
CASES = [
    BASE,
    replace(BASE, density=1.0),
    replace(BASE, density=0.01),
    replace(BASE, variable=True),
    replace(BASE, len_q=1, len_k=1, heads=1, kv_heads=1),
    replace(BASE, len_q=63, len_k=63, block_size=64),
    replace(BASE, len_q=127, len_k=129, block_size=128, variable=True),
    replace(BASE, len_q=129, len_k=127, density=1.0),
    replace(BASE, len_q=450, len_k=450, dim=64, block_size=64),  # video grid 5 x 9 x 10
    replace(BASE, batch=2, heads=4, kv_heads=2, len_q=100, len_k=250, variable=True, layout="blhd"),
    replace(BASE, batch=2, heads=4, kv_heads=1, layout="fused_qkv"),
    replace(BASE, layout="fused_qkv", variable=True),
    replace(BASE, layout="padded", density=1.0),
    replace(BASE, layout="padded", variable=True, dim=20),
    replace(BASE, gain=4.0),
    replace(BASE, gain=16.0),
    replace(BASE, block_size=17, len_k=200),
]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def attend(inputs: AttentionInputs, case: AttentionCase, backend: str = "torch", **options):
    return block_sparse_attention(*inputs.tensors(), block_size=case.block_size, backend=backend, **options)


def test_mask_expands_lists_token_by_token():
    index = torch.tensor([[[[0, 2], [1, 99]]]], dtype=torch.int32)
    count = torch.tensor([[[2, 1]]], dtype=torch.int32)
    mask = expand_block_mask(index, count, len_q=3, len_k=5, block_size=2)
    assert mask.int().tolist() == [[[[1, 1, 0, 0, 1], [1, 1, 0, 0, 1], [0, 0, 1, 1, 0]]]]


def test_reference_matches_a_loop_over_queries():
    case = replace(BASE, heads=4, kv_heads=2, len_q=40, len_k=50, variable=True)
    inputs = testing.make_inputs(case, dtype=torch.float64)
    out, lse = attend(inputs, case, "reference", return_lse=True, scale=0.3)
    empty = 0
    for head in range(case.heads):
        for i in range(case.len_q):
            kept = inputs.block_index[0, head, i // 16, : inputs.block_count[0, head, i // 16]].tolist()
            tokens = [j for j in range(case.len_k) if j // 16 in kept]
            if not tokens:
                empty += 1
                assert out[0, head, i].abs().max() == 0
                assert lse[0, head, i] == float("-inf")
                continue
            logits = inputs.key[0, head // 2, tokens] @ inputs.query[0, head, i] * 0.3
            expected = logits.softmax(0) @ inputs.value[0, head // 2, tokens]
            torch.testing.assert_close(out[0, head, i], expected, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(lse[0, head, i], logits.logsumexp(0), rtol=1e-12, atol=1e-12)
    assert empty > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_error_is_at_most_twice_that_of_dense_attention(backend, case, dtype):
    inputs = testing.make_inputs(case, dtype=DTYPES[dtype])
    exact, exact_lse = testing.exact_attention(inputs, block_size=case.block_size)
    single = inputs.floats_to(torch.float32)
    _, single_lse = attend(single, case, "reference", return_lse=True)
    with testing.poisoned_memory():
        out, lse = attend(inputs, case, backend, return_lse=True)
        alone = attend(inputs, case, backend)
    assert out.shape == inputs.query.shape
    assert out.dtype == inputs.query.dtype
    bound = testing.error_bound(testing.masked_sdpa(inputs, block_size=case.block_size), exact)
    assert testing.error_ratio(out, exact) <= bound
    assert testing.lse_error(lse, exact_lse) <= testing.lse_bound(single_lse, exact_lse)
    assert lse.dtype == torch.float32
    # The torch backend has two ways, with and without the log-sum-exp; each must be right by itself.
    assert testing.error_ratio(alone, exact) <= bound


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("density", [0.5, 1.0])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_error_where_one_key_takes_all_of_the_weight(backend, dim, density, dtype):
    case = AttentionCase(heads=2, len_q=300, len_k=450, dim=dim, block_size=64, density=density, gain=200.0)
    inputs = testing.make_inputs(case, dtype=DTYPES[dtype])
    exact, exact_lse = testing.exact_attention(inputs, block_size=64)
    out, lse = attend(inputs, case, backend, return_lse=True)
    # The torch backend has two ways, with and without the log-sum-exp; each must be right by itself.
    for result in (out, attend(inputs, case, backend)):
        assert testing.error_ratio(result, exact) <= testing.one_key_bound(DTYPES[dtype])
        assert (result == exact.to(result.dtype)).double().mean() > 0.99
    assert ((lse - exact_lse).abs() <= exact_lse.abs() * 1e-6).all()


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_all_blocks_equal_dense_attention(backend):
    case = replace(BASE, density=1.0)
    inputs = testing.make_inputs(case, dtype=torch.float64)
    dense = scaled_dot_product_attention(inputs.query, inputs.key, inputs.value)
    torch.testing.assert_close(attend(inputs, case, backend), dense, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", testing.LAYOUTS)
def test_layout_changes_no_bit_and_output_follows_query(layout):
    case = replace(BASE, variable=True)
    plain = attend(testing.make_inputs(case, dtype=torch.float32), case)
    inputs = testing.make_inputs(replace(case, layout=layout), dtype=torch.float32)
    out = attend(inputs, case)
    assert torch.equal(out, plain)
    assert out.stride() == torch.empty_like(inputs.query).stride()


def test_entries_past_the_count_are_ignored():
    case = replace(BASE, variable=True)
    inputs = testing.make_inputs(case, dtype=torch.float32)
    beyond = torch.arange(inputs.block_index.shape[-1]) >= inputs.block_count[..., None]
    assert beyond.any()
    other = replace(inputs, block_index=inputs.block_index.masked_fill(beyond, -7))
    for backend in ("reference", "torch"):
        assert torch.equal(attend(inputs, case, backend), attend(other, case, backend))


def test_zero_counts_give_zero_and_minus_infinity():
    inputs = testing.make_inputs(BASE, dtype=torch.float32)
    inputs = replace(inputs, block_count=torch.zeros(1, 3, 6, dtype=torch.int32))
    for backend in ("reference", "torch"):
        out, lse = attend(inputs, BASE, backend, return_lse=True)
        assert out.abs().max() == 0
        assert (lse == float("-inf")).all()


def test_chunks_are_bounded_and_do_not_change_the_result(monkeypatch):
    case = replace(BASE, len_q=450, len_k=450, variable=True)
    inputs = testing.make_inputs(case, dtype=torch.float64)
    whole = attend(inputs, case)
    largest = []

    class Recorder(torch_backend._Workspace):
        def take(self, name, shape):
            largest.append(torch.Size(shape).numel() * 8)
            return super().take(name, shape)

    monkeypatch.setattr(torch_backend, "_Workspace", Recorder)
    attend(inputs, case)
    single_row = 15 * 16 * (2 * 32 + 16) * 8
    assert max(largest) > single_row
    largest.clear()
    monkeypatch.setattr(torch_backend, "_CHUNK_BYTES_THREAD", 1)
    torch.testing.assert_close(attend(inputs, case), whole, rtol=1e-12, atol=1e-12)
    assert max(largest) <= single_row


@pytest.mark.parametrize(
    "case",
    [
        AttentionCase(heads=2, len_q=10, len_k=14, dim=3, block_size=4, variable=True),
        AttentionCase(heads=4, kv_heads=2, len_q=9, len_k=9, dim=3, block_size=4),
        AttentionCase(heads=2, len_q=8, len_k=11, dim=3, block_size=4, density=1.0, layout="blhd"),
    ],
    ids=str,
)
def test_gradients(case):
    inputs = testing.make_inputs(case, dtype=torch.float64)
    leaves = [x.detach().clone().requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]

    def function(query, key, value):
        lists = (inputs.block_index, inputs.block_count)
        out, lse = block_sparse_attention(
            query, key, value, *lists, block_size=4, scale=0.7, backend="torch", return_lse=True
        )
        return out, lse.masked_fill(lse == float("-inf"), 0.0)

    assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.parametrize("budget", [1, 10**9], ids=["row-by-row", "one-chunk"])
def test_gradients_of_a_ragged_problem_match_the_reference(budget, monkeypatch):
    monkeypatch.setattr(torch_backend, "_CHUNK_BYTES_THREAD", budget)
    case = replace(BASE, batch=2, heads=4, kv_heads=2, len_q=100, len_k=120, variable=True, layout="blhd")
    inputs = testing.make_inputs(case, dtype=torch.float64)
    weight = torch.randn(inputs.query.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    grads = []
    for mine in (True, False):
        leaves = [x.detach().clone().requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]
        if mine:
            out = block_sparse_attention(*leaves, inputs.block_index, inputs.block_count, block_size=16)
        else:
            moved = AttentionInputs(*leaves, inputs.block_index, inputs.block_count)
            out = testing.masked_sdpa(moved, block_size=16)
        grads.append(torch.autograd.grad((out * weight).sum(), leaves))
    for ours, expected in zip(*grads, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_gradients_keep_the_dtype_and_layout(dtype):
    case = replace(BASE, layout="blhd")
    inputs = testing.make_inputs(case, dtype=DTYPES[dtype])
    leaves = [x.detach().requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]
    block_sparse_attention(*leaves, inputs.block_index, block_size=16).sum().backward()
    for leaf in leaves:
        assert leaf.grad.dtype == leaf.dtype
        assert leaf.grad.stride() == leaf.stride()
        assert leaf.grad.isfinite().all()


def test_a_named_backend_is_used_forward_whatever_needs_a_gradient():
    inputs = testing.make_inputs(BASE, dtype=torch.float64)
    query = inputs.query.detach().requires_grad_()
    out = attend(replace(inputs, query=query), BASE, "reference")
    assert torch.equal(out, attend(inputs, BASE, "reference"))
    out.sum().backward()
    assert query.grad.isfinite().all()


@pytest.mark.parametrize("return_lse", [False, True], ids=["out", "out-lse"])
@pytest.mark.parametrize("variable", [False, True], ids=["all", "counts"])
def test_opcheck(variable, return_lse):
    case = AttentionCase(heads=2, kv_heads=1, len_q=20, len_k=30, dim=8, block_size=8, variable=variable, layout="blhd")
    inputs = testing.make_inputs(case, dtype=torch.float32)
    leaves = [x.detach().requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]
    arguments = (*leaves, inputs.block_index, inputs.block_count, 8, 0.25, "torch", return_lse)
    torch.library.opcheck(torch.ops.diffsieve.block_sparse_attention.default, arguments)


@pytest.mark.slow
def test_compiles_into_one_graph_forward_and_backward():
    inputs = testing.make_inputs(BASE, dtype=torch.float32)
    counted = testing.make_inputs(replace(BASE, variable=True), dtype=torch.float32)

    def function(query, key, value, block_index, block_count):
        out, lse = block_sparse_attention(
            query * 1.5, key, value, block_index, block_count, block_size=16, return_lse=True
        )
        return out + 1.0, lse

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for part in (inputs, counted):
        results = []
        for call in (function, compiled):
            leaves = [x.detach().clone().requires_grad_() for x in (part.query, part.key, part.value)]
            out, lse = call(*leaves, part.block_index, part.block_count)
            grads = torch.autograd.grad(out.square().sum(), leaves)
            results.append((out, lse, *grads))
        for eager, graph in zip(*results, strict=True):
            assert torch.equal(eager, graph)


@pytest.mark.slow
@pytest.mark.compiler
def test_compiles_with_inductor():
    inputs = testing.make_inputs(BASE, dtype=torch.float32)

    def function(query, key, value, block_index):
        return block_sparse_attention(query * 2.0, key, value, block_index, block_size=16).transpose(1, 2)

    arguments = (inputs.query, inputs.key, inputs.value, inputs.block_index)
    with torch.inference_mode():
        out = torch.compile(function, fullgraph=True)(*arguments)
        torch.testing.assert_close(out, function(*arguments))


def test_auto_takes_torch_on_the_cpu_and_says_why():
    inputs = testing.make_inputs(BASE, dtype=torch.float16)
    choice = choose_backend(inputs.query, inputs.key, block_size=16)
    assert choice.name == "torch"
    assert choice.reason
    assert torch.equal(attend(inputs, BASE, "auto"), attend(inputs, BASE, "torch"))


def test_the_question_for_triton_can_be_compiled():
    # ba_attention asks it inside compiled code on GPUs; here the answer is the dtype, after the search for the package.
    query = torch.zeros(1, 1, 32, 16, dtype=torch.float64)

    def function(x):
        obstacle = _triton_obstacle(x, 16)
        return x + (0 if obstacle is None else len(obstacle))

    compiled = torch.compile(function, fullgraph=True, backend="eager")
    assert torch.equal(compiled(query), function(query))
    assert compiled(query).min() > 0


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_named_backends_that_always_run(backend):
    inputs = testing.make_inputs(BASE, dtype=torch.float64)
    assert choose_backend(inputs.query, inputs.key, block_size=16, backend=backend).name == backend


@pytest.mark.parametrize(
    ("dtype", "dim", "block_size", "message"),
    [
        (torch.float64, 32, 16, "needs dtype bfloat16, float16, float32, got float64; cast the inputs"),
        (torch.float16, 264, 16, "needs a head dimension D <= 256, got 264"),
        (torch.float16, 32, 24, "needs a block_size that is a power of two, at least 16, got 24"),
        (torch.float16, 32, 8, "needs a block_size that is a power of two, at least 16, got 8"),
        (torch.float16, 32, 16, "needs a CUDA GPU, got cpu tensors; move them"),
    ],
    ids=["dtype", "dim", "block-not-a-power", "block-too-small", "device"],
)
def test_triton_by_name_is_never_replaced(dtype, dim, block_size, message):
    pytest.importorskip("triton", reason="Triton has no build for this platform")
    case = AttentionCase(len_q=32, len_k=32, dim=dim, block_size=block_size)
    inputs = testing.make_inputs(case, dtype=dtype)
    with pytest.raises(BackendUnavailableError, match=re.escape(message)) as error:
        attend(inputs, case, "triton")
    assert 'backend="torch"' in str(error.value)


def _bad_inputs() -> dict[str, tuple[dict, str]]:
    good = testing.make_inputs(BASE, dtype=torch.float32)
    index = good.block_index
    return {
        "query-not-a-tensor": ({"query": [1.0]}, "query must be a tensor, got list"),
        "query-rank": ({"query": good.query[0]}, "query must be 4-dimensional, got (3, 90, 32)"),
        "query-empty": ({"query": good.query[:, :, :0]}, "query must be not empty, got (1, 3, 0, 32)"),
        "query-integer": ({"query": good.query.long()}, "query must be floating point, got torch.int64"),
        "query-float8": (
            {"query": good.query.to(torch.float8_e4m3fn)},
            "query must be floating point of 16 bits or more, got torch.float8_e4m3fn",
        ),
        "key-batch": ({"key": good.key.repeat(2, 1, 1, 1)}, "key must be of batch size 1 like query, got 2"),
        "key-dim": ({"key": good.key[..., :16]}, "key must be of head dimension 32 like query, got 16"),
        "key-heads": ({"key": good.key[:, :2]}, "key must be of a number of heads that divides 3, got 2"),
        "key-dtype": ({"key": good.key.half()}, "key must be float32 like query, got float16"),
        "value-shape": ({"value": good.value[:, :, :80]}, "value must be of shape (1, 3, 90, 32) like key"),
        "value-dtype": ({"value": good.value.double()}, "value must be float32 like query, got float64"),
        "value-device": ({"value": good.value.to("meta")}, "value must be on cpu like query, got meta"),
        "index-rank": ({"block_index": index[0]}, "block_index must be 4-dimensional, got (3, 6, 3)"),
        "index-rows": ({"block_index": index[:, :, :5]}, "block_index must be of shape (1, 3, 6, K), got (1, 3, 5, 3)"),
        "index-empty": ({"block_index": index[..., :0]}, "block_index must be not empty, got (1, 3, 6, 0)"),
        "index-dtype": ({"block_index": index.long()}, "block_index must be int32, got int64"),
        "index-high": ({"block_index": index + 4}, "block_index must be in [0, 5], got values from"),
        "index-negative": ({"block_index": index - 6}, "block_index must be in [0, 5], got values from"),
        "index-order": ({"block_index": index.flip(-1)}, "block_index must be strictly ascending in each list"),
        "index-twice": ({"block_index": index * 0}, "block_index must be strictly ascending in each list"),
        "count-shape": ({"block_count": index[..., 0, 0]}, "block_count must be of shape (1, 3, 6), got (1, 3)"),
        "count-dtype": ({"block_count": index[..., 0].long()}, "block_count must be int32, got int64"),
        "count-high": ({"block_count": index[..., 0] * 0 + 4}, "block_count must be in [0, 3], got values from 4 to 4"),
        "count-negative": ({"block_count": index[..., 0] * 0 - 1}, "block_count must be in [0, 3], got values from"),
        "block-size-zero": ({"block_size": 0}, "block_size must be an int in [1, 65536], got 0"),
        "block-size-huge": ({"block_size": 10**20}, f"block_size must be an int in [1, 65536], got {10**20}"),
        "block-size-float": ({"block_size": 16.0}, "block_size must be an int in [1, 65536], got 16.0"),
        "scale-zero": ({"scale": 0.0}, "scale must be a finite number > 0 or None, got 0.0"),
        "scale-nan": ({"scale": float("nan")}, "scale must be a finite number > 0 or None, got nan"),
        "backend": (
            {"backend": "cuda"},
            "backend must be one of auto, reference, torch, triton, hopper, hopper-exact, flash4, got 'cuda'",
        ),
    }


@pytest.mark.parametrize("name", list(_bad_inputs()))
def test_bad_input_is_named(name):
    changes, message = _bad_inputs()[name]
    inputs = testing.make_inputs(BASE, dtype=torch.float32)
    arguments = {
        "query": inputs.query,
        "key": inputs.key,
        "value": inputs.value,
        "block_index": inputs.block_index,
        "block_size": 16,
    }
    with pytest.raises(UserInputError, match=re.escape(message)):
        block_sparse_attention(**(arguments | changes))


VALUES = ("index-high", "index-negative", "index-order", "index-twice", "count-high", "count-negative")


@pytest.mark.parametrize("name", [name for name in _bad_inputs() if name not in (*VALUES, "query-not-a-tensor")])
def test_compiled_code_names_bad_input(name):
    changes, message = _bad_inputs()[name]
    inputs = testing.make_inputs(BASE, dtype=torch.float32)
    tensors = {"query": inputs.query, "key": inputs.key, "value": inputs.value, "block_index": inputs.block_index}
    options = {"block_size": 16}
    for argument, x in changes.items():
        (tensors if isinstance(x, torch.Tensor) else options)[argument] = x
    torch._dynamo.reset()  # sizes that differ from one compilation to the next would have no numbers
    with pytest.raises(Exception, match="raised exception UserInputError") as raised:
        torch.compile(lambda x: block_sparse_attention(**x, **options), fullgraph=True, backend="eager")(tensors)
    assert message in str(raised.value).replace("\\", "")
