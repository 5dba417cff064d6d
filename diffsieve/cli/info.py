"""`diffsieve info`: versions, devices and the attention backend that each device gets."""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import typer

from .options import ConfigFile, DebugFlag, JsonFlag, emit

app = typer.Typer(add_completion=False)

_PACKAGES = ("diffsieve", "torch", "triton", "diffusers", "transformers", "accelerate", "lpips", "gradio")
_PROBE_SHAPE = (1, 1, 4096, 64)  # (B, H, L, D): long enough that no backend declines for shortness
_PROBE_BLOCK = 128


@app.command()
def info(json: JsonFlag = False, config: ConfigFile = None, debug: DebugFlag = False) -> None:
    """Print versions, devices and the attention backend that each device gets."""
    result = collect()
    emit(result, as_json=json, text=format_info(result))


def collect() -> dict[str, Any]:
    """Gather what a bug report should say.

    Returns:
        `versions`: package name to version or None when not installed; `python`: its version; `devices`: for each its
        name, dtype probed, the block-sparse backend that `backend="auto"` picks there, and why.
    """
    import platform

    import torch

    devices = [_describe(torch.device("cpu"), torch.float32, platform.processor() or platform.machine())]
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        devices.append(_describe(device, torch.bfloat16, torch.cuda.get_device_name(index)))
    if torch.backends.mps.is_available():
        devices.append(_describe(torch.device("mps"), torch.float16, "Apple GPU"))
    return {
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in _PACKAGES},
        "devices": devices,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _describe(device: Any, dtype: Any, name: str) -> dict[str, str]:
    import torch

    from ..kernels.block_sparse import choose_backend

    probe = torch.empty(_PROBE_SHAPE, device=device, dtype=dtype)
    choice = choose_backend(probe, probe, block_size=_PROBE_BLOCK)
    return {
        "device": str(device),
        "name": name,
        "dtype": str(dtype).removeprefix("torch."),
        "backend": choice.name,
        "reason": choice.reason,
    }


def format_info(result: dict[str, Any]) -> str:
    """Lay out the dictionary of `collect` for people, one fact a line."""
    lines = [f"{'python':14} {result['python']}"]
    lines += [f"{package:14} {found or 'not installed'}" for package, found in result["versions"].items()]
    for entry in result["devices"]:
        lines.append(
            f"{entry['device']:14} {entry['name']}, {entry['dtype']}: backend {entry['backend']} ({entry['reason']})"
        )
    return "\n".join(lines)
