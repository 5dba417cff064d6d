"""Operations without a forward-mode derivative refuse tangents, in every mode: a custom op would drop them."""

import pytest
import torch
from torch.autograd import forward_ad

from diffsieve import UserInputError
from diffsieve.kernels.ba_att import ba_attention
from diffsieve.kernels.block_sparse import block_sparse_attention, dense_attention
from diffsieve.kernels.llsa import enriched_attention, hierarchical_topk, llsa_attention


def block_sparse(query, key, value):
    return block_sparse_attention(query, key, value, torch.zeros(1, 2, 16, 1, dtype=torch.int32), block_size=4)


def llsa(query, key, value):
    return llsa_attention(query, key, value, block_size=4, topk=2)


def llsa_of_lists(query, key, value):
    kept = hierarchical_topk(*(x.detach().clone() for x in (query, key)), block_size=4, topk=2)
    return enriched_attention(query, key, value, kept, block_size=4)


def ba_att(query, key, value):
    return ba_attention(query, key, value, orders="norm_sort", density=0.5, block_size=16)


def dense(query, key, value):
    return dense_attention(query, key, value, backend="torch")[0]


CALLS = [(block_sparse, "block_sparse"), (llsa, "llsa"), (llsa_of_lists, "llsa"), (ba_att, "block_sparse")]
CALLS = [pytest.param(call, f"{name}_attention", id=call.__name__) for call, name in [*CALLS, (dense, "dense")]]
MODES = pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
NAMES = ["query", "key", "value"]


def make_inputs():
    return [torch.randn(1, 2, 64, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


@MODES
@pytest.mark.parametrize("place", range(3), ids=NAMES)
@pytest.mark.parametrize(("call", "operation"), CALLS)
def test_a_dual_tensor(call, operation, place, mode):
    inputs = make_inputs()
    with mode(), forward_ad.dual_level():
        inputs[place] = forward_ad.make_dual(inputs[place], torch.ones_like(inputs[place]))
        with pytest.raises(UserInputError, match=rf"{NAMES[place]} must be without a tangent \({operation} has no"):
            call(*inputs)


@MODES
@pytest.mark.parametrize(("call", "operation"), CALLS)
def test_jvp(call, operation, mode):
    inputs = make_inputs()
    with mode(), pytest.raises(UserInputError, match=f"{operation} has no forward-mode derivative"):
        torch.func.jvp(lambda value: call(*inputs[:2], value), (inputs[2],), (inputs[2],))


@pytest.mark.parametrize(("call", "operation"), CALLS)
def test_what_has_no_tangent_is_not_refused(call, operation):
    inputs = make_inputs()
    expected = call(*inputs)
    with forward_ad.dual_level():
        assert torch.equal(call(*inputs), expected)


@MODES
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize(("call", "operation"), CALLS)
def test_jvp_inside_of_compiled_code(call, operation, compiler, mode):
    torch._dynamo.reset()
    query, key, value = make_inputs()

    @torch.compile(backend=compiler)
    def forward(tangent):
        with mode():
            return torch.func.jvp(lambda value: call(query, key, value), (value,), (tangent,))

    with pytest.raises(UserInputError, match=operation):
        forward(torch.ones_like(value))
    torch._dynamo.reset()
