"""Exact attention mass between blocks, and how much of it a selection keeps."""

from __future__ import annotations

import torch

from ..kernels.ba_att import TokenOrders, block_mask, gather_tokens
from ..kernels.ba_att.synthetic import attention_by_block
from ..kernels.backends import triton_obstacle

# What the kernel takes: half precision, whose products are exact in fp32, and heads that fit in shared memory.
_KERNEL_DTYPES, _KERNEL_MAX_DIM = (torch.bfloat16, torch.float16), 128


def block_mass(
    query: torch.Tensor, key: torch.Tensor, order: TokenOrders, *, block_size: int, scale: float
) -> torch.Tensor:
    """Compute the attention that each query block pays to each key block, exactly.

    A Triton kernel on GPUs for bf16 and fp16 with D up to 128, else PyTorch, block by block; fp32 throughout in both.

    Args:
        query: (B, H, L, D).
        key: (B, Hkv, L, D).
        order: of the tokens before they are cut into blocks.
        block_size: tokens per block.
        scale: factor of the logits.

    Returns:
        (B, H, Nq, Nk) fp32, summed over the queries of the block: L in all per batch item and head.
    """
    dim = query.shape[-1]
    if query.dtype in _KERNEL_DTYPES and dim <= _KERNEL_MAX_DIM and triton_obstacle(query, None) is None:
        from ..kernels.ba_att.mass_triton import block_mass_triton

        tokens = gather_tokens(query, order.query), gather_tokens(key, order.key)
        return block_mass_triton(*tokens, block_size=block_size, scale=scale)
    ordered = gather_tokens(key, order.key).float()
    ordered = ordered.repeat_interleave(query.shape[1] // ordered.shape[1], dim=1)
    return attention_by_block(query.float() * (scale * dim**0.5), ordered, TokenOrders(order.query, None), block_size)


def kept_share(mass: torch.Tensor, block_index: torch.Tensor, block_count: torch.Tensor | None) -> torch.Tensor:
    """Return the recall of each head: the share of `block_mass` inside the kept blocks, (B, H) in [0, 1]."""
    kept = block_mask(block_index, block_count, mass.shape[-1])
    return (mass * kept).sum((-1, -2)) / mass.sum((-1, -2))
