"""Not a test file: lets the Triton interpreter round a product and a sum that follows it once, as compilers do.

With NVIDIA's they are one instruction. The interpreter rounds both, and so hides errors that a kernel has on a GPU.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from triton.runtime.interpreter import InterpreterBuilder


def contract_products() -> None:
    """From here on, in this process: fp32 alone, where the product is the first operand of the sum or difference."""
    multiply = InterpreterBuilder.create_fmul

    def create_fmul(self: Any, lhs: Any, rhs: Any) -> Any:
        result = multiply(self, lhs, rhs)
        if result.data.dtype == np.float32:
            # Exact: two numbers of 24 bits.
            result.attr["unrounded"] = lhs.data.astype(np.float64) * rhs.data.astype(np.float64)
        return result

    def contracted(plain: Callable[..., Any], operation: Callable[..., Any]) -> Callable[..., Any]:
        def create(self: Any, lhs: Any, rhs: Any) -> Any:
            result = plain(self, lhs, rhs)
            if "unrounded" in lhs.attr:
                result.data = operation(lhs.attr["unrounded"], rhs.data.astype(np.float64)).astype(np.float32)
            return result

        return create

    InterpreterBuilder.create_fmul = create_fmul
    InterpreterBuilder.create_fadd = contracted(InterpreterBuilder.create_fadd, np.add)
    InterpreterBuilder.create_fsub = contracted(InterpreterBuilder.create_fsub, np.subtract)
