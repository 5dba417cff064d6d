"""Outcomes of GPU tests as JSON, from the log of `pytest -m gpu -v`, with or without processes of xdist.

    pytest -m gpu -v | tee gpu.log
    python benchmarks/gpu_tests.py gpu.log --tests tests/kernels/test_llsa tests/kernels/test_replay \
        --gpu "NVIDIA H200" --torch 2.11.0+cu130 --triton 3.6.0 --out benchmarks/results/h200/llsa_tests.json

What the log does not say is told by arguments.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from pathlib import Path

_OUTCOME = "PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS"
# "[gw1] [ 69%] PASSED tests/a.py::test[x] " and "tests/a.py::test[x] PASSED    [ 69%]".
_WITH_XDIST = re.compile(rf"^\[gw\d+\] \[ *\d+%\] (?P<outcome>{_OUTCOME}) (?P<test>\S.*?) *$")
_ALONE = re.compile(rf"^(?P<test>\S+::.*?) (?P<outcome>{_OUTCOME})(?: \(.*\))? +\[ *\d+%\]$")


def outcomes(log: str) -> dict[str, str]:
    """The outcome of each test, "passed" for instance, by its id, in the order of ids."""
    found = (_WITH_XDIST.match(line) or _ALONE.match(line) for line in log.splitlines())
    return dict(sorted((match["test"], match["outcome"].lower()) for match in found if match))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path)
    parser.add_argument("--tests", nargs="+", default=[""], help="beginnings of the ids that are kept")
    for name in ("gpu", "torch", "triton"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument(
        "--package", nargs=2, action="append", default=[], metavar=("NAME", "VERSION"), help="another that was tested"
    )
    parser.add_argument("--command", default="pytest -m gpu -v")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    log = options.log.read_text(encoding="utf-8")
    tests = {test: outcome for test, outcome in outcomes(log).items() if test.startswith(tuple(options.tests))}
    python = re.search(r"-- Python (\S+?),", log)
    if not tests or python is None:
        parser.error(f"no outcome of {' or '.join(options.tests)} in {options.log}: is it a log of pytest -v?")
    report = {
        "command": options.command,
        "gpu": options.gpu,
        "versions": {"python": python[1], "torch": options.torch, "triton": options.triton} | dict(options.package),
        "outcomes": Counter(tests.values()),
        "tests": tests,
    }
    part = options.out.with_suffix(".part")
    part.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    part.replace(options.out)
    print(f"{options.out}: {dict(report['outcomes'])}")


if __name__ == "__main__":
    main()
