"""The operations on chosen blocks refuse the same queries, keys and values, in the same words."""

import re

import pytest
import torch

from diffsieve import UserInputError
from diffsieve.kernels.block_sparse import block_sparse_attention
from diffsieve.kernels.llsa import llsa_attention

INDEX = torch.zeros(2, 4, 4, 1, dtype=torch.int32)


def attend_listed(query, key, value, **options):
    return block_sparse_attention(query, key, value, INDEX, block_size=16, **options)


@pytest.mark.parametrize("attend", [attend_listed, llsa_attention])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": [1.0]}, "query must be a tensor, got list"),
        ({"key": torch.ones(2, 64, 8)}, r"key must be 4-dimensional, got \(2, 64, 8\)"),
        ({"value": torch.ones(2, 4, 0, 8)}, r"value must be not empty, got \(2, 4, 0, 8\)"),
        ({"query": torch.ones(2, 4, 64, 8, dtype=torch.int32)}, "query must be floating point, got torch.int32"),
        ({"key": torch.ones(1, 4, 64, 8)}, "key must be of batch size 2 like query, got 1"),
        ({"key": torch.ones(2, 4, 64, 16)}, "key must be of head dimension 8 like query, got 16"),
        ({"key": torch.ones(2, 3, 64, 8)}, "key must be of a number of heads that divides 4, got 3"),
        ({"value": torch.ones(2, 2, 64, 8)}, r"value must be of shape \(2, 4, 64, 8\) like key, got \(2, 2, 64, 8\)"),
        ({"value": torch.ones(2, 4, 64, 8).half()}, "value must be float32 like query, got float16"),
        ({"key": torch.ones(2, 4, 64, 8, device="meta")}, "key must be on cpu like query, got meta"),
        ({"scale": float("inf")}, "scale must be a finite number > 0 or None, got inf"),
        ({"scale": "1"}, "scale must be a finite number > 0 or None, got 1"),
        ({"backend": "cuda"}, "backend must be one of auto, .*, got 'cuda'"),
    ],
)
def test_wrong_inputs_are_refused_in_the_same_words(attend, change, message):
    inputs = {name: torch.ones(2, 4, 64, 8) for name in ("query", "key", "value")} | change
    with pytest.raises(UserInputError, match=f"^{message}$"):
        attend(**inputs)
    if not isinstance(inputs["query"], list):  # compiled code says it, too
        tensors = [inputs.pop(name) for name in ("query", "key", "value")]
        torch._dynamo.reset()
        with pytest.raises(Exception, match="raised exception UserInputError") as raised:
            torch.compile(lambda *x: attend(*x, **inputs), fullgraph=True, backend="eager")(*tensors)
        assert re.search(message, str(raised.value).replace("\\", ""))


@pytest.mark.parametrize("attend", [attend_listed, llsa_attention])
@pytest.mark.parametrize("options", [{}, {"dynamic": True}], ids=["static", "dynamic"])
def test_scales_that_change_are_checked_without_a_break(attend, options):
    tensors = [torch.randn(2, 4, 64, 8) for _ in range(3)]
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x, scale: attend(*x, scale=scale), fullgraph=True, backend="eager", **options)
    for scale in (0.1, 0.2, 0.3):
        assert torch.equal(compiled(*tensors, scale=scale), attend(*tensors, scale=scale))
