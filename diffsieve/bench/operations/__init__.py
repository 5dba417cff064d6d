"""Everything that can be measured, each registered once."""

from __future__ import annotations

from ..problem import Operation
from . import ba_att, block_sparse, llsa, wan

OPERATIONS: dict[str, Operation] = {
    operation.name: operation for operation in (block_sparse.OPERATION, ba_att.OPERATION, llsa.OPERATION, wan.OPERATION)
}
