"""Write the generated tables into the pages and draw the plots: `python docs/write_tables.py` (or `make tables`).

A table stands between `<!-- NAME:begin -->` and `<!-- NAME:end -->`. Tests check that pages and plots are up to date.
"""

import json
import re
from pathlib import Path
from typing import Any

from diffsieve.bench import tables as tables_of_bench
from diffsieve.bench.plots import draw_plots
from diffsieve.kernels.ba_att.forms import FORMS
from diffsieve.kernels.block_sparse.rates import RATES_SM90
from diffsieve.processors import supported_models

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"
_KERNEL_TOKENS = 75_648
_FASTEST = "dense, FlashAttention-3"
_LARGEST = "wan2.1-14b, 75,600 tokens"
PAGES = (
    "docs/ba-att.md",
    "docs/benchmarks.md",
    "docs/llsa.md",
    "README.md",
    "docs/supported-models.md",
    "docs/mini-wan.md",
    "docs/reproduce.md",
    "docs/pixel-dit.md",
)


def supported_models_table() -> str:
    """The supported models as a Markdown table, from the registry of the adapters."""
    lines = ["| family | pipelines | transformers |", "|---|---|---|"]
    for row in supported_models():
        cells = (row["family"], *(_code(row[name]) for name in ("pipelines", "transformers")))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def kernel_table() -> str:
    """Time of the block-sparse kernel on an H200, as a Markdown table."""
    report = _result("h200/bench/block-sparse.json")
    versions = report["versions"]
    shape = (
        f"{_KERNEL_TOKENS:,} tokens, 12 heads of {report['settings']['dim']}, bf16, blocks of 128, random blocks kept"
    )
    return "\n".join(
        [
            f"Block-sparse attention on one {report['device']} ({shape};",
            f"torch {versions['torch']}, Triton {versions['triton']}; {tables_of_bench.source(report)}):",
            "",
            tables_of_bench.rate_table(report, _KERNEL_TOKENS, share=0.5),
        ]
    )


def kernel_rates_table() -> str:
    """Time and rate of all block-sparse kernels on an H200 by length, as a Markdown table."""
    return tables_of_bench.rates_by_length(_result("h200/bench/block-sparse.json"))


def wan_table() -> str:
    """Time of one forward of Wan transformers on an H200, as a Markdown table."""
    return tables_of_bench.speed_table(_result("h200/bench/wan.json"), "BA-Att")


def call_table() -> str:
    """Time of the whole BA-Att call on an H200, as a Markdown table."""
    report = _result("h200/bench/ba-att.json")
    settings = report["settings"]
    own = f", blocks ranked by {settings['score']}" if settings["score"] != "residual" else ""
    table = tables_of_bench.speed_table(report, "default", over=_FASTEST)
    return "\n".join(
        [
            f'The whole call of the preset `default` with `budgets="equal"` (an order per head{own}; '
            f"{settings['heads']} heads of {settings['dim']}, bf16), all that ordering,",
            f"selecting and compensating cost included ({tables_of_bench.source(report)}):",
            "",
            table,
            "",
            "All are of CUDA graphs, without the host's time; factors are over FlashAttention-3, the fastest of "
            "the dense ones.",
            "",
            "One forward at 81 frames of 480p or 720p, random weights, compiled, first layer dense, equal budgets too",
            f"({tables_of_bench.source(_result('h200/bench/wan.json'))}):",
            "",
            wan_table(),
        ]
    )


def calibration_table() -> str:
    """How long calibrating the orders takes on an H200 beside a sparse call, as a Markdown table."""
    rows = _result("h200/bench/ba-att.json")["rows"]
    found = {(row["tokens"], row["sparsity"]): row for row in rows if row["name"].startswith("default, ")}
    shares = (0.5, 0.75, 0.9)
    calls = " | ".join(f"sparse call, {share:.0%}" for share in shares)
    lines = [f"| | {' | '.join(f'calibration, {x:.0%} skipped' for x in shares)} | {calls} |", "|---" * 7 + "|"]
    for tokens in sorted({tokens for tokens, _ in found}):
        cells = [f"{found[tokens, share][key]:.1f} ms" for key in ("calibration_ms", "ms") for share in shares]
        lines.append(f"| {tokens:,} tokens | {' | '.join(cells)} |")
    return "\n".join(lines)


def budgets_time_table() -> str:
    """How long sparse calls take whose heads share their blocks, on an H200, as a Markdown table."""
    rows = _result("h200/ba_att_budgets_time.json")["rows"]
    names = {
        "equal": "equal",
        "mixed": "few and many in turns",
        "long last": "many last",
        "calibration of budgets": "measuring the shares, once",
    }
    shares = {"0.5": "50 %", "0.25": "75 %", "0.1": "90 %"}
    shown = [(name, density) for name in names for density in shares]
    lines = [
        f"| tokens | {' | '.join(f'{names[name]}, {shares[density]}' for name, density in shown)} |",
        "|---" * (1 + len(shown)) + "|",
    ]
    for row in rows:
        cells = [f"{row['ms'][density][name]:.2f}" for name, density in shown]
        lines.append(f"| {row['tokens']:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def hopper_rates_table() -> str:
    """Rates of the backends for Hopper GPUs at half of the blocks, as a Markdown table; "-" was not measured."""
    tune = _result("h200/block_sparse_hopper.json")["tune"]
    dense = {}
    for shape, rows in tune.items():
        (dense[shape],) = [row["tflops"] for row in rows if row["name"].endswith("cuDNN")]
    later = _result("h200/bench/block-sparse.json")["rows"]
    (dense["D128-b128"],) = [
        row["tflops"] for row in later if row["tokens"] == _KERNEL_TOKENS and row["name"] == "dense, cuDNN"
    ]
    names = ("triton", "flash4", "hopper-exact", "hopper")
    lines = [
        f"| head size, block | dense, cuDNN | {' | '.join(f'`{name}`' for name in names)} |",
        "|---" * (2 + len(names)) + "|",
    ]
    for shape in sorted(tune, key=_dim_and_block, reverse=True):
        rates = {name: f"{rate:.0f}" for name, rate in RATES_SM90[_dim_and_block(shape)].items()}
        cells = [f"{dense[shape]:.0f}", *(rates.get(name, "-") for name in names)]
        lines.append(f"| {', '.join(map(str, _dim_and_block(shape)))} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _dim_and_block(shape: str) -> tuple[int, int]:
    """(128, 64) for "D128-b64"."""
    dim, block = re.findall(r"\d+", shape)
    return int(dim), int(block)


def dense_lengths_table() -> str:
    """Times of dense attention, PyTorch's and with all blocks listed, as a Markdown table."""
    rows = [row for row in _result("h200/dense_full_lists.json")["rows"] if row["len_q"] == row["len_k"]]
    times = {(row["dim"], row["len_q"]): row["graph_ms"] for row in rows}
    kernels = {"cuDNN": "cuDNN", "FlashAttention-2": "FlashAttention-2", "`hopper-exact`": "hopper-exact",
               "`hopper`": "hopper"}  # fmt: skip
    first, *others = kernels
    heads = [f"head size {dim}: {first} | {' | '.join(others)}" for dim in (128, 64)]
    lines = [f"| tokens | {' | '.join(heads)} |", "|---" * (1 + 2 * len(kernels)) + "|"]
    for tokens in sorted({tokens for _, tokens in times}):
        cells = [_ms(times[dim, tokens][name]) for dim in (128, 64) for name in kernels.values()]
        lines.append(f"| {tokens:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.2f}" if milliseconds < 10 else f"{milliseconds:.1f}"


def steps_table() -> str:
    """Times of BA-Att's steps around the attention kernel on an H200, as two Markdown tables; "-" was not measured."""
    report = _result("h200/ba_att_steps.json")
    rows = report["rows"]
    lengths = [f"{row['tokens']:,} tokens" for row in rows]
    tiles = {name: str(tile) for name, tile in FORMS._asdict().items()}
    steps = {
        "gather with moments, queries and keys": ("gather", "", 2),
        "gather with means, values": ("gather_means", "", 1),
        "scores": ("scores", "", 1),
        "choice of blocks": ("select_warps", "", 1),
        "compensation, order undone; 50% skipped": ("centroids", "", 1),
        "the same, 75% skipped": ("centroids", "75% skipped, ", 1),
        "the same, 90% skipped": ("centroids", "90% skipped, ", 1),
        "two heads in windows: order": ("windows", "", 1),
    }
    lines = [
        f"Steps on one {report['gpu']}, 12 heads of 128, bf16, blocks of 128, in ms as CUDA graphs",
        f"(torch {report['versions']['torch']}, Triton {report['versions']['triton']}; "
        "`python benchmarks/ba_att_steps.py`):",
        "",
        f"| step | {' | '.join(lengths)} |",
        "|---" * (1 + len(rows)) + "|",
    ]
    for label, (name, density, times) in steps.items():
        cells = []
        for row in rows:
            found = row["steps_ms"].get("centroids at other densities" if density else name, {})
            cells.append(_or_dash(found.get(density + tiles[name]), times))
        lines.append(f"| {label} | {' | '.join(cells)} |")
    heads = [f"{x}: kernel | call less kernel | rest by itself" for x in lengths]
    lines += [
        "",
        "The whole call, ms, heads in static orders: the attention kernel alone, the call less it, and the call timed "
        "without it:",
        "",
        f"| skipped | {' | '.join(heads)} |",
        "|---" * (1 + 3 * len(rows)) + "|",
    ]
    for density in rows[0]["call_ms"]:
        cells = []
        for row in rows:
            found = row["call_ms"].get(density, {})
            kernel, call = found.get("attention kernel alone"), found.get("call, static, in use")
            less = None if kernel is None or call is None else call - kernel
            cells += [_or_dash(x) for x in (kernel, less, found.get("rest of the call, static, in use"))]
        lines.append(f"| {density.removesuffix(' skipped')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _or_dash(milliseconds: float | None, times: int = 1) -> str:
    return "-" if milliseconds is None else f"{times * milliseconds:.2f}"


_PARTS = (
    "measured budgets", "head budgets", "beta 1", "no centring", "no second order", "halfk", "score moments",
    "no compensation", "hindsight", "order by recall", "first layer dense",
)  # fmt: skip
_SORTS = ("paper", "no sort", "sort queries", "sort keys")
_IN_BRIEF = (
    "default",
    "measured budgets",
    "beta 1",
    "base",
    "hindsight",
    "order frame_hilbert",
    "oracle",
    "antidiagonal 8",
    "mean pooling",
    "paper",
)
_FIDELITY = (0.5, 0.6, 0.75, 0.9)
_RECALLED = (
    "base",
    "beta 1",
    "hindsight",
    "no compensation",
    "oracle",
    "mean pooling",
    "antidiagonal 8",
    "paper",
    "random",
)


def study_table() -> str:
    """How close clips of mini-wan are to dense ones, all variants but those of the sort, as a Markdown table."""
    rows = _study_rows()
    names = [name for name, share in rows if share == 0.5 and name not in _SORTS[1:]]
    shown = [("psnr", share) for share in _FIDELITY]
    shown += [("ssim", 0.5), ("ms_ssim", 0.5), ("lpips[alex]", 0.5), ("lpips[alex]", 0.75)]
    lines = [
        f"{_about_study(_FIDELITY)}:",
        "",
        f"| | {' | '.join(f'{_TITLES[metric]}, {share:.0%}' for metric, share in shown)} |",
        "|---" * (1 + len(shown)) + "|",
    ]
    floor = rows["noise floor", None]
    cells = [_mean(floor, metric) if share == 0.5 else "" for metric, share in shown]
    lines.append(f"| dense, another kernel (noise floor) | {' | '.join(cells)} |")
    for name in sorted(names, key=lambda name: -rows[name, 0.5]["metrics"]["psnr"]["mean"]):
        cells = [_mean(rows[name, share], metric) for metric, share in shown]
        lines.append(f"| {_named(name)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def study_parts_table() -> str:
    """What changing one part of `base` changes, clip by clip, as a Markdown table."""
    rows = _study_rows()
    lines = [
        "PSNR less that of `base`, clip by clip, in dB: mean, its standard error, and in how many of the clips it",
        f"is higher ({_counts(_FIDELITY)}):",
        "",
        f"| | {' | '.join(f'{share:.0%}' for share in _FIDELITY)} |",
        "|---" * (1 + len(_FIDELITY)) + "|",
    ]
    for name in ("default", *_PARTS):
        cells = [_over_base(rows[name, share], rows["base", share]) for share in _FIDELITY]
        lines.append(f"| {_named(name)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def study_sort_table() -> str:
    """The paper's ablation of its sort on mini-wan, as a Markdown table."""
    shares = (0.5, 0.7, 0.9)
    about = f"The paper's method with and without its sort by norm (its Table 7), of the same run, {_counts(shares)}"
    return _psnr_and_lpips(_SORTS, shares, about)


def study_recall_table() -> str:
    """Recall and output error on captured calls, and what the calibration of `base` predicts, as Markdown tables."""
    recall = _result("h200/study.json")["recall"]
    rows = {(row["variant"], row["sparsity"]): row for row in recall["rows"]}
    shown = [(what, share) for what in ("recall", "error") for share in _FIDELITY]
    lines = [
        f"{recall['calls']} captured calls: {len(recall['prompts'])} clips, steps {_listed(recall['steps'])}, "
        f"{len(recall['layers'])} layers, {recall['tokens'][0]:,} tokens, means over heads:",
        "",
        f"| | {' | '.join(f'{what}, {share:.0%}' for what, share in shown)} |",
        "|---" * (1 + len(shown)) + "|",
    ]
    for name in _RECALLED:
        cells = [f"{rows[name, share][what]['mean']:.3f}" for what, share in shown]
        lines.append(f"| {_named(name)} | {' | '.join(cells)} |")
    predicted = {share: rows["base", share]["predicted"] for share in _FIDELITY}
    for what in ("recall", "error"):
        cells = [f"{predicted[share][what]['predicted']:.3f}" if about == what else "" for about, share in shown]
        lines.append(f"| predicted by the calibration of `base`: {what} | {' | '.join(cells)} |")
    return "\n".join(lines)


def study_in_brief_table() -> str:
    """How close some variants come to dense clips of mini-wan, as a Markdown table."""
    shares = (0.5, 0.75, 0.9)
    return _psnr_and_lpips(_IN_BRIEF, shares, _about_study(shares))


def _psnr_and_lpips(names: tuple[str, ...], shares: tuple[float, ...], about: str) -> str:
    rows = _study_rows()
    lines = [
        f"{about}:",
        "",
        f"| PSNR, LPIPS; blocks skipped: | {' | '.join(f'{share:.0%}' for share in shares)} |",
        "|---" * (1 + len(shares)) + "|",
    ]
    for name in names:
        cells = [f"{_mean(rows[name, x], 'psnr')} dB, {_mean(rows[name, x], 'lpips[alex]')}" for x in shares]
        lines.append(f"| {_named(name)} | {' | '.join(cells)} |")
    return "\n".join(lines)


_TITLES = {"psnr": "PSNR", "ssim": "SSIM", "ms_ssim": "MS-SSIM", "lpips[alex]": "LPIPS"}


def _study_rows() -> dict[tuple[str, float | None], dict[str, Any]]:
    rows = _result("h200/study.json")["clips"]["rows"]
    return {(row["variant"], row["sparsity"]): row for row in rows}


def _mean(row: dict[str, Any], metric: str) -> str:
    """The mean over clips; "-" where the variant does not exist."""
    if not row["clips"]:
        return "-"
    return f"{row['metrics'][metric]['mean']:.{2 if metric == 'psnr' else 4}f}"


def _over_base(row: dict[str, Any], base: dict[str, Any]) -> str:
    if not row["clips"]:
        return "-"
    found = row["over_base"]["psnr"]
    higher = sum(a > b for a, b in zip(row["psnr_by_clip"], base["psnr_by_clip"], strict=True))
    return f"{found['mean']:+.2f} ± {found['std'] / found['n'] ** 0.5:.2f}, {higher}"


def _counts(shares: tuple[float, ...]) -> str:
    """Write how many clips the rows have, as in "25, 15 and 10 clips at 50, 70 and 90 %"."""
    rows = _study_rows()
    clips, percents = [rows["paper", x]["clips"] for x in shares], [f"{100 * x:.0f}" for x in shares]
    return f"{_listed(clips) if len(set(clips)) > 1 else clips[0]} clips at {_listed(percents)} %"


def _listed(values: list[Any]) -> str:
    *most, last = map(str, values)
    return f"{', '.join(most)} and {last}"


def _about_study(shares: tuple[float, ...]) -> str:
    clips = _result("h200/study.json")["clips"]
    settings = clips["settings"]
    unfinished = "" if clips["complete"] else "; the study is unfinished"
    return "\n".join(
        [
            "Clips of mini-wan against dense ones from the same noise, prompts held out of training: "
            f"{_counts(shares)} skipped{unfinished}.",
            f"{settings['tokens']:,} tokens, {settings['steps']} steps, {settings['warmup']:.0%} of them dense, all "
            f"layers sparse, blocks of {settings['block_size']}, backend `{settings['backend']}`,",
            f"{settings['environment']['device_name']}, bf16 (`diffsieve study clips`; means over clips, the same for "
            "all rows of a column)",
        ]
    )


def _named(variant: str) -> str:
    names = {
        "preset default": "`default` as it ships: first layer dense, more blocks kept",
        "beta 1": "$\\beta = 1$",
        "window x2": "order hilbert_window, its window doubled",
        "first layer dense": "first layer dense, the others sparser",
        "no sort": "`paper` without its sort",
        "sort queries": "`paper`, queries alone sorted",
        "sort keys": "`paper`, keys alone sorted",
    }
    if variant in names:
        return names[variant]
    return f"`{variant}`" if variant in ("default", "base", "paper") else variant


def cpu_table() -> str:
    """Time of the block-sparse op on a CPU, as a Markdown table."""
    report = _result("cpu/bench/block-sparse.json")
    settings = report["settings"]
    return "\n".join(
        [
            f"The op on {settings['threads']} threads of a CPU ({report['device']}; fp32, heads of {settings['dim']}, "
            f"blocks of {settings['block_size']};",
            f"torch {report['versions']['torch']}; {tables_of_bench.source(report)}):",
            "",
            tables_of_bench.speed_table(report, "torch"),
        ]
    )


def llsa_table() -> str:
    """Time of LLSA against dense attention on an H200, as a Markdown table."""
    report = _result("h200/bench/llsa.json")
    sizes, versions = report["settings"], report["versions"]
    return "\n".join(
        [
            f"{report['device']}, bf16, B {sizes['batch']}, H {sizes['heads']}, D {sizes['dim']}, "
            f"blocks of {sizes['block_size']}, topk {sizes['topk']}; times in ms, all of one run",
            f"(torch {versions['torch']}, Triton {versions['triton']}; {tables_of_bench.source(report)}):",
            "",
            tables_of_bench.llsa_table(report),
        ]
    )


def llsa_tests() -> str:
    """How many GPU tests of LLSA passed, and which did not."""
    report = _result("h200/llsa_tests.json")
    versions, counts = report["versions"], report["outcomes"]
    others = [
        f"`{test.split('::')[1]}` ({outcome})" for test, outcome in report["tests"].items() if outcome != "passed"
    ]
    text = (
        f"GPU tests of LLSA on {report['gpu']} (torch {versions['torch']}, Triton {versions['triton']}; "
        f"`{report['command']}`): {counts.get('passed', 0)} of {len(report['tests'])} passed"
    )
    return f"{text}; not {', '.join(others)}." if others else f"{text}."


def mini_wan_table() -> str:
    """How often mini-wan draws what the prompt says, as a Markdown table."""
    report = _result("h200/mini_wan_quality.json")
    settings = report["settings"]
    return "\n".join(
        [
            f"On {report['prompts']} prompts whose combination of subject, motion and colour was held out of training "
            f"({settings['steps']} steps,",
            f"guidance {settings['guidance_scale']}, {report['scheduler']}, {report['dtype']}):",
            "",
            "| subject right | motion right | background colour right |",
            "|---|---|---|",
            "| " + " | ".join(f"{report[name]:.1%}" for name in ("subject", "motion", "colour")) + " |",
        ]
    )


def pixel_dit_study_table() -> str:
    """The variants of pixel DiT's attention that were trained on an H200, as a Markdown table; "-" is not measured.

    A second distance is that of another seed.
    """
    report = _result("h200/pixel_dit_study.json")
    heads = ("distance", "to full", "loss", "keys", "training: pictures/s", "pixels/s, millions", "peak memory, GiB")
    lines = [f"| side | attention | {' | '.join(heads)} |", "|---" * (2 + len(heads)) + "|"]
    for side, names in report["variants"].items():
        rows = report["sides"][side]
        of_full = rows["full"]["distance"]["value"]
        for name in names:
            row = rows.get(name)
            if row is None:
                lines.append(f"| {side} | {name} |{' - |' * len(heads)}")
                continue
            value = row["distance"]["value"] if "distance" in row else None
            repeated = [x["distance"]["value"] for x in row.get("other_seeds", {}).values() if "distance" in x]
            cells = [
                "-" if value is None else ", ".join(f"{x:.1f}" for x in (value, *repeated)),
                "-" if value is None else f"{value / of_full - 1:+.1%}",
                f"{row['loss_last_tenth']:.4f}",
                f"{row['keys_per_query']:,}",
                f"{row['train_images_per_s']:,.0f}",
                f"{row['train_tokens_per_s'] / 1e6:.2f}",
                f"{row['train_memory_gib']:.2f}",
            ]
            lines.append(f"| {side} | {name} | {' | '.join(cells)} |")
    versions = report["versions"]
    text = f"One {report['gpu']}, torch {versions['torch']}, Triton {versions['triton']}, Python {versions['python']}:"
    return "\n".join([text, "", *lines, "", "```", *report["commands"], "```"])


def pixel_dit_speed_table() -> str:
    """Training and sampling steps of a pixel DiT-S on an H200, as a Markdown table."""
    report = _result("h200/pixel_dit_speed.json")
    found = {(row["side"], row["method"], row["step"]): row for row in report["rows"]}
    heads = ("training: pictures/s", "LLSA is", "pixels/s, thousands", "peak, GiB")
    heads += ("sampling: pictures/s", "LLSA is", "peak, GiB")
    lines = [f"| side | attention | {' | '.join(heads)} |", "|---" * (2 + len(heads)) + "|"]
    for side in sorted({side for side, _, _ in found}):
        for method in ("llsa", "full, cuDNN", "full, FlashAttention-2"):
            train, sample = (found[side, method, step] for step in ("train", "sample"))
            times = [found[side, "llsa", row["step"]]["images_per_s"] / row["images_per_s"] for row in (train, sample)]
            name = f"LLSA, {train['levels']} levels" if method == "llsa" else method
            faster = ["" if method == "llsa" else f"{x:.3g}x" for x in times]
            cells = [
                f"{train['images_per_s']:.3g}",
                faster[0],
                f"{train['tokens_per_s'] / 1e3:,.0f}",
                f"{train['memory_gib']:.1f}",
                f"{sample['images_per_s']:.3g}",
                faster[1],
                f"{sample['memory_gib']:.2f}",
            ]
            lines.append(f"| {side} | {name} | {' | '.join(cells)} |")
    versions = report["versions"]
    text = f"One {report['gpu']}, bf16, blocks compiled, torch {versions['torch']}, Triton {versions['triton']}:"
    return "\n".join([text, "", *lines])


# The paper's Table 5: steps, dense ones among them, and forwards a step.
_STEPS, _DENSE_STEPS, _BRANCHES = 50, 10, 2


def reproduction_table() -> str:
    """Expected time of one clip of the paper's Table 5, from the measured forwards of the transformer."""
    rows = {row["name"]: row["ms"] for row in _result("h200/bench/wan.json")["rows"] if row["problem"] == _LARGEST}
    half, quarter = (rows[f"BA-Att, {share} % skipped"] for share in (50, 75))
    # The time goes with the blocks kept.
    sparse = {"50%": half, "60%": half + (quarter - half) * (0.6 - 0.5) / (0.75 - 0.5)}
    lines = ["| attention | dense by cuDNN | dense by FlashAttention-2 |", "|---|---|---|"]
    for name in ("dense", *sparse):
        cells = []
        for kernel in ("dense, cuDNN", "dense, FlashAttention-2"):
            others = _STEPS - _DENSE_STEPS
            forward = _DENSE_STEPS * rows[kernel] + others * sparse.get(name, rows[kernel])
            cells.append(f"{_BRANCHES * forward / 60_000:.0f} min")
        label = f"{name} skipped after {_DENSE_STEPS} dense steps" if name in sparse else name
        lines.append(f"| {label} | {' | '.join(cells)} |")
    lines += [
        "",
        f"Worked out, not measured: forwards of `benchmarks/results/h200/bench/wan.json` ({_LARGEST}, random weights, "
        "compiled),",
        "that at 60% between those at 50% and 75%, two a step. Choosing the orders, text encoder and VAE come on top.",
    ]
    return "\n".join(lines)


def _result(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def tables() -> dict[str, str]:
    """All generated tables by the name of their place."""
    return {
        "supported-models": supported_models_table(),
        "results": f"{kernel_table()}\n\n{call_table()}\n\n{cpu_table()}",
        "calibration": calibration_table(),
        "budgets-time": budgets_time_table(),
        "study": study_table(),
        "study-parts": study_parts_table(),
        "study-sort": study_sort_table(),
        "study-recall": study_recall_table(),
        "study-in-brief": study_in_brief_table(),
        "kernel-rates": kernel_rates_table(),
        "wan": wan_table(),
        "hopper-rates": hopper_rates_table(),
        "dense-lengths": dense_lengths_table(),
        "ba-att-steps": steps_table(),
        "llsa-results": llsa_table(),
        "llsa-tests": llsa_tests(),
        "mini-wan-results": mini_wan_table(),
        "reproduction": reproduction_table(),
        "pixel-dit-study": pixel_dit_study_table(),
        "pixel-dit-speed": pixel_dit_speed_table(),
    }


def with_tables(text: str) -> str:
    """Return a page with its tables written anew."""
    for name, table in tables().items():
        pattern = rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)"
        text = re.sub(pattern, lambda found, table=table: f"{found[1]}{table}\n{found[2]}", text, flags=re.DOTALL)
    return text


def _code(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", "))


if __name__ == "__main__":
    for page in PAGES:
        path = ROOT / page
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
    for result in sorted((RESULTS / "h200" / "bench").glob("*.json")):
        draw_plots(json.loads(result.read_text(encoding="utf-8")), IMAGES, "bench-")
