"""Not a test file: Triton's driver of a Hopper GPU for machines without one, also for `benchmarks/host_time.py`.

Arguments are bound and specialised, kernels looked up and compiled for sm_90 as ever; only the launch itself is not.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class _Hopper:
    """As much of a driver as a launch asks for, of an H100."""

    utils = SimpleNamespace(
        get_device_properties=lambda _: {"max_shared_mem": 227 * 1024},
        load_binary=lambda *_: (1, 1, 64, 0, 1024),
        unload_module=lambda _: None,
    )

    def __init__(self, launcher: Callable[[Any, Any], Any] | None) -> None:
        self.launcher_cls = launcher

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def replace_driver(launcher: Callable[[Any, Any], Any] | None = None) -> None:
    """Replace Triton's driver, for the rest of the process.

    Args:
        launcher: makes of the source and the metadata of a kernel what is called in the place of its launches.
            With `None` kernels can only be compiled (`kernel.warmup`).
    """
    driver.set_active(_Hopper(launcher))
