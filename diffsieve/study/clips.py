"""The fidelity study: every variant from the noise of the dense clip, measured against it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from ..compare import folder as folders
from ..compare.claim import claim_settings, replace_settings
from ..compare.clip import Clip, generate_clip
from ..compare.config import DENSE, RunConfig
from ..compare.floor import other_kernel
from ..compare.lines import LineWriter, line_writer, read_lines
from ..compare.pair_metrics import load_alex, measure_clips
from ..compare.prepare import prepare, resolve_place, transformer_of
from ..compare.recorded import spread
from ..compare.report import environment
from ..compare.shards import Deadline, Shard
from ..compare.ticker import Ticker
from ..eval import LoadedLpips
from ..pipelines.loading import weights_digest
from ..processors import BAAttConfig
from ..processors.warmup import dense_steps
from .first_steps import FirstSteps
from .hindsight import BestOrders, errors_of_orders, mass_lost_by_orders, watching
from .prompts import study_prompts
from .report import ASKED_SCHEMA, CLIPS, CLIPS_ASKED, CLIPS_SCHEMA, CLIPS_SETTINGS, write_report
from .variants import FLOOR, MEANING_OF_DEFAULT, VARIANTS, choose, config_of

_WATCHED_STEPS = 3

Task = tuple[str, float | None]
"""Variant and sparsity; none for the noise floor."""


@dataclass(frozen=True, kw_only=True)
class StudyConfig(RunConfig):
    """What to study; see `RunConfig` for the clips.

    Args:
        suites: sets of variants, names of `SUITES`.
        variants: further variants, names of `VARIANTS`.
        sparsities: shares of the blocks skipped in sparse steps; empty: those of the suites.
        prompts: held-out prompts of mini-wan to take where `prompt` is empty.
        floor: whether to measure the noise floor.
        lpips_weights: file of LPIPS's AlexNet; `None` looks in the usual places.
    """

    _without_method: ClassVar[tuple[str, ...]] = (DENSE,)
    _dense_takes: ClassVar[tuple[str, ...]] = ("warmup", "block_size", "backend")

    method: str = DENSE
    warmup: int | float | None = 0.2
    block_size: int | None = 128
    seed: tuple[int, ...] = (0, 1)
    suites: tuple[str, ...] = ("fidelity",)
    variants: tuple[str, ...] = ()
    sparsities: tuple[float, ...] = ()
    prompts: int = 24
    floor: bool = True
    lpips_weights: Path | None = None
    out: Path = Path("outputs/study")

    def __post_init__(self) -> None:
        super().__post_init__()
        BAAttConfig(block_size=self.block_size)  # type: ignore[arg-type]  # which refuses what no variant takes


@dataclass(frozen=True)
class _Bench:
    """What all clips of a process share."""

    pipe: Any
    config: StudyConfig
    lpips: Mapping[str, LoadedLpips | str]
    num_layers: int
    num_tokens: int
    ticker: Ticker


def study_clips(
    config: StudyConfig,
    *,
    pipe: Any | None = None,
    shard: Shard | None = None,
    deadline: Deadline | None = None,
    progress: Callable[[str], None] | None = None,
    command: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Generate the dense clip of every prompt and seed and all variants from its noise, and measure them.

    One line for each clip goes to `clips-<shard>.jsonl` in `config.out` as soon as it is measured. Lines that are there
    are not made again, so that a run can be stopped at any time, go on later, and get more prompts, seeds and variants.
    Clips are made one by one: several prompts in one call would share the calibration of the token orders.

    Args:
        config: see `StudyConfig`.
        pipe: a loaded text-to-video pipeline; default: load `config.model`.
        shard: the share of this process, in prompts times seeds.
        deadline: ends the run between two clips.
        progress: told a line for each clip.
        command: the words of the command line, for the report.

    Returns:
        `{"out", "done", "missing", "other_shards_missing"}` in clips. When all are there, the report is written.

    Raises:
        UserInputError: an argument is wrong, or the folder holds a study with other settings.
    """
    shard, deadline = shard or Shard(), deadline or Deadline(None)
    pairs = choose(config.suites, config.variants, config.sparsities)
    config = resolve_place(config, pipe)
    folders.check_writable(config.out)
    ready = prepare(config, pipe=pipe, attention=None)
    pipe = ready.pipe
    config = replace(ready.config, prompt=study_prompts(pipe, config.prompt, config.prompts))
    folders.make_output(config.out)
    claim_settings(config.out / CLIPS_SETTINGS, CLIPS_SCHEMA, _settings(config, pipe))
    tasks: list[Task] = [*([(FLOOR, None)] if config.floor else []), *pairs]
    asked = {"prompts": list(config.prompt), "seeds": list(config.seed), "rows": [list(task) for task in tasks]}
    replace_settings(config.out / CLIPS_ASKED, ASKED_SCHEMA, asked)  # a report knows by it what is missing
    # Seed by seed: a study that is stopped has all prompts with the first seed before it has some with all seeds.
    items = [(prompt, seed) for seed in config.seed for prompt in config.prompt]
    with line_writer(config.out / f"{CLIPS}-{shard.index}.jsonl") as lines:
        finished = _finished(config.out)
        plan = [
            (prompt, seed, [task for task in tasks if (prompt, seed, *task) not in finished])
            for prompt, seed in shard.of(items)
        ]
        bench = _Bench(
            pipe,
            config,
            {"alex": load_alex(pipe._execution_device, config.lpips_weights)},
            int(transformer_of(pipe).config.num_layers),
            _num_tokens(pipe, config),
            Ticker(sum(len(todo) for _, _, todo in plan), progress),
        )
        for prompt, seed, todo in plan:
            if todo and not deadline.passed:
                _run_item(bench, prompt, seed, todo, lines, deadline)
    finished = _finished(config.out)
    wanted = {(prompt, seed, *task) for prompt, seed in items for task in tasks}
    mine = {(prompt, seed, *task) for prompt, seed in shard.of(items) for task in tasks}
    missing = wanted - finished
    if not missing:
        write_report(config.out, command=command)
    return {
        "out": str(config.out),
        "done": len(wanted) - len(missing),
        "missing": len(missing & mine),
        "other_shards_missing": len(missing - mine),
    }


def _run_item(
    bench: _Bench, prompt: str, seed: int, todo: Sequence[Task], lines: LineWriter, deadline: Deadline
) -> None:
    """Make the dense clip and what is missing of the variants of one prompt and seed."""
    pipe, config = bench.pipe, bench.config
    deadline.begin()
    watchers = _watchers(config, todo) if _one_transformer(pipe) else {}
    first = FirstSteps(pipe.transformer, _shared_steps(bench))
    with watching(pipe, watchers.values()), first.kept():
        dense = generate_clip(
            pipe, config, prompt=prompt, seed=seed, name="dense", on_step=first.after_step, to_cpu=False
        )
    deadline.end()
    for name, sparsity in todo:
        if deadline.passed:
            return
        deadline.begin()
        record = {"prompt": prompt, "seed": seed, "variant": name, "sparsity": sparsity}
        if sparsity is None:
            with other_kernel(pipe) as kernel:
                clip = generate_clip(pipe, config, prompt=prompt, seed=seed, name=name, to_cpu=False)
            record |= {"kernel": kernel} | _measured(bench, dense, clip)
        else:
            record |= _variant(bench, name, sparsity, prompt, seed, dense, watchers, first)
        lines.append(record)
        deadline.end()
        _tell(bench, record)


def _variant(
    bench: _Bench,
    name: str,
    sparsity: float,
    prompt: str,
    seed: int,
    dense: Clip,
    watchers: Mapping[str, BestOrders],
    first: FirstSteps,
) -> dict[str, Any]:
    from ..processors import sparse_attention, sparsity_summary, use_custom_selection

    pipe, config, variant = bench.pipe, bench.config, VARIANTS[name]
    if variant.watch is not None and variant.watch not in watchers:
        return {"skipped": "the pipeline has two transformers: which steps would be whose is not known beforehand"}
    assert config.warmup is not None
    assert config.block_size is not None
    attention = config_of(
        variant,
        sparsity,
        num_layers=bench.num_layers,
        num_tokens=bench.num_tokens,
        warmup=config.warmup,
        block_size=config.block_size,
        backend=config.backend,
        orders=None if variant.watch is None else watchers[variant.watch].table(1.0 - sparsity),
    )
    if isinstance(attention, str):
        return {"skipped": attention}
    with sparse_attention(pipe, attention):
        if variant.custom is not None:
            make = variant.custom
            use_custom_selection(pipe, lambda layer: make(int(layer.rsplit(".", 1)[1])))
        with first.reused():
            clip = generate_clip(
                pipe, config, prompt=prompt, seed=seed, name=name, on_step=first.after_step, to_cpu=False
            )
        summary = sparsity_summary(pipe).to_dict()
    kept = ("density_overall", "density_sparse_steps", "token_density_sparse_steps", "steps_dense", "steps_total")
    orders = Counter(order for names in summary["orders"].values() for order in names)
    if variant.custom is not None and variant.custom(0).order is not None:
        orders = Counter()  # those of the config did not run
    return (
        {"kernel": summary["backend"], "orders": dict(orders), "notes": summary["notes"]}
        | {key: summary[key] for key in kept}
        | _measured(bench, dense, clip)
    )


def _measured(bench: _Bench, dense: Clip, clip: Clip) -> dict[str, Any]:
    results = measure_clips(bench.pipe, dense, clip, bench.lpips)
    return {
        "metrics": {name: result.mean for name, result in results.items()},
        "reasons": {name: result.reason for name, result in results.items() if result.reason is not None},
        "identical_frames": results["psnr"].identical_frames,
        "seconds": round(clip.seconds_total, 4),
        "seconds_dense": round(dense.seconds_total, 4),
    }


def _settings(config: StudyConfig, pipe: Any) -> dict[str, Any]:
    """What decides a clip; prompts, seeds and variants may be added later, and shards run on other GPUs."""
    names = (
        "model", "steps", "frames", "height", "width", "guidance_scale", "negative_prompt", "max_sequence_length",
        "warmup", "block_size", "backend", "dtype",
    )  # fmt: skip
    place = environment(pipe)
    chosen = config.settings()
    return {name: chosen[name] for name in names} | {
        "weights": weights_digest(pipe),
        "scheduler": type(pipe.scheduler).__name__,
        "tokens": _num_tokens(pipe, config),
        **MEANING_OF_DEFAULT,
        "environment": {key: place[key] for key in ("versions", "device", "device_name", "vae_dtype", "pipeline")},
    }


def _num_tokens(pipe: Any, config: RunConfig) -> int:
    assert config.frames is not None
    assert config.height is not None
    assert config.width is not None
    patch = transformer_of(pipe).config.patch_size
    sizes = (
        (config.frames - 1) // pipe.vae_scale_factor_temporal + 1,
        config.height // pipe.vae_scale_factor_spatial,
        config.width // pipe.vae_scale_factor_spatial,
    )
    return math.prod(size // factor for size, factor in zip(sizes, patch, strict=True))


def _watchers(config: StudyConfig, todo: Sequence[Task]) -> dict[str, BestOrders]:
    """Return what has to watch the dense run, by `Variant.watch`.

    Errors decide the hindsight in the first, the middle and the last sparse step.
    """
    assert config.steps is not None
    assert config.warmup is not None
    assert config.block_size is not None
    warm = dense_steps(config.warmup, config.steps)
    first = min(warm, config.steps - 1)
    kinds = {
        "error": (errors_of_orders, spread(range(first, config.steps), _WATCHED_STEPS)),
        "recall": (mass_lost_by_orders, [max(0, warm - 1)]),
    }
    watchers = {}
    for kind, (losses, steps) in kinds.items():
        densities = sorted({1.0 - s for name, s in todo if s is not None and VARIANTS[name].watch == kind})
        if densities:
            watchers[kind] = BestOrders(losses, steps, densities, config.block_size, config.backend)
    return watchers


def _shared_steps(bench: _Bench) -> int:
    """How many steps at the start the dense clip and all variants have in common: the warm-up but its last step.

    In that one the orders are calibrated. None where two transformers share the steps.
    """
    config = bench.config
    assert config.steps is not None
    assert config.warmup is not None
    return max(0, dense_steps(config.warmup, config.steps) - 1) if _one_transformer(bench.pipe) else 0


def _one_transformer(pipe: Any) -> bool:
    return getattr(pipe, "transformer_2", None) is None


def _finished(out: Path) -> set[tuple[str, int, str, float | None]]:
    return {(line["prompt"], line["seed"], line["variant"], line["sparsity"]) for line in read_lines(out, CLIPS)}


def _tell(bench: _Bench, record: Mapping[str, Any]) -> None:
    name = record["variant"] + ("" if record["sparsity"] is None else f" {100 * record['sparsity']:.4g} %")
    if "skipped" in record:
        text = f"skipped: {record['skipped']}"
    else:
        text = f"PSNR {record['metrics']['psnr']:.2f} dB, {record['seconds']:.2f} s"
    bench.ticker.tick(f"{record['prompt'][:40]}, seed {record['seed']}: {name}: {text}")
