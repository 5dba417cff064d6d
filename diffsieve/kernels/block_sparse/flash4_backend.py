"""The `flash4` backend: the block-sparse forward of FlashAttention-4, from the optional package `flash-attn-4`.

What it takes was read off its interface for Hopper GPUs: blocks of 64 or 128 tokens that equal its steps over the keys,
lists of our form with counts (entries beyond a count are not read), lengths that are no multiple of the block (it masks
the keys of the last block of a list), fewer heads of keys than of queries, and the log-sum-exp in natural logarithm.
The interface is private and moves: its names are checked when it is loaded.
"""

from __future__ import annotations

import inspect
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .descriptors import allows_descriptor

PACKAGE = "flash-attn-4"
INTERFACE = "flash_attn.cute.interface"
_LISTS = "flash_attn.cute.block_sparsity"
_ARGUMENTS = {"softmax_scale", "pack_gqa", "block_sparse_tensors", "out", "lse"}
_FIELDS = {"mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx", "block_size"}


@cache
def interface_obstacle() -> str | None:
    """Why the installed package cannot be used, or None. Imports it, once."""
    try:
        attend, lists = _attend(), _lists()
    except AttributeError as error:
        return f"needs another version of the package {PACKAGE}: {error}"
    except Exception as error:  # its compiler looks for CUDA when it is imported, and has errors of its own
        if isinstance(error, ImportError) and error.name == "flash_attn":
            return f"needs the package {PACKAGE}, which is not installed (pip install {PACKAGE})"
        return f"needs the package {PACKAGE}, whose import failed ({type(error).__name__}: {error})"
    missing = _ARGUMENTS - set(inspect.signature(attend).parameters) | _FIELDS - set(lists._fields)
    if missing:
        return f"needs another version of the package {PACKAGE}: it has no {', '.join(sorted(missing))}"
    return None


def flash4_lists(block_index: Tensor, block_count: Tensor | None, *, len_k: int, block_size: int) -> Any:
    """Our lists as that package takes them.

    Args:
        block_index, block_count: as in `block_sparse_attention`.
        len_k: tokens of the keys.
        block_size: tokens per block.
    """
    blocks = -(-len_k // block_size)
    # Lists on a GPU are not checked: nothing outside of them or of the keys may be read.
    index = block_index[..., :blocks].clamp(0, blocks - 1).contiguous()
    if block_count is None:
        count = index.new_full(index.shape[:3], index.shape[3])
    else:
        count = block_count.clamp(0, index.shape[3]).contiguous()
    # No block needs a mask within it: all of them are "full" ones, and the lists of the others are empty.
    return _lists()(
        mask_block_cnt=torch.zeros_like(count), mask_block_idx=index.new_zeros((*count.shape, 1)),
        full_block_cnt=count, full_block_idx=index, block_size=(block_size, block_size),
    )  # fmt: skip


def attend_flash4(
    query: Tensor, key: Tensor, value: Tensor, lists: Any, *, scale: float, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Attention over lists of `flash4_lists`; (B, H, L, D) in and out, in the memory order of `query`.

    Inputs that the copy engine cannot read where they lie (a last axis with a stride, a start or strides that are no
    multiple of 16 bytes, an expanded axis) are copied first, and so is an output of such strides at the end.
    """
    out = torch.empty_like(query)
    target = out if allows_descriptor(out) else torch.empty_like(query, memory_format=torch.contiguous_format)
    # Gradients are ours: the package allocates for its own where a tensor asks for one.
    tensors = (x.detach() for x in (query, key, value))
    tensors = (x if allows_descriptor(x) else x.clone(memory_format=torch.contiguous_format) for x in tensors)
    lse = query.new_empty(query.shape[:3], dtype=torch.float32) if return_lse else None
    with torch.cuda.device_of(query):
        # Lists differ from head to head, so that no two heads of queries may share a tile.
        _attend()(
            *(x.transpose(1, 2) for x in tensors), softmax_scale=scale, pack_gqa=False, block_sparse_tensors=lists,
            out=target.transpose(1, 2), lse=lse,
        )  # fmt: skip
    return (out if target is out else out.copy_(target)), lse


def block_sparse_attention_flash4(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_index: Tensor,
    block_count: Tensor | None,
    *,
    block_size: int,
    scale: float,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Same meaning as `reference.block_sparse_attention_reference`; the log-sum-exp is None unless asked for."""
    lists = flash4_lists(block_index, block_count, len_k=key.shape[2], block_size=block_size)
    return attend_flash4(query, key, value, lists, scale=scale, return_lse=return_lse)


def _attend() -> Any:
    return import_module(INTERFACE)._flash_attn_fwd


def _lists() -> Any:
    return import_module(_LISTS).BlockSparseTensorsTorch
