"""Operations defined with `custom_op`: what the compiler and autograd make of them, and what an eager call returns."""

import pytest
import torch
from torch import Tensor

from diffsieve.kernels.custom_ops import custom_op
from diffsieve.kernels.sizes import cdiv, next_power_of_2

CALLS: list[str] = []


@custom_op("diffsieve_test::scaled", tags=(torch.Tag.cudagraph_unsafe,))
def scaled(x: Tensor, other: Tensor | None, by: float, word: str) -> tuple[Tensor, Tensor]:
    CALLS.append(word)
    if len(CALLS) > 10_000:  # a branch on data that the compiler could not trace
        raise RuntimeError(str(float(x.sum())))
    return x * by, torch.empty(0) if other is None else other + 1


@torch.library.register_fake("diffsieve_test::scaled")
def _(x: Tensor, other: Tensor | None, by: float, word: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(0) if other is None else torch.empty_like(other)


torch.library.register_autograd(
    "diffsieve_test::scaled",
    lambda ctx, grad, _: (grad * ctx.by, None, None, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "by", inputs[2]),
)


def test_eager_call():
    out, empty = scaled(torch.ones(3), None, 2.0, "eager")
    assert out.tolist() == [2, 2, 2]
    assert empty.shape == (0,)
    assert CALLS[-1] == "eager"


def test_tags():
    assert {torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe} <= set(scaled.tags)


@pytest.mark.parametrize("other", [False, True])
def test_opcheck(other):
    x = torch.randn(3, requires_grad=True)
    torch.library.opcheck(scaled, (x, torch.randn(2) if other else None, 2.0, "check"))


def test_gradient_eager_and_compiled():
    def total(x):
        return scaled(x, None, 3.0, "gradient")[0].sum()

    for call in (total, torch.compile(total, fullgraph=True, backend="aot_eager")):
        x = torch.ones(2, requires_grad=True)
        call(x).backward()
        assert x.grad.tolist() == [3, 3]


def test_compiler_does_not_look_inside_between_compiled_parts():
    seen = []

    def record(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    @torch.compile(backend=record)
    def call(x):
        torch._dynamo.graph_break()
        return scaled(x, None, 2.0, "between")[0] + 1

    assert call(torch.ones(2)).tolist() == [3, 3]
    assert sum("scaled" in target for target in seen) == 1
    assert not any("mul" in target for target in seen)


@pytest.mark.parametrize("n", [1, 2, 3, 64, 65, 2**31 + 1])
def test_sizes(n):
    power = next_power_of_2(n)
    assert power >= n > power // 2 or n == power == 1
    assert power & (power - 1) == 0
    assert cdiv(n, 64) == (n + 63) // 64
