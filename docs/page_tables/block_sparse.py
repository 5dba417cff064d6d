"""Block-sparse attention: time and rate of its kernels, and of dense attention beside them."""

import re

from diffsieve.bench import tables as tables_of_bench
from diffsieve.kernels.block_sparse.rates import RATES_SM90

from .results import result

_KERNEL_TOKENS = 75_648


def kernel_table() -> str:
    """Time of the block-sparse kernel on an H200, as a Markdown table."""
    report = result("h200/bench/block-sparse.json")
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
    return tables_of_bench.rates_by_length(result("h200/bench/block-sparse.json"))


def hopper_rates_table() -> str:
    """Rates of the backends for Hopper GPUs at half of the blocks, as a Markdown table; "-" was not measured."""
    tune = result("h200/block_sparse_hopper.json")["tune"]
    dense = {}
    for shape, rows in tune.items():
        (dense[shape],) = [row["tflops"] for row in rows if row["name"].endswith("cuDNN")]
    later = result("h200/bench/block-sparse.json")["rows"]
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
    rows = [row for row in result("h200/dense_full_lists.json")["rows"] if row["len_q"] == row["len_k"]]
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


def cpu_table() -> str:
    """Time of the block-sparse op on a CPU, as a Markdown table."""
    report = result("cpu/bench/block-sparse.json")
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
