"""PyTorch's dense attention by one kernel."""

import pytest
import torch
from torch.nn.attention import SDPBackend

from diffsieve.bench.dense_kernel import check_kernel, dense_kernel
from diffsieve.errors import DiffsieveError


def call(query):
    return torch.nn.functional.scaled_dot_product_attention(query, query, query)


def test_the_named_kernel_runs_and_another_is_told():
    query = torch.randn(1, 2, 16, 8)
    with dense_kernel(SDPBackend.MATH):
        check_kernel(lambda: call(query), SDPBackend.MATH)
        with pytest.raises(
            DiffsieveError, match="must run aten::_scaled_dot_product_cudnn_attention alone, ran aten::_s"
        ):
            check_kernel(lambda: call(query), SDPBackend.CUDNN_ATTENTION)
    with pytest.raises(DiffsieveError, match="ran none"):
        check_kernel(lambda: query + 1, SDPBackend.MATH)


@pytest.mark.gpu
@pytest.mark.parametrize("backward", [False, True])
def test_equal_compiled_models_take_their_own_kernels(backward):
    query = torch.randn(1, 2, 256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=backward)

    def step(model):
        out = model(query)
        if backward:
            out.float().square().mean().backward()

    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        torch._dynamo.reset()
        model = torch.compile(call)
        with dense_kernel(backend):
            step(model)  # compiles, which a profile would show too
            check_kernel(lambda model=model: step(model), backend)
