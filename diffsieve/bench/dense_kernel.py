"""PyTorch's dense attention by one named kernel, also in compiled models, and whether that kernel really ran."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch._functorch.config as functorch_config
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..errors import DiffsieveError

# What a profile calls the kernels; with and without gradients.
_OPERATIONS = {
    SDPBackend.CUDNN_ATTENTION: "aten::_scaled_dot_product_cudnn_attention",
    SDPBackend.FLASH_ATTENTION: "aten::_scaled_dot_product_flash_attention",
    SDPBackend.EFFICIENT_ATTENTION: "aten::_scaled_dot_product_efficient_attention",
    SDPBackend.MATH: "aten::_scaled_dot_product_attention_math",
}


@contextmanager
def dense_kernel(backend: SDPBackend | None) -> Iterator[None]:
    """Let `scaled_dot_product_attention` take this kernel alone; `None` leaves the choice to PyTorch.

    A model that is compiled inside is compiled anew: PyTorch's cache of compiled graphs does not look at the choice of
    kernel, and would give a model the kernel that an equal one was compiled with before.
    """
    if backend is None:
        yield
        return
    with sdpa_kernel(backend), functorch_config.patch(enable_autograd_cache=False):
        yield


def check_kernel(call: Callable[[], object], backend: SDPBackend) -> None:
    """Run a call under a profile, and see that all of its dense attention was by one kernel.

    Raises:
        DiffsieveError: another kernel ran, or none.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    ran = {event.key for event in profile.key_averages() if event.key.startswith("aten::_scaled_dot_product")}
    ran = {name for name in ran if not name.endswith("_backward")}
    if ran != {_OPERATIONS[backend]}:
        raise DiffsieveError(f"attention must run {_OPERATIONS[backend]} alone, ran {', '.join(sorted(ran)) or 'none'}")
