"""BA-Att: time of the whole call, of its parts and of its calibration, and of Wan's forwards."""

from diffsieve.bench import tables as tables_of_bench
from diffsieve.kernels.ba_att.forms import FORMS

from .results import result

_FASTEST = "dense, FlashAttention-3"
_LARGEST = "wan2.1-14b, 75,600 tokens"
# The paper's Table 5: steps, dense ones among them, and forwards a step.
_STEPS, _DENSE_STEPS, _BRANCHES = 50, 10, 2


def wan_table() -> str:
    """Time of one forward of Wan transformers on an H200, as a Markdown table."""
    return tables_of_bench.speed_table(result("h200/bench/wan.json"), "BA-Att")


def call_table() -> str:
    """Time of the whole BA-Att call on an H200, as a Markdown table."""
    report = result("h200/bench/ba-att.json")
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
            f"({tables_of_bench.source(result('h200/bench/wan.json'))}):",
            "",
            wan_table(),
        ]
    )


def calibration_table() -> str:
    """How long calibrating the orders takes on an H200 beside a sparse call, as a Markdown table."""
    rows = result("h200/bench/ba-att.json")["rows"]
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
    rows = result("h200/ba_att_budgets_time.json")["rows"]
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


def steps_table() -> str:
    """Times of BA-Att's steps around the attention kernel on an H200, as two Markdown tables; "-" was not measured."""
    report = result("h200/ba_att_steps.json")
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


def reproduction_table() -> str:
    """Expected time of one clip of the paper's Table 5, from the measured forwards of the transformer."""
    rows = {row["name"]: row["ms"] for row in result("h200/bench/wan.json")["rows"] if row["problem"] == _LARGEST}
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
