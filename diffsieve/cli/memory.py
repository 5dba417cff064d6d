"""What a command says when memory runs out."""

import re
from collections.abc import Collection

# Parameters of commands that decide how much memory a run needs, and how to call them.
_SIZES = {
    "frames": "--frames",
    "height": "--height",
    "width": "--width",
    "tokens": "--tokens",
    "grid": "--grid",
    "chunk_size": "--chunk-size",
    "overrides": "the batch_size of the phases in the settings",
}
_GPU = re.compile(r"tried to allocate ([\d.]+ ?[KMGT]?i?B)", re.IGNORECASE)
_CPU = re.compile(r"tried to allocate (\d+) bytes", re.IGNORECASE)


def memory_message(error: BaseException, parameters: Collection[str]) -> str:
    """One sentence: where memory ran out, and what of the command's parameters to lower.

    Args:
        error: for which `is_out_of_memory` holds.
        parameters: names of the parameters of the command that ran.
    """
    text = str(error)
    where = "the GPU" if type(error).__name__ == "OutOfMemoryError" or "CUDA" in text or "MPS" in text else "the CPU"
    amount = ""
    if found := _CPU.search(text):
        amount = f" (could not get {int(found.group(1)) / 2**30:.2f} GiB)"
    elif found := _GPU.search(text):
        amount = f" (could not get {found.group(1)})"
    sizes = [words for name, words in _SIZES.items() if name in parameters]
    if not sizes:
        advice = "free some, or take a smaller model"
    else:
        advice = "lower " + (f"{', '.join(sizes[:-1])} or {sizes[-1]}" if len(sizes) > 1 else sizes[0])
        if "dtype" in parameters:
            advice += ", or give --dtype bfloat16 if the model runs in float32"
    return f"out of memory on {where}{amount}: {advice}; what was finished before is whole"
