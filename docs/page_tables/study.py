"""The fidelity study: clips of mini-wan against dense ones from the same noise."""

from typing import Any

from .results import result

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
_TITLES = {"psnr": "PSNR", "ssim": "SSIM", "ms_ssim": "MS-SSIM", "lpips[alex]": "LPIPS"}


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
    recall = result("h200/study.json")["recall"]
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


def _study_rows() -> dict[tuple[str, float | None], dict[str, Any]]:
    rows = result("h200/study.json")["clips"]["rows"]
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
    clips = result("h200/study.json")["clips"]
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
