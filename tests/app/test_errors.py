"""What the page says when memory runs out, whoever says so: PyTorch's allocators or Python."""

import pytest

from diffsieve.app.errors import explain


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
        RuntimeError("CUDA error: out of memory"),
        MemoryError(),
    ],
    ids=["cpu", "gpu", "python"],
)
def test_memory_that_ran_out_is_said_with_what_to_lower(error):
    assert str(explain(error)).startswith("the memory does not hold this run: take fewer frames or a smaller size")


def test_another_runtime_error_gives_its_kind_alone():
    assert "the run failed with RuntimeError; entry" in str(explain(RuntimeError("a defect in /a/secret/path")))
