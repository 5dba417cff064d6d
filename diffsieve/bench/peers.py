"""Kernels of others that are measured beside ours: PyTorch's own, and packages where they are installed.

Each goes through the same check as ours, on the same inputs, before it gets a figure. Optional packages are found by
name and imported when they are used; nothing depends on them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..kernels.block_sparse.flash4_backend import INTERFACE, PACKAGE, attend_flash4, flash4_lists
from ..kernels.testing import AttentionInputs
from .config import BenchConfig

# Share of the memory of the device that the logits of a kernel that writes them out may take.
_LOGITS_SHARE = 0.4


@dataclass(frozen=True)
class Peer:
    """A kernel of others.

    Args:
        name: of the method in rows, such as "dense, cuDNN".
        sparse: whether it takes block lists; else it attends to everything.
        make: given inputs and the block size, returns the call. Conversions of the lists and of the memory order are
            made before, outside of the time.
        module: the module of an optional package, with the package's name on the index; `None` for PyTorch's own.
        package: see `module`.
        cpu: whether it runs on a CPU.
        dtypes: what it takes.
        whole_blocks: whether it needs a number of tokens that is a multiple of the block, and that one of 64.
        writes_logits: whether its memory grows with the square of the tokens.
    """

    name: str
    sparse: bool
    make: Callable[[AttentionInputs, int], Callable[[], Tensor]]
    module: str | None = None
    package: str | None = None
    cpu: bool = False
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    whole_blocks: bool = False
    writes_logits: bool = False

    def obstacle(self, config: BenchConfig) -> str | None:
        """Why it cannot run here at all, or `None`."""
        if not config.on_gpu and not self.cpu:
            return "needs a CUDA GPU"
        if config.torch_dtype not in self.dtypes:
            return f"does not take {config.dtype}"
        if self.module is not None and not has_module(self.module):
            return f"{self.package} is not installed"
        return None

    def obstacle_at(self, config: BenchConfig, tokens: int, heads: int) -> str | None:
        """Why it cannot run at a size, where it can run at others, or `None`."""
        if self.whole_blocks and config.block_size % 64:
            return f"needs blocks of a multiple of 64 tokens, got {config.block_size}"
        if self.whole_blocks and tokens % config.block_size:
            return f"needs whole blocks of {config.block_size} tokens"
        if self.writes_logits and config.on_gpu:
            needed = 2 * 4 * heads * tokens**2
            total = torch.cuda.get_device_properties(torch.device(str(config.device))).total_memory
            if needed > _LOGITS_SHARE * total:
                return f"writes out the logits, {needed / 2**30:.0f} GiB"
        return None


def has_module(name: str) -> bool:
    """Whether a module of that dotted name is installed; parents are imported, the module itself is not."""
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False


def sdpa(backend: SDPBackend | None, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """PyTorch's dense attention by one of its kernels, `None` for its own choice."""
    if backend is None:
        return scaled_dot_product_attention(query, key, value)
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(query, key, value)


def _sdpa(backend: SDPBackend | None, inputs: AttentionInputs, block_size: int) -> Callable[[], Tensor]:
    return partial(sdpa, backend, inputs.query, inputs.key, inputs.value)


def _as_blhd(inputs: AttentionInputs) -> list[Tensor]:
    return [x.transpose(1, 2).contiguous() for x in (inputs.query, inputs.key, inputs.value)]


def _first(result: Any) -> Tensor:
    """The output of a function that may also return its log-sum-exp, (B, L, H, D), as (B, H, L, D)."""
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out.transpose(1, 2)


def _flash3(inputs: AttentionInputs, block_size: int) -> Callable[[], Tensor]:
    attend = import_module("fa3_fwd_interface").flash_attn_func
    tensors = _as_blhd(inputs)
    return lambda: _first(attend(*tensors))


def _flash4(inputs: AttentionInputs, block_size: int) -> Callable[[], Tensor]:
    attend = import_module(INTERFACE)._flash_attn_fwd
    tensors = _as_blhd(inputs)
    return lambda: _first(attend(*tensors))


def _flash4_sparse(inputs: AttentionInputs, block_size: int) -> Callable[[], Tensor]:
    # The tensors lie as (B, L, H, D), which the backend reads in place.
    query, key, value = (x.transpose(1, 2) for x in _as_blhd(inputs))
    lists = flash4_lists(inputs.block_index, inputs.block_count, len_k=key.shape[2], block_size=block_size)
    scale = query.shape[3] ** -0.5
    return lambda: attend_flash4(query, key, value, lists, scale=scale, return_lse=False)[0]


def _flex(inputs: AttentionInputs, block_size: int) -> Callable[[], Tensor]:
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    count, index = _full_width(inputs, block_size)
    mask = BlockMask.from_kv_blocks(
        torch.zeros_like(count), torch.zeros_like(index), count, index,
        BLOCK_SIZE=block_size, seq_lengths=(inputs.query.shape[2], inputs.key.shape[2]),
    )  # fmt: skip
    attend = torch.compile(flex_attention, dynamic=False)

    def call() -> Tensor:
        out = attend(inputs.query, inputs.key, inputs.value, block_mask=mask)
        assert isinstance(out, Tensor)
        return out

    return call


def _fastvideo(inputs: AttentionInputs, block_size: int) -> Callable[[], Tensor]:
    attend = import_module("fastvideo_kernel").block_sparse_attn
    parts = block_size // 64  # its blocks have 64 tokens
    mask = kept_matrix(inputs, block_size).repeat_interleave(parts, 2).repeat_interleave(parts, 3)
    sizes = torch.full((mask.shape[3],), 64, dtype=torch.int32, device=mask.device)
    tensors = [x.contiguous() for x in (inputs.query, inputs.key, inputs.value)]

    def call() -> Tensor:
        out: Tensor = attend(*tensors, mask, sizes)[0]
        return out

    return call


def _full_width(inputs: AttentionInputs, block_size: int) -> tuple[Tensor, Tensor]:
    """Counts (B, H, Nq) and lists (B, H, Nq, Nk) with room for all blocks, int32; the rest of a list is 0."""
    index = inputs.block_index
    blocks = -(-inputs.key.shape[2] // block_size)
    wide = index.new_zeros((*index.shape[:3], blocks))
    wide[..., : index.shape[3]] = index
    count = torch.full_like(index[..., 0], index.shape[3]) if inputs.block_count is None else inputs.block_count
    return count.contiguous(), wide


def kept_matrix(inputs: AttentionInputs, block_size: int) -> Tensor:
    """Which blocks of keys each block of queries keeps, (B, H, Nq, Nk) bool; all lists are of full length."""
    blocks = -(-inputs.key.shape[2] // block_size)
    shape = (*inputs.block_index.shape[:3], blocks)
    kept = torch.zeros(shape, dtype=torch.bool, device=inputs.block_index.device)
    return kept.scatter_(-1, inputs.block_index.long(), True)


_ANY = (torch.bfloat16, torch.float16, torch.float32)

PEERS = (
    Peer("dense, SDPA", False, partial(_sdpa, None), cpu=True, dtypes=_ANY),
    Peer("dense, cuDNN", False, partial(_sdpa, SDPBackend.CUDNN_ATTENTION)),
    Peer("dense, FlashAttention-2", False, partial(_sdpa, SDPBackend.FLASH_ATTENTION)),
    Peer("dense, memory-efficient", False, partial(_sdpa, SDPBackend.EFFICIENT_ATTENTION), dtypes=_ANY),
    Peer("dense, math", False, partial(_sdpa, SDPBackend.MATH), cpu=True, dtypes=_ANY, writes_logits=True),
    Peer("dense, FlashAttention-3", False, _flash3, "fa3_fwd_interface", "fa3-fwd", dtypes=(torch.bfloat16,)),
    Peer("dense, FlashAttention-4", False, _flash4, INTERFACE, PACKAGE),
    Peer("FlexAttention", True, _flex, dtypes=_ANY),
    Peer("FlashAttention-4", True, _flash4_sparse, INTERFACE, PACKAGE, whole_blocks=True),
    Peer("FastVideo", True, _fastvideo, "fastvideo_kernel", "fastvideo-kernel", whole_blocks=True),
)  # fmt: skip

# What speed-ups are over, where they run.
BASELINES = {"cuda": ("dense, cuDNN", "dense, FlashAttention-2", "dense, FlashAttention-3"), "cpu": ("dense, SDPA",)}


def is_baseline(peer: Peer, config: BenchConfig) -> bool:
    return peer.name in BASELINES["cuda" if config.on_gpu else "cpu"]


def peers_here(config: BenchConfig, *, sparse: bool | None = None) -> list[Peer]:
    """The peers that can run: baselines always, the others if the configuration wants them, baselines first.

    Args:
        config: of the run.
        sparse: `False` for those that attend to everything, `True` for those with lists, `None` for both.
    """
    found = [peer for peer in PEERS if sparse in (None, peer.sparse) and peer.obstacle(config) is None]
    # PyTorch's own choice is one of the kernels that a GPU measures by name.
    found = [peer for peer in found if not (config.on_gpu and peer.name == "dense, SDPA")]
    found = [peer for peer in found if config.peers or is_baseline(peer, config)]
    return sorted(found, key=lambda peer: not is_baseline(peer, config))


def absent_peers(config: BenchConfig, *, sparse: bool | None = None) -> dict[str, str]:
    """The peers that cannot run here, with the reason."""
    if not config.peers:
        return {"peers": "left out by --no-peers"}
    found = {peer.name: peer.obstacle(config) for peer in PEERS if sparse in (None, peer.sparse)}
    return {name: reason for name, reason in found.items() if reason is not None}
