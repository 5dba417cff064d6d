"""The whole call of BA-Att as a processor makes it, against dense attention, with the share of each of its stages."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ...kernels import testing
from ...kernels.ba_att import CANDIDATE_ORDERS, BAAttInfo, ba_attention, block_statistics, calibrate_orders
from ...kernels.ba_att.reference import ba_attention_reference
from ...kernels.block_sparse import block_sparse_attention
from ...kernels.testing import AttentionInputs
from ...processors import BAAttConfig
from ...processors.config import PRESETS
from ..config import BenchConfig, Grid, percent
from ..peers import Peer, absent_peers, is_baseline, peers_here, sdpa
from ..problem import Operation, Prepared, Problem, Variant
from ..timer import Timer
from .block_sparse import check_output

# Clips of 8K to 256K tokens; 21 x 30 x 52 and 21 x 45 x 80 are 480p and 720p of Wan at 81 frames.
GPU_GRIDS: tuple[Grid, ...] = (
    (8, 32, 32), (16, 32, 32), (11, 40, 40), (21, 30, 52), (21, 45, 80), (32, 64, 64), (64, 64, 64),
)  # fmt: skip
CPU_GRIDS: tuple[Grid, ...] = ((7, 24, 24),)

_OF_PRESET = ("center_keys", "log_count", "descending", "score", "compensate")
# What is timed: the preset, whose heads have orders of their own, and what parts of it cost.
_FORMS: dict[str, dict[str, Any]] = {
    "default": {},
    "raster order": {"orders": "raster"},
    "raster order, no compensation": {"orders": "raster", "compensate": "none", "score": "moments"},
}
# Blocks of the small check.
_SMALL_GRID: Grid = (3, 8, 12)
_SMALL_BLOCK = 16
# Share of rows whose lists must be those of fp64: sums in another order may swap two blocks of nearly equal score.
_SAME_LISTS = 0.9


def settings(config: BenchConfig) -> dict[str, Any]:
    heads, dim = _heads_and_dim(config)
    score = PRESETS["default"]["score"]
    return {"heads": heads, "dim": dim, "block_size": config.block_size, "score": score, "backend": config.backend}


def problems(config: BenchConfig) -> list[Problem]:
    return [_problem(config, grid) for grid in config.grids or (GPU_GRIDS if config.on_gpu else CPU_GRIDS)]


def _heads_and_dim(config: BenchConfig) -> tuple[int, int]:
    return (config.heads or 12, config.dim or 128) if config.on_gpu else (config.heads or 6, config.dim or 64)


def _problem(config: BenchConfig, grid: Grid) -> Problem:
    tokens = math.prod(grid)
    heads, _ = _heads_and_dim(config)
    variants, missing = [], {}
    for peer in peers_here(config, sparse=False):
        reason = peer.obstacle_at(config, tokens, heads)
        if reason is None:
            variants.append(_dense(config, peer))
        else:
            missing[peer.name] = reason
    for form in _FORMS:
        variants += [_ours(config, grid, form, sparsity) for sparsity in config.sparsities]
    name = f"{tokens:,} tokens ({' x '.join(map(str, grid))})"
    return Problem(name, partial(_inputs, config, grid), tuple(variants), {"tokens": tokens, "grid_thw": grid}, missing)


def _inputs(config: BenchConfig, grid: Grid) -> AttentionInputs:
    """Random tensors in the memory order of a diffusers processor, with lists of all blocks for the dense kernels."""
    heads, dim = _heads_and_dim(config)
    case = testing.AttentionCase(
        heads=heads, kv_heads=heads, len_q=math.prod(grid), len_k=math.prod(grid), dim=dim,
        block_size=config.block_size, density=1.0, layout="blhd",
    )  # fmt: skip
    return testing.make_inputs(case, dtype=config.torch_dtype, device=str(config.device))


def _dense(config: BenchConfig, peer: Peer) -> Variant:
    def prepare(inputs: AttentionInputs) -> Prepared:
        call = peer.make(inputs, config.block_size)
        return Prepared(call, partial(check_output, inputs, config.block_size, call, poisoned=False))

    details = {"method": peer.name, "sparsity": None}
    return Variant(peer.name, prepare, details, baseline=is_baseline(peer, config), peer=True)


def _ours(config: BenchConfig, grid: Grid, form: str, sparsity: float) -> Variant:
    def prepare(inputs: AttentionInputs) -> Prepared:
        options = _options(config, grid, form, sparsity)
        tensors = inputs.query, inputs.key, inputs.value
        call = partial(ba_attention, *tensors, **options)
        extra = partial(_extra, config, tensors, options) if form == "default" else None
        return Prepared(call, partial(check_call, call, options), extra=extra)

    return Variant(
        f"{form}, {percent(sparsity)} skipped", prepare, {"method": form, "sparsity": sparsity}
    )  # fmt: skip


def _options(config: BenchConfig, grid: Grid, form: str, sparsity: float) -> dict[str, Any]:
    heads, _ = _heads_and_dim(config)
    options: dict[str, Any] = {name: PRESETS["default"][name] for name in _OF_PRESET}
    options |= {
        "grid_thw": grid,
        "orders": torch.arange(heads) % len(CANDIDATE_ORDERS),  # on the CPU, as the processor keeps them
        "density": round(1.0 - sparsity, 12),
        "beta": BAAttConfig(sparsity=sparsity).second_order_weight,
        "block_size": config.block_size,
        "backend": config.backend,
    }
    return options | _FORMS[form]


def check_call(call: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Error of the output against the definition in fp64 with the orders and lists of the call, on sampled blocks.

    The bound is twice the error of PyTorch's attention over the same keys, skipped blocks as copies of their means, in
    the dtype of the inputs, plus rounding. Two calls must give the same bits.
    """
    query, key, value = call.args  # type: ignore[attr-defined]
    with testing.poisoned_memory():
        out, info = call(return_info=True)
        again = call()
    checked: dict[str, Any] = _sampled_errors(query, key, value, out, info, options)
    return checked | {"ok": torch.equal(out, again), "backend": info.backend}


def _sampled_errors(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, info: BAAttInfo, options: dict[str, Any], samples: int = 12
) -> dict[str, float]:
    block_size, heads, length = options["block_size"], query.shape[1], query.shape[2]
    if not bool(out.isfinite().all()):
        return {"error": float("inf"), "bound": 0.0}
    generator = torch.Generator().manual_seed(testing.SEED)
    blocks = torch.randint(0, info.block_index.shape[2], (samples,), generator=generator)
    blocks[-1] = info.block_index.shape[2] - 1
    parts: dict[str, list[Tensor]] = {"exact": [], "dense": [], "ours": []}
    for sample, block in enumerate(blocks.tolist()):
        head = sample % heads
        rows = _order(info.query_order, head, length, query.device)[block * block_size : (block + 1) * block_size]
        keys, values = (_standing_in(x[0, head], info, head, block, options) for x in (key, value))
        tokens = query[0, head, rows]
        parts["exact"].append((tokens.double() @ keys.T * query.shape[-1] ** -0.5).softmax(-1) @ values)
        q, k, v = (x.to(query.dtype)[None, None] for x in (tokens, keys, values))
        parts["dense"].append(sdpa(None, q, k, v)[0, 0])
        parts["ours"].append(out[0, head, rows])
    exact, dense, ours = (torch.cat(found) for found in parts.values())
    return {"error": testing.error_ratio(ours, exact), "bound": testing.error_bound(dense, exact)}


def _order(order: Tensor | None, head: int, length: int, device: torch.device) -> Tensor:
    if order is None:
        return torch.arange(length, device=device)
    return order if order.ndim == 1 else order[0, head]


def _standing_in(tokens: Tensor, info: BAAttInfo, head: int, block: int, options: dict[str, Any]) -> Tensor:
    """Keys or values of one head in fp64 and in order: kept blocks as they are, skipped ones replaced or left out."""
    block_size, length = options["block_size"], tokens.shape[0]
    ordered = tokens[_order(info.key_order, head, length, tokens.device)].double()
    own = torch.arange(length, device=tokens.device) // block_size
    kept = torch.zeros(-(-length // block_size), dtype=torch.bool, device=tokens.device)
    kept[info.block_index[0, head, block].long()] = True
    if options["compensate"] == "none":
        return ordered[kept[own]]
    means = block_statistics(ordered[None, None], block_size).mean[0, 0]
    return torch.where(kept[own][:, None], ordered, means[own])


def gate(config: BenchConfig) -> dict[str, Any]:
    """The whole call against `ba_attention_reference` in fp64: its lists, and its output where the lists are the same.

    A clip of few tokens on the device of the run, in its dtype, every form once.
    """
    generator = torch.Generator().manual_seed(testing.SEED)
    heads, dim = len(CANDIDATE_ORDERS), min(64, _heads_and_dim(config)[1])
    shape = (1, math.prod(_SMALL_GRID), heads, dim)
    tensors = [torch.randn(shape, generator=generator).to(config.torch_dtype).transpose(1, 2) for _ in range(3)]
    errors, bounds, same_lists = {}, {}, {}
    for form in _FORMS:
        options = _options(config, _SMALL_GRID, form, 0.5) | {"block_size": _SMALL_BLOCK}
        if isinstance(options["orders"], Tensor):
            options["orders"] = torch.arange(heads)
        query, key, value = (x.to(config.device) for x in tensors)
        out, info = ba_attention(query, key, value, return_info=True, **options)
        names = options["orders"] if isinstance(options["orders"], str) else list(CANDIDATE_ORDERS)
        exact_options = {name: value for name, value in options.items() if name not in ("backend", "orders")}
        exact, kept = ba_attention_reference(*(x.double() for x in tensors), orders=names, **exact_options)
        same = (info.block_index[0].cpu() == torch.tensor(kept[0])).all(-1)  # (H, Nq)
        rows = torch.zeros(shape[2], shape[1], dtype=torch.bool)
        for head in range(heads):
            order = _order(info.query_order, head, shape[1], out.device).cpu()
            rows[head, order] = same[head].repeat_interleave(_SMALL_BLOCK)[: shape[1]]
        same_lists[form] = same.double().mean().item()
        errors[form] = testing.error_ratio(out[0].cpu()[rows], exact[0][rows])
        bounds[form] = _sampled_errors(query, key, value, out, info, options)["bound"]
    return {
        "error": errors, "bound": bounds, "same_lists": same_lists, "ok": min(same_lists.values()) >= _SAME_LISTS,
    }  # fmt: skip


def _extra(config: BenchConfig, tensors: tuple[Tensor, Tensor, Tensor], options: dict[str, Any]) -> dict[str, Any]:
    """Stages of the call on the GPU alone, the attention kernel by itself, and what calibrating the orders costs."""
    timer = Timer(config)
    found = timer.stages(lambda stage: ba_attention(*tensors, timer=stage, **options))
    _, info = ba_attention(*tensors, return_info=True, **options)
    orders = (info.query_order, info.key_order, info.key_order)
    query, key, value = (_gather(x, order) for x, order in zip(tensors, orders, strict=True))
    kernel = partial(
        block_sparse_attention, query, key, value, info.block_index, info.block_count, block_size=config.block_size,
        backend=config.backend, return_lse=options["compensate"] != "none",
    )  # fmt: skip

    def alone(stage: Callable[[str], Any]) -> None:
        with stage("attention kernel"):
            kernel()

    # As the stages are timed: an eager time would hold the host's, where sequences are short.
    attention = timer.stages(alone)["attention kernel"]
    rest = max(0.0, found["attention"] - attention)
    stages = {"order, statistics, choice of blocks": found["selection"], "attention kernel": attention}
    if "selection again" in found:
        stages |= {"compensation": rest, "order undone": found["selection again"]}
    else:  # one kernel does both
        stages["compensation, order undone"] = rest
    options = {name: x for name, x in options.items() if name != "orders"}
    # As in the step that calibrates, which is dense.
    calibrate = partial(calibrate_orders, *tensors, dense=scaled_dot_product_attention(*tensors), **options)
    return {"stages_ms": stages, "calibration_ms": timer.eager(calibrate)[0]["ms"]}


def _gather(x: Tensor, order: Tensor | None) -> Tensor:
    if order is None:
        return x
    if order.ndim == 1:
        return x[:, :, order]
    return x.gather(2, order[..., None].expand(-1, -1, -1, x.shape[3]))


OPERATION = Operation(
    "ba-att", "the whole BA-Att call with the share of its stages", settings, problems,
    lambda config: absent_peers(config, sparse=False), gate,
)  # fmt: skip
