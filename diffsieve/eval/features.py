"""Image features for the Fréchet distance, each network under its own name, and their moments over sets of clips."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from ..errors import UserInputError
from .clips import ClipReader
from .frames import to_float64
from .frechet import FeatureMoments, FrechetResult, frechet_result
from .lpips import MissingWeightsError
from .restricted import check_sha256
from .weights import EFFNET_SHA256, effnet_file

NETWORKS = ("effnet-lite0", "inception")
_SHORT_SIDE = 256
_CROP = 224
_MEAN, _STD = 0.498, 0.502
_BATCH = 16


@dataclass(frozen=True)
class FeatureNetwork:
    """A network that turns pictures into feature vectors.

    Args:
        name: goes into the name of every distance.
        dimensions: length of a vector.
        features_of: maps uint8 frames (n, 3, H, W) to (n, dimensions).
        source: file of the weights.
    """

    name: str
    dimensions: int
    features_of: Callable[[torch.Tensor], torch.Tensor]
    source: str


def load_features(
    name: str = "effnet-lite0", *, weights: str | Path | None = None, device: torch.device | str = "cpu"
) -> FeatureNetwork:
    """Load a feature network.

    Args:
        name: ``"effnet-lite0"``, EfficientNet-Lite0 before its classifier, 1280 values, from the file that `diffsieve
            weights effnet` writes and the package timm. ``"inception"``, a TorchScript file given in `weights` that
            takes uint8 frames and `return_features=True`, 2048 values; only this one may be called FID.
        weights: file; for ``"effnet-lite0"`` the one of the package, at another place.
        device: where it goes.

    Raises:
        MissingWeightsError: the weights or timm are missing.
        UserInputError: an unknown name, or a file that is not its weights.
    """
    if name not in NETWORKS:
        raise UserInputError(f"name must be one of {', '.join(NETWORKS)}, got {name!r}")
    if name == "inception":
        return _inception(weights, torch.device(device))
    path = Path(weights) if weights is not None else effnet_file()
    if not path.is_file():
        raise MissingWeightsError(f"no weights of {name} at {path}: run `diffsieve weights effnet`")
    if find_spec("timm") is None:
        raise MissingWeightsError(f"{name} needs the package timm: pip install 'diffsieve[eval]'")
    check_sha256(path.read_bytes(), EFFNET_SHA256, str(path))
    return _effnet(path, torch.device(device))


def frechet(
    reference: Iterable[ClipReader], test: Iterable[ClipReader], network: FeatureNetwork, *, name: str | None = None
) -> FrechetResult:
    """Return the Fréchet distance of the frames of two sets of clips.

    Args:
        reference: the dense clips.
        test: the clips to compare; they need not be pairs.
        network: see `load_features`.
        name: of the result; default ``"fd-frames[...]"`` with the network, which suits frames of videos.
    """
    whole, halves = FeatureMoments(network.dimensions), tuple(FeatureMoments(network.dimensions) for _ in range(2))
    # Halves by clips: neighbouring frames of one clip are no independent samples.
    for number, clip in enumerate(reference):
        for features in _clip_features(clip, network):
            whole.update(features)
            halves[number % 2].update(features)
    other = FeatureMoments(network.dimensions)
    for clip in test:
        for features in _clip_features(clip, network):
            other.update(features)
    return frechet_result(name or f"fd-frames[{network.name}]", whole, other, (halves[0], halves[1]))


def _clip_features(clip: ClipReader, network: FeatureNetwork) -> Iterable[torch.Tensor]:
    frames = clip.frames()
    while batch := list(islice(frames, _BATCH)):
        levels = (to_float64(torch.stack(batch)) * 255.0).round().clamp(0, 255).to(torch.uint8)
        yield network.features_of(levels)


def _effnet(path: Path, device: torch.device) -> FeatureNetwork:
    import timm

    # The plain variant pads symmetrically, takes the same weights without complaint, and gives other features.
    module: Any = timm.create_model("tf_efficientnet_lite0", pretrained=False)
    loaded = torch.load(path, map_location="cpu", weights_only=True)
    # Names differ between the two; order and shapes do not.
    target = {k: v for k, v in module.state_dict().items() if not k.endswith("num_batches_tracked")}
    values = [v for k, v in loaded.items() if not k.endswith("num_batches_tracked")]
    if [v.shape for v in values] != [v.shape for v in target.values()]:
        raise UserInputError(f"{path} does not fit timm's tf_efficientnet_lite0")
    module.load_state_dict(dict(zip(target, values, strict=True)), strict=False)
    module.eval().requires_grad_(False).to(device)

    @torch.no_grad()
    def features_of(frames: torch.Tensor) -> torch.Tensor:
        inputs = torch.stack([prepare(frame) for frame in frames]).to(device)
        return module.forward_head(module.forward_features(inputs), pre_logits=True).cpu()

    return FeatureNetwork("effnet-lite0", 1280, features_of, str(path))


def prepare(frame: torch.Tensor) -> torch.Tensor:
    """Resize the short side of a uint8 frame (3, H, W) to 256 (bicubic, antialiased), crop 224, normalise."""
    from PIL import Image

    image = Image.fromarray(frame.permute(1, 2, 0).contiguous().cpu().numpy())
    scale = _SHORT_SIDE / min(image.size)
    width, height = (max(_SHORT_SIDE, round(side * scale)) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = round((width - _CROP) / 2), round((height - _CROP) / 2)
    pixels = torch.frombuffer(
        bytearray(image.crop((left, top, left + _CROP, top + _CROP)).tobytes()), dtype=torch.uint8
    )
    return (pixels.view(_CROP, _CROP, 3).permute(2, 0, 1).float() / 255.0 - _MEAN) / _STD


def _inception(weights: str | Path | None, device: torch.device) -> FeatureNetwork:
    if weights is None:
        raise MissingWeightsError("inception needs a TorchScript file from you: it is in no package")
    path = Path(weights)
    if not path.is_file():
        raise UserInputError(f"weights must be a file, got {path}")
    try:
        module = torch.jit.load(str(path), map_location=device).eval()
    except RuntimeError as error:
        raise UserInputError(f"{path} cannot be read as TorchScript: {str(error).splitlines()[0]}") from None

    @torch.no_grad()
    def features_of(frames: torch.Tensor) -> torch.Tensor:
        return module(frames.to(device), return_features=True).cpu()

    return FeatureNetwork("inception", 2048, features_of, str(path))
