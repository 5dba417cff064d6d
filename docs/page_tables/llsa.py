"""LLSA: time against dense attention, and its GPU tests."""

from diffsieve.bench import tables as tables_of_bench

from .results import result


def llsa_table() -> str:
    """Time of LLSA against dense attention on an H200, as a Markdown table."""
    report = result("h200/bench/llsa.json")
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
    report = result("h200/llsa_tests.json")
    versions, counts = report["versions"], report["outcomes"]
    others = [
        f"`{test.split('::')[1]}` ({outcome})" for test, outcome in report["tests"].items() if outcome != "passed"
    ]
    text = (
        f"GPU tests of LLSA on {report['gpu']} (torch {versions['torch']}, Triton {versions['triton']}; "
        f"`{report['command']}`): {counts.get('passed', 0)} of {len(report['tests'])} passed"
    )
    return f"{text}; not {', '.join(others)}." if others else f"{text}."
