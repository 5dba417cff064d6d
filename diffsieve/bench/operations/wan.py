"""One forward of the Wan 2.1 transformers at real sizes with random weights, dense and with BA-Att, compiled."""

from __future__ import annotations

import gc
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from ...errors import DiffsieveError, UserInputError
from ...kernels import testing
from ...kernels.ba_att import CANDIDATE_ORDERS
from ...processors import BAAttConfig, apply_sparse_attention, sparsity_summary
from ..config import BenchConfig, Grid, percent
from ..dense_kernel import check_kernel, dense_kernel
from ..problem import Operation, Prepared, Problem, Variant

# Sizes of WanTransformer3DModel; what is not said here is the default of diffusers, that of Wan 2.1.
MODELS: dict[str, dict[str, Any]] = {
    "wan2.1-1.3b": {"num_attention_heads": 12, "ffn_dim": 8_960, "num_layers": 30},
    "wan2.1-14b": {"num_attention_heads": 40, "ffn_dim": 13_824, "num_layers": 40},
}
_MINI = "mini-wan"
# 480 x 832 and 720 x 1280 at 81 frames.
GPU_GRIDS: tuple[Grid, ...] = ((21, 30, 52), (21, 45, 80))
CPU_GRIDS: tuple[Grid, ...] = ((7, 24, 24),)
_TEXT_TOKENS = 512
_DENSE = {"dense, cuDNN": SDPBackend.CUDNN_ATTENTION, "dense, FlashAttention-2": SDPBackend.FLASH_ATTENTION}
_SMALL_GRID: Grid = (3, 8, 12)


def settings(config: BenchConfig) -> dict[str, Any]:
    return {
        "block_size": config.block_size, "backend": config.backend, "compiled": config.compiled,
        "text_tokens": _TEXT_TOKENS, "preset": "default, a fixed order for each head, no dense steps",
    }  # fmt: skip


def sizes(model: str) -> dict[str, Any]:
    """Arguments of `WanTransformer3DModel` for a name of `MODELS` or "mini-wan".

    Raises:
        UserInputError: another name.
    """
    if model == _MINI:
        path = Path(__file__).parents[2] / "pipelines" / "mini_wan" / "transformer" / "config.json"
        found = json.loads(path.read_text(encoding="utf-8"))
        return {name: value for name, value in found.items() if not name.startswith("_")}
    if model not in MODELS:
        raise UserInputError(f"model must be one of {', '.join((*MODELS, _MINI))}, got {model!r}")
    return MODELS[model]


def problems(config: BenchConfig) -> list[Problem]:
    models = config.models or (tuple(MODELS) if config.on_gpu else (_MINI,))
    grids = config.grids or (GPU_GRIDS if config.on_gpu else CPU_GRIDS)
    return [_problem(config, model, grid) for model in models for grid in grids]


def _problem(config: BenchConfig, model: str, grid: Grid) -> Problem:
    sizes(model)
    kernels = _DENSE if config.on_gpu else {"dense, SDPA": None}
    dense = [
        Variant(
            name, partial(_prepare_dense, config, model, grid, kernel), {"method": name, "sparsity": None},
            baseline=name != "dense, FlashAttention-2", peer=True,
        )
        for name, kernel in kernels.items()
    ]  # fmt: skip
    sparse = [
        Variant(
            f"BA-Att, {percent(sparsity)} skipped", partial(_prepare_sparse, config, model, grid, sparsity),
            {"method": "BA-Att", "sparsity": sparsity},
        )
        for sparsity in config.sparsities
    ]  # fmt: skip
    name = f"{model}, {math.prod(grid):,} tokens"
    details = {"model": model, "tokens": math.prod(grid), "grid_thw": grid}
    return Problem(name, lambda: None, (*dense[:1], *sparse, *dense[1:]), details)


def build_model(model: str, config: BenchConfig, dtype: torch.dtype, layers: int | None = None) -> Any:
    """A transformer with random weights, made on the device; what diffusers keeps in fp32 is fp32."""
    from diffusers import WanTransformer3DModel

    wanted = sizes(model) | ({} if layers is None else {"num_layers": layers})
    before = torch.get_default_dtype()
    torch.manual_seed(testing.SEED)
    try:
        torch.set_default_dtype(dtype)
        with torch.device(str(config.device)):
            made: Any = WanTransformer3DModel(**wanted)
    finally:
        torch.set_default_dtype(before)
    if dtype != torch.float64:
        for name, parameter in made.named_parameters():
            if any(part in WanTransformer3DModel._keep_in_fp32_modules for part in name.split(".")):
                parameter.data = parameter.data.float()
    return made.eval().requires_grad_(False)


def make_inputs(model: Any, grid: Grid, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Random latents, text and a timestep for a grid of tokens."""
    generator = torch.Generator(device).manual_seed(testing.SEED)
    shape = [size * patch for size, patch in zip(grid, model.config.patch_size, strict=True)]
    channels, text = model.config.in_channels, model.config.text_dim
    latents = torch.randn(1, channels, *shape, generator=generator, device=device)
    prompt = torch.randn(1, _TEXT_TOKENS, text, generator=generator, device=device)
    return {
        "hidden_states": latents.to(dtype), "encoder_hidden_states": prompt.to(dtype),
        "timestep": torch.full((1,), 500, device=device), "return_dict": False,
    }  # fmt: skip


def sparse_config(config: BenchConfig, model: Any, sparsity: float, **options: Any) -> BAAttConfig:
    """The preset with fixed orders, a different one for each head in turn, so that no step has to calibrate."""
    count = len(model.blocks)
    heads = int(model.config.num_attention_heads)
    names = [CANDIDATE_ORDERS[head % len(CANDIDATE_ORDERS)] for head in range(heads)]
    return BAAttConfig(
        sparsity=sparsity, warmup_steps=0, orders={str(layer): names for layer in range(count)}, min_tokens=0,
        backend=config.backend, **{"block_size": config.block_size} | options,
    )  # fmt: skip


class _Forward:
    """A model with its inputs; a call is one forward."""

    def __init__(self, config: BenchConfig, name: str, grid: Grid, kernel: SDPBackend | None = None) -> None:
        self.model = build_model(name, config, config.torch_dtype)
        self.inputs = make_inputs(self.model, grid, config.torch_dtype, str(config.device))
        self.kernel = kernel
        self.tokens = math.prod(grid)

    def compile(self, config: BenchConfig) -> None:
        if config.compiled:
            self.model.compile_repeated_blocks(dynamic=False, fullgraph=True)

    @torch.no_grad()
    def __call__(self) -> torch.Tensor:
        with dense_kernel(self.kernel):
            out: torch.Tensor = self.model(**self.inputs)[0]
        return out


def _prepare_dense(config: BenchConfig, model: str, grid: Grid, kernel: SDPBackend | None, _: None) -> Prepared:
    _drop_the_last()
    forward = _Forward(config, model, grid, kernel)
    forward.compile(config)
    return Prepared(forward, partial(_check_dense, forward), graph=False)


def _prepare_sparse(config: BenchConfig, model: str, grid: Grid, sparsity: float, _: None) -> Prepared:
    _drop_the_last()
    # Cross-attention and the dense layer run as they do in the fastest dense forward.
    forward = _Forward(config, model, grid, SDPBackend.CUDNN_ATTENTION if config.on_gpu else None)
    apply_sparse_attention(forward.model, sparse_config(config, forward.model, sparsity))
    forward.compile(config)
    return Prepared(forward, partial(_check_sparse, forward, sparsity, config.block_size), graph=False)


def _drop_the_last() -> None:
    """A compiled model refers to itself: the one of the row before would still be there."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _check_finite(forward: _Forward) -> dict[str, Any]:
    """The gate compares the transformer with fp64; here the output has to be finite."""
    return {"error": 0.0, "bound": 0.0, "ok": bool(forward().isfinite().all())}


def _check_dense(forward: _Forward) -> dict[str, Any]:
    found = _check_finite(forward)
    if forward.kernel is not None:
        check_kernel(forward, forward.kernel)
    return found


def _check_sparse(forward: _Forward, sparsity: float, block_size: int) -> dict[str, Any]:
    """Finite, and as sparse as asked: every layer but the dense one of the preset at the density of the settings.

    The error is the distance of the measured from the wanted density; lists are whole blocks, which sets the bound.
    """
    found = _check_finite(forward)
    summary: Any = sparsity_summary(forward.model)
    sparse = [density for density in summary.layers.values() if density < 1.0]
    if not sparse and sparsity > 0.0:
        raise DiffsieveError(f"no layer ran sparse: {summary.dense_reasons}")
    away = max((abs(density - (1.0 - sparsity)) for density in sparse), default=0.0)
    blocks = math.ceil(forward.tokens / block_size)
    return found | {
        "error": away, "bound": 0.5 / blocks + 1e-9,
        "density": summary.density_overall, "dense_calls": summary.dense_reasons, "backend": summary.backend,
    }  # fmt: skip


def gate(config: BenchConfig) -> dict[str, Any]:
    """Two layers of each transformer on a small clip, all blocks kept, against the dense one in fp64.

    The bound is twice the error of the dense one in the dtype of the run, plus rounding.
    """
    errors, bounds = {}, {}
    for name in dict.fromkeys(config.models or (tuple(MODELS) if config.on_gpu else (_MINI,))):
        exact_model = build_model(name, config, torch.float64, layers=2)
        low_model = build_model(name, config, config.torch_dtype, layers=2)
        low_model.load_state_dict(exact_model.state_dict())
        exact_model.load_state_dict(low_model.state_dict())  # the same, rounded
        inputs = make_inputs(low_model, _SMALL_GRID, config.torch_dtype, str(config.device))
        with torch.no_grad():
            exact = exact_model(**_as_double(inputs))[0]
            dense = low_model(**inputs)[0]
            options = sparse_config(config, low_model, 0.0, block_size=16, dense_layers=())
            apply_sparse_attention(low_model, options)
            ours = low_model(**inputs)[0]
        errors[name] = testing.error_ratio(ours, exact)
        bounds[name] = testing.error_bound(dense, exact)
    return {"error": errors, "bound": bounds}


def _as_double(inputs: dict[str, Any]) -> dict[str, Any]:
    floating = {name: x for name, x in inputs.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
    return inputs | {name: x.double() for name, x in floating.items()}


OPERATION = Operation(
    "wan", "a forward of the Wan 2.1 transformers, random weights, dense and BA-Att", settings, problems, gate=gate
)  # fmt: skip
