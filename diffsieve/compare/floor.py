"""The noise floor: dense attention with another kernel, which no method can be said to be closer than."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import UserInputError

# Another kernel of PyTorch's scaled dot product attention than the default one, by device type.
OTHER_KERNELS = {"cuda": "_native_efficient", "cpu": "_native_math"}


@contextmanager
def other_kernel(pipe: Any) -> Iterator[str]:
    """Run the dense attention of a pipeline with another kernel inside a `with` block; gives its name.

    The kernel is set on the processors. `set_attention_backend` of diffusers would also change the default of the
    whole process, which `reset_attention_backend` does not give back (seen with 0.42.1): later dense steps would go on
    with the other kernel.

    Raises:
        UserInputError: the device has one kernel only, or the processors of the model take none.
    """
    from diffusers.models.attention_dispatch import AttentionBackendName

    from ..processors.install import transformers_of

    device = pipe._execution_device
    kernel = OTHER_KERNELS.get(device.type)
    if kernel is None:
        raise UserInputError(f"floor must be off on {device}: it has one kernel of dense attention only")
    modules: list[Any] = [module for _, module in transformers_of(pipe)]
    processors = [p for module in modules for p in module.attn_processors.values() if hasattr(p, "_attention_backend")]
    if not processors:
        raise UserInputError("floor must be off for this model: its attention processors take no other kernel")
    before = [processor._attention_backend for processor in processors]
    try:
        for processor in processors:
            processor._attention_backend = AttentionBackendName(kernel)
        yield kernel
    finally:
        for processor, backend in zip(processors, before, strict=True):
            processor._attention_backend = backend
