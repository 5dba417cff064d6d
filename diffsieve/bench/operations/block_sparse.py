"""The attention kernel alone: random blocks kept, against dense attention and other block-sparse kernels."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...errors import BackendUnavailableError
from ...kernels import testing
from ...kernels.block_sparse import BACKENDS, block_sparse_attention, choose_backend
from ...kernels.testing import AttentionCase, AttentionInputs
from ..config import BenchConfig, percent, unique
from ..peers import Peer, absent_peers, is_baseline, peers_here
from ..problem import Operation, Prepared, Problem, Variant


@dataclass(frozen=True)
class Size:
    """Tokens, heads, and the memory order of the tensors, "contiguous" or "blhd" (see `testing.LAYOUTS`)."""

    tokens: int
    heads: int = 12
    layout: str = "contiguous"


# Whole blocks of 128: 8K to 256K; 75,648 is 720p of Wan at 81 frames, 75,600 tokens, rounded up.
GPU_SIZES = tuple(Size(tokens) for tokens in (8_192, 16_384, 32_768, 75_648, 131_072, 262_144))
CPU_SIZES = (Size(2_048, 4), Size(4_096, 4), Size(4_032, 6), Size(4_032, 6, "blhd"), Size(9_216, 6))


@dataclass
class Inputs:
    """Tensors of one length; `at` gives them lists for a sparsity."""

    case: AttentionCase
    tensors: AttentionInputs

    def at(self, sparsity: float) -> AttentionInputs:
        """The same tensors with random lists, the same ones for every kernel."""
        case = self.case
        generator = torch.Generator(self.tensors.query.device).manual_seed(testing.SEED)
        blocks = -(-case.len_q // case.block_size), -(-case.len_k // case.block_size)
        index, count = testing.random_blocks(
            case.batch, case.heads, *blocks, density=1.0 - sparsity, variable=False, generator=generator
        )
        return replace(self.tensors, block_index=index, block_count=count)


def settings(config: BenchConfig) -> dict[str, Any]:
    return {"dim": _dim(config), "block_size": config.block_size}


def problems(config: BenchConfig) -> list[Problem]:
    sizes = GPU_SIZES if config.on_gpu else CPU_SIZES
    if config.tokens is not None:
        sizes = tuple(Size(tokens, sizes[0].heads) for tokens in config.tokens)
    return [_problem(config, replace(size, heads=config.heads or size.heads)) for size in sizes]


def absent(config: BenchConfig) -> dict[str, str]:
    return absent_peers(config) | {
        name: reason for name, reason in _backends(config).items() if reason is not None and name != "reference"
    }


def _dim(config: BenchConfig) -> int:
    return config.dim or (128 if config.on_gpu else 64)


def _backends(config: BenchConfig) -> dict[str, str | None]:
    """Our backends by name, with the reason where one is not measured."""
    probe = torch.zeros((1, 1, config.block_size, _dim(config)), dtype=config.torch_dtype, device=config.device)
    found: dict[str, str | None] = {}
    for name in BACKENDS:
        if name == "auto":
            continue
        found[name] = None
        if name == "reference" or (name == "torch" and config.on_gpu):
            found[name] = "not made for speed here"
        elif name != "torch" and not config.on_gpu:
            found[name] = "needs a CUDA GPU"  # the Triton interpreter says nothing about speed
        elif name == "flash4":
            found[name] = "measured among the kernels of others, as FlashAttention-4"
        else:
            try:
                choose_backend(probe, probe, block_size=config.block_size, backend=name)
            except BackendUnavailableError as error:
                found[name] = str(error)
    return found


def _problem(config: BenchConfig, size: Size) -> Problem:
    tokens, heads = size.tokens, size.heads
    case = AttentionCase(
        heads=heads, kv_heads=heads, len_q=tokens, len_k=tokens, dim=_dim(config), block_size=config.block_size,
        layout=size.layout,
    )  # fmt: skip

    def build() -> Inputs:
        # The lists that come with the tensors are for the smallest of densities: `at` makes those that are used.
        least = replace(case, density=1e-9)
        return Inputs(case, testing.make_inputs(least, dtype=config.torch_dtype, device=str(config.device)))

    variants, missing = [], {}
    for peer in peers_here(config):
        reason = peer.obstacle_at(config, tokens, heads)
        if reason is not None:
            missing[peer.name] = reason
            continue
        for sparsity in config.sparsities if peer.sparse else (0.0,):
            variants.append(_of_peer(config, peer, sparsity))
    for backend, reason in _backends(config).items():
        if reason is None:
            variants += [_ours(config, backend, sparsity) for sparsity in unique((0.0, *config.sparsities))]
    name = f"{tokens:,} tokens, {heads} heads" + (", stored as (B, L, H, D)" if size.layout == "blhd" else "")
    return Problem(name, build, tuple(variants), asdict(size), missing)


def _of_peer(config: BenchConfig, peer: Peer, sparsity: float) -> Variant:
    def prepare(inputs: Inputs) -> Prepared:
        chosen = inputs.at(sparsity)
        return _prepared(chosen, config.block_size, peer.make(chosen, config.block_size), poisoned=False)

    name = f"{peer.name}, {percent(sparsity)} skipped" if peer.sparse else peer.name
    details = {"method": peer.name, "sparsity": sparsity if peer.sparse else None}
    return Variant(name, prepare, details, baseline=is_baseline(peer, config), peer=True)


def _ours(config: BenchConfig, backend: str, sparsity: float) -> Variant:
    def prepare(inputs: Inputs) -> Prepared:
        chosen = inputs.at(sparsity)
        call = partial(
            block_sparse_attention, *chosen.tensors(), block_size=config.block_size, backend=backend
        )  # fmt: skip
        return _prepared(chosen, config.block_size, call)

    return Variant(f"{backend}, {percent(sparsity)} skipped", prepare, {"method": backend, "sparsity": sparsity})


def _prepared(inputs: AttentionInputs, block_size: int, call: Callable[[], Any], *, poisoned: bool = True) -> Prepared:
    flops = 4.0 * kept_pairs(inputs, block_size) * inputs.query.shape[-1]
    return Prepared(call, partial(check_output, inputs, block_size, call, poisoned=poisoned), flops)


def check_output(
    inputs: AttentionInputs, block_size: int, call: Callable[[], Any], *, poisoned: bool
) -> dict[str, float]:
    """Error of a call against fp64 on sampled query blocks, and its bound.

    Args:
        inputs: with lists of all blocks for a dense call.
        block_size: tokens per block.
        call: returns (B, H, L, D).
        poisoned: run it in memory that is full of NaN before. For ours: the switch asks PyTorch for deterministic
            algorithms, which may turn its own kernels away.
    """
    with testing.poisoned_memory() if poisoned else nullcontext():
        out = call()
    assert isinstance(out, Tensor)
    return testing.sampled_errors(inputs, out, block_size)


def kept_pairs(inputs: AttentionInputs, block_size: int) -> int:
    """(query, key) token pairs that the lists keep, over batch and heads."""
    index, count = inputs.block_index, inputs.block_count
    listed = torch.ones_like(index, dtype=torch.bool)
    if count is not None:
        listed = torch.arange(index.shape[-1], device=index.device) < count[..., None]
    keys = (inputs.key.shape[2] - index.long() * block_size).clamp(max=block_size)
    starts = torch.arange(index.shape[2], device=index.device) * block_size
    rows = (inputs.query.shape[2] - starts).clamp(max=block_size)
    return int((keys.where(listed, 0).sum(-1) * rows).sum())


OPERATION = Operation(
    "block-sparse", "the attention kernel alone, random blocks kept", settings, problems, absent
)  # fmt: skip
