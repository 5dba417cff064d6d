"""What is said when memory runs out: where, how much was asked for, and what of the command to lower."""

import pytest
import typer

from diffsieve.cli import eval as eval_command
from diffsieve.cli import info, train
from diffsieve.cli.memory import memory_message
from diffsieve.errors import is_out_of_memory

GPU = (
    "CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which 1 GiB is free"
)


class OutOfMemoryError(RuntimeError):
    """Called as PyTorch's own."""


def parameters(app: typer.Typer, command: str) -> list[str]:
    found = typer.main.get_command(app)
    return [parameter.name for parameter in getattr(found, "commands", {}).get(command, found).params]


@pytest.mark.parametrize(
    ("error", "where"),
    [
        (OutOfMemoryError(GPU), "the GPU (could not get 512.00 MiB)"),
        (RuntimeError("CUDA error: out of memory"), "the GPU"),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 2147483648 bytes."),
         "the CPU (could not get 2.00 GiB)"),
        (MemoryError("Unable to allocate 8.00 EiB for an array"), "the CPU"),
    ],
    ids=["gpu", "driver", "windows", "numpy"],
)  # fmt: skip
def test_the_device_and_the_amount_are_named(error, where):
    assert is_out_of_memory(error)
    assert memory_message(error, ()).startswith(f"out of memory on {where}: ")


@pytest.mark.parametrize(
    ("app", "command", "advice"),
    [
        (train.app, "pixel-dit", "lower the batch_size of the phases in the settings;"),
        (train.app, "mini-wan", "lower the batch_size of the phases in the settings;"),
        (eval_command.app, "eval", "lower --chunk-size;"),
        (info.app, "info", "free some, or take a smaller model;"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_the_advice_is_of_flags_that_the_command_has(app, command, advice):
    assert advice in memory_message(MemoryError(), parameters(app, command))


@pytest.mark.parametrize(
    "error", [ValueError("out of memory"), RuntimeError("out of resource: shared memory")], ids=str
)
def test_other_errors_are_not_about_memory(error):
    assert not is_out_of_memory(error)
