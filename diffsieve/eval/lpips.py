"""LPIPS of two clips: where its weights come from, and the metric."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from ..errors import DiffsieveError, UserInputError
from .frames import check_frames, frame_chunks
from .lpips_net import NETS, SMALLEST_SIDE, Lpips
from .restricted import check_sha256
from .result import MetricResult
from .weights import converted_lpips

# Files of torchvision; the eight digits are the beginning of their SHA-256.
_TORCHVISION = {
    "alex": ("alexnet-owt-7be5be79.pth", "7be5be79"),
    "vgg": ("vgg16-397923af.pth", "397923af"),
    "squeeze": ("squeezenet1_1-b8a52dc0.pth", "b8a52dc0"),
}
_DOWNLOADS = "https://download.pytorch.org/models/"


class MissingWeightsError(DiffsieveError):
    """The weights of a network are not on this machine; the message says how to get them."""


@dataclass(frozen=True)
class LoadedLpips:
    """LPIPS with its weights.

    Args:
        module: the network.
        source: file that the backbone was read from.
        sha256: of the weights, in a form that does not depend on the file format.
    """

    module: Lpips
    source: str
    sha256: str

    def to_dict(self) -> dict[str, str]:
        return {"net": self.module.net, "source": self.source, "sha256": self.sha256}


def load_lpips(
    net: str = "alex",
    *,
    weights: str | Path | None = None,
    download: bool = False,
    device: torch.device | str = "cpu",
) -> LoadedLpips:
    """Load LPIPS version 0.1 with a backbone trained on ImageNet as torchvision distributes it.

    The backbone is looked for in this order: `weights`; torch's hub cache, where torchvision keeps it; torchvision's
    server, when `download` is given; the file that `diffsieve weights lpips` writes. The heads come from the installed
    `lpips` package, whose files are read as data, or from that same file. Nothing is unpickled freely.

    Args:
        net: ``"alex"``, ``"vgg"`` or ``"squeeze"``.
        weights: file with the backbone, .safetensors or .pth, in the names of torchvision.
        download: whether a missing backbone may be fetched from torchvision's server into torch's hub cache.
        device: where it goes.

    Raises:
        MissingWeightsError: no weights were found.
        UserInputError: an unknown net, or a file that is not its weights.
    """
    module = Lpips(net)
    path = _find_backbone(net, weights, download)
    state = _read_state(path, net)
    if not any(name.startswith("heads.") for name in state):
        state |= _read_heads(net)
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise UserInputError(f"{path} does not hold the weights of {net}: {error}") from None
    return LoadedLpips(module.eval().requires_grad_(False).to(device), str(path), _digest(module))


def lpips(
    reference: torch.Tensor,
    test: torch.Tensor,
    *,
    net: str = "alex",
    model: LoadedLpips | None = None,
    weights: str | Path | None = None,
    download: bool = False,
    chunk_size: int = 8,
) -> MetricResult:
    """Return LPIPS per frame and its mean over frames; lower is closer.

    Frames are scaled from [0, 1] to [-1, 1]; float32 on the device of `reference`, or of `model`.

    Args:
        reference: (T, 3, H, W) uint8, or floating point in [0, 1].
        test: same shape.
        net: see `load_lpips`; also `weights` and `download`.
        model: loaded before, instead of these three.
        chunk_size: frames in work at once; bounds the memory, does not change the result.

    Returns:
        The result, named with its net; without a value, and with the reason, when weights are missing or the frames
        are too small.

    Raises:
        UserInputError: see `check_frames` and `load_lpips`.
    """
    check_frames(reference, test)
    if model is None:
        try:
            model = load_lpips(net, weights=weights, download=download, device=reference.device)
        except MissingWeightsError as error:
            return MetricResult.missing(f"lpips[{net}]", str(error), direction="lower")
    name = f"lpips[{model.module.net}]"
    obstacle = too_small(model.module.net, *reference.shape[-2:])
    if obstacle is not None:
        return MetricResult.missing(name, obstacle, direction="lower")
    values: list[float] = []
    for chunk, other in frame_chunks(reference, test, chunk_size):
        values += lpips_per_frame(model.module, chunk, other)
    return MetricResult(name, tuple(values), math.fsum(values) / len(values), "", "lower")


def too_small(net: str, height: int, width: int) -> str | None:
    """Say why frames are too small for the backbone, or `None`."""
    side = SMALLEST_SIDE[net]
    return (
        None if min(height, width) >= side else f"{net} needs at least {side} x {side} pixels, got {height} x {width}"
    )


@torch.no_grad()
def lpips_per_frame(module: Lpips, reference: torch.Tensor, test: torch.Tensor, *, rescale: bool = True) -> list[float]:
    """Return LPIPS of each frame of two chunks (n, 3, H, W) in [0, 1]; `rescale=False` leaves them in that range."""
    device = module.shift.device
    # TF32 would round the products to 10 bits of mantissa.
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False), torch.autocast(device.type, enabled=False):
        x, y = (frames.to(device=device, dtype=torch.float32) for frames in (reference, test))
        return module(2 * x - 1, 2 * y - 1).tolist() if rescale else module(x, y).tolist()


def _find_backbone(net: str, weights: str | Path | None, download: bool) -> Path:
    file, prefix = _TORCHVISION[net]
    if weights is not None:
        path = Path(weights)
        if not path.is_file():
            raise UserInputError(f"weights must be a file, got {path}")
        return path
    cached = Path(torch.hub.get_dir()) / "checkpoints" / file
    if cached.is_file():
        check_sha256(cached.read_bytes(), prefix, str(cached))
        return cached
    if download:
        cached.parent.mkdir(parents=True, exist_ok=True)
        try:
            torch.hub.download_url_to_file(_DOWNLOADS + file, str(cached), hash_prefix=prefix, progress=False)
        except (OSError, RuntimeError) as error:
            raise MissingWeightsError(f"{_DOWNLOADS}{file} could not be downloaded: {error}") from None
        return cached
    converted = converted_lpips(net)
    if converted.is_file():
        return converted
    ways = [
        f"put {file} of torchvision into {cached.parent}",
        "name a file (weights, --lpips-weights)",
        "allow a download (download, --download)",
    ]
    if net != "squeeze":
        ways.insert(0, "run `diffsieve weights lpips`")
    raise MissingWeightsError(f"no weights of {net}: {', or '.join(ways)}")


def _read_state(path: Path, net: str) -> dict[str, torch.Tensor]:
    """Read the convolutions, and the heads if the file has them, in the names of `Lpips`."""
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            state = load_file(path)
        except (SafetensorError, OSError) as error:
            raise UserInputError(f"{path} cannot be read as safetensors: {error}") from None
    else:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged or hostile pickle may raise anything
            raise UserInputError(f"{path} cannot be read as weights: {str(error).splitlines()[0]}") from None
    # The classifier behind the features is not part of LPIPS.
    kept = {name: value for name, value in state.items() if name.startswith(("features.", "heads."))}
    if not kept:
        raise UserInputError(f"{path} does not hold the weights of {net}: no name begins with 'features.'")
    return kept


def _read_heads(net: str) -> dict[str, torch.Tensor]:
    package = find_spec("lpips")  # finds the files; nothing of the package is run
    if package is not None and package.origin is not None:
        path = Path(package.origin).parent / "weights" / "v0.1" / f"{net}.pth"
        state = torch.load(path, map_location="cpu", weights_only=True)
        return {f"heads.{number}": state[f"lin{number}.model.1.weight"] for number in range(len(state))}
    converted = converted_lpips(net)
    if converted.is_file():
        return {name: value for name, value in _read_state(converted, net).items() if name.startswith("heads.")}
    raise MissingWeightsError(f"no heads of lpips[{net}]: install the package lpips (pip install 'diffsieve[eval]')")


def _digest(module: Lpips) -> str:
    found = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        found.update(name.encode())
        found.update(value.cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


__all__ = ["NETS", "LoadedLpips", "MissingWeightsError", "load_lpips", "lpips", "lpips_per_frame", "too_small"]
