"""Block-sparse attention and BA-Att under autocast: the same bits as without, in the dtype of the inputs."""

import pytest
import torch

from diffsieve.kernels.autocast import no_autocast
from diffsieve.kernels.ba_att import (
    ba_attention,
    block_scores,
    block_statistics,
    calibrate_orders,
    halfk_scores,
    residual_scores,
    token_orders,
)
from diffsieve.kernels.ba_att.reference import ba_attention_reference
from diffsieve.kernels.block_sparse import block_sparse_attention

GRID = (3, 5, 6)
# Device, dtype of the inputs, dtype of autocast.
WHERE = pytest.mark.parametrize(
    ("device", "dtype", "low"),
    [
        pytest.param("cpu", torch.bfloat16, torch.bfloat16, id="bf16"),
        pytest.param("cpu", torch.bfloat16, torch.float16, id="bf16-to-fp16"),
        pytest.param("cpu", torch.float32, torch.bfloat16, id="fp32-to-bf16"),
        pytest.param("cuda", torch.bfloat16, torch.bfloat16, id="cuda-bf16", marks=pytest.mark.gpu),
    ],
)
CALLS = [
    {},
    {"score": "residual", "compensate": "centroid"},
    {"score": "halfk"},
    {"compensate": "centroid", "top_p": 0.7},
    {"orders": (0, 2, 3, 4), "compensate": "centroid"},
    {"text_suffix": 9},
]


def make_inputs(device="cpu", dtype=torch.bfloat16, text=0):
    generator = torch.Generator().manual_seed(0)
    length = GRID[0] * GRID[1] * GRID[2] + text
    return [torch.randn(2, length, 4, 32, generator=generator).to(device, dtype).transpose(1, 2) for _ in range(3)]


def call(query, key, value, **options):
    options = {"orders": "hilbert_window", "density": 0.4, "block_size": 16, **options}
    return ba_attention(query, key, value, grid_thw=GRID, **options)


def lists(device):
    return torch.tensor([0, 2], dtype=torch.int32, device=device).expand(2, 4, 6, 2).contiguous()


@WHERE
@pytest.mark.parametrize("options", CALLS, ids=str)
def test_ba_attention(options, device, dtype, low):
    inputs = make_inputs(device, dtype, options.get("text_suffix", 0))
    expected, info = call(*inputs, return_info=True, **options)
    with torch.autocast(device, low):
        found, same = call(*inputs, return_info=True, **options)
        assert torch.is_autocast_enabled(device)
    assert found.dtype == dtype
    assert torch.equal(same.block_index, info.block_index)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("options", CALLS, ids=str)
def test_definition_of_ba_attention(options):
    inputs = [x[:1] for x in make_inputs("cpu", torch.float32, options.get("text_suffix", 0))]
    options = {"grid_thw": GRID, "orders": "hilbert", "density": 0.4, "block_size": 16, **options}
    expected, _ = ba_attention_reference(*inputs, **options)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = ba_attention_reference(*inputs, **options)
    assert torch.equal(found, expected)


@WHERE
@pytest.mark.parametrize("score", ["moments", "residual", "halfk"])
@pytest.mark.parametrize("compensate", ["none", "centroid"])
def test_calibration(compensate, score, device, dtype, low):
    def errors():
        how = {"density": 0.4, "block_size": 16, "score": score, "compensate": compensate}
        return calibrate_orders(*make_inputs(device, dtype), grid_thw=GRID, **how)

    expected = errors()
    with torch.autocast(device, low):
        assert torch.equal(errors(), expected)


@WHERE
def test_parts_of_ba_attention(device, dtype, low):
    def parts():
        query, key, _ = make_inputs(device, dtype)
        q, k = block_statistics(query, 16), block_statistics(key, 16)
        scores = [block_scores(q, k), residual_scores(query=q, key=k), halfk_scores(q, k, key, 16)]
        orders = [
            token_orders(query, key, orders=order, grid_thw=GRID).key for order in ("hilbert_window", "norm_sort")
        ]
        return *q, *k, *scores, *orders

    expected = parts()
    with torch.autocast(device, low):
        for one, other in zip(parts(), expected, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


@WHERE
@pytest.mark.parametrize("return_lse", [False, True], ids=["out", "lse"])
@pytest.mark.parametrize("backend", ["auto", "reference", "torch"])
def test_block_sparse_attention(backend, return_lse, device, dtype, low):
    inputs = [x.detach().requires_grad_() for x in make_inputs(device, dtype)]

    def forward():
        result = block_sparse_attention(*inputs, lists(device), block_size=16, backend=backend, return_lse=return_lse)
        return result if return_lse else (result,)

    def backward(outputs):
        # On a GPU "torch" adds up the gradients of keys in no fixed order, for "reference" too.
        if device == "cuda" and backend != "auto":
            return []
        return torch.autograd.grad([x.sin().sum() for x in outputs], inputs)

    outputs = forward()
    expected = *outputs, *backward(outputs)
    with torch.autocast(device, low):
        outputs = forward()
        found = *outputs, *backward(outputs)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("first", [False, True], ids=["compiled without", "compiled with"])
def test_one_graph(first, compiler, device):
    inputs = make_inputs(device)

    def function(query, key, value):
        errors = calibrate_orders(query, key, value, grid_thw=GRID, density=0.4, block_size=16, compensate="centroid")
        return (
            errors,
            call(query, key, value, compensate="centroid", score="residual"),
            block_sparse_attention(query, key, value, lists(device), block_size=16),
        )

    expected = function(*inputs)
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=compiler)
    for enabled in (first, not first, first):
        with torch.autocast(device, torch.bfloat16, enabled=enabled):
            for one, other in zip(compiled(*inputs), expected, strict=True):
                assert torch.equal(one, other)
    torch._dynamo.reset()


def test_devices_without_autocast_and_those_where_it_is_off():
    with torch.autocast("cpu", torch.bfloat16):
        with no_autocast(torch.empty(1, device="meta")):
            assert torch.is_autocast_enabled("cpu")
        with no_autocast(torch.empty(1)):
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")
        assert call(*make_inputs("meta"), orders="raster").device.type == "meta"


def test_arguments_by_name_and_errors():
    query, key, value = make_inputs()
    expected = call(query, key, value)
    with torch.autocast("cpu", torch.bfloat16):
        options = {"grid_thw": GRID, "orders": "hilbert_window", "density": 0.4, "block_size": 16}
        assert torch.equal(ba_attention(value=value, key=key, query=query, **options), expected)
        with pytest.raises(ValueError, match="query must be"):
            ba_attention(None, key, value, **options)
        assert torch.is_autocast_enabled("cpu")
