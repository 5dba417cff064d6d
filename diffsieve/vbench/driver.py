"""Runs one dimension of VBench in VBench's own environment: `python driver.py REQUEST.json`. Standard library only.

Its command line returns 0 when it fails; this one lets every failure through as an exit code.
"""

import importlib
import json
import os
import sys


def main() -> int:
    # The folder of this file must not lend its modules to VBench.
    sys.path[:] = [place for place in sys.path if os.path.abspath(place or ".") != os.path.dirname(__file__)]
    with open(sys.argv[1], encoding="utf-8") as file:
        request = json.load(file)
    package = importlib.import_module("vbench")
    runner = package.VBench(request["device"], request["full_info"], request["output"])
    runner.evaluate(
        videos_path=request["videos"],
        name=request["name"],
        dimension_list=[request["dimension"]],
        local=request["local"],
        mode="vbench_standard",
    )
    result = os.path.join(request["output"], request["name"] + "_eval_results.json")
    return 0 if os.path.isfile(result) else 4


if __name__ == "__main__":
    sys.exit(main())
