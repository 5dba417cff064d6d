"""LPIPS 0.1 as a module (Zhang et al., CVPR 2018): backbone, unit-length features, weighted squared difference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..errors import UserInputError

NETS = ("alex", "vgg", "squeeze")

TAPS = {
    "alex": (1, 4, 7, 9, 11),
    "vgg": (3, 8, 15, 22, 29),
    "squeeze": (1, 4, 7, 9, 10, 11, 12),
}
"""Layers whose outputs are compared, by their index in torchvision's `features`."""

CHANNELS = {
    "alex": (64, 192, 384, 256, 256),
    "vgg": (64, 128, 256, 512, 512),
    "squeeze": (64, 128, 256, 384, 384, 512, 512),
}

SMALLEST_SIDE = {"alex": 31, "vgg": 16, "squeeze": 17}
"""Frames need this many pixels on both sides, so that the last pooling still has an output."""

_SHIFT = (-0.030, -0.088, -0.188)
_SCALE = (0.458, 0.448, 0.450)
_EPSILON = 1e-10


class Lpips(nn.Module):
    """Perceptual distance of pairs of frames, 0 for equal ones; the weights are random until they are loaded.

    Args:
        net: backbone, ``"alex"``, ``"vgg"`` (VGG16) or ``"squeeze"`` (SqueezeNet 1.1). The state dict has the names of
            torchvision (`features.0.weight`, ...) and the heads as `heads.0` ... of shape (1, C, 1, 1).

    Raises:
        UserInputError: an unknown net.
    """

    shift: torch.Tensor
    scale: torch.Tensor

    def __init__(self, net: str = "alex") -> None:
        super().__init__()
        if net not in NETS:
            raise UserInputError(f"net must be one of {', '.join(NETS)}, got {net!r}")
        self.net = net
        self.features = _BACKBONES[net]()
        self.heads = nn.ParameterList([nn.Parameter(torch.rand(1, c, 1, 1) / c) for c in CHANNELS[net]])
        self.register_buffer("shift", torch.tensor(_SHIFT).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("scale", torch.tensor(_SCALE).view(1, 3, 1, 1), persistent=False)
        self.eval().requires_grad_(False)

    def forward(self, reference: torch.Tensor, test: torch.Tensor) -> torch.Tensor:
        """Return the distances (B,).

        Args:
            reference: (B, 3, H, W) float32; in [-1, 1] by the definition.
            test: same shape.
        """
        distance = reference.new_zeros(reference.shape[0])
        taps = TAPS[self.net]
        x, y = ((frames - self.shift) / self.scale for frames in (reference, test))
        for index, layer in enumerate(self.features):
            x, y = layer(x), layer(y)
            if index in taps:
                squared = (_unit_length(x) - _unit_length(y)).square()
                weighted = (squared * self.heads[taps.index(index)]).sum(dim=1)
                distance = distance + weighted.mean(dim=(1, 2))
        return distance


def _unit_length(features: torch.Tensor) -> torch.Tensor:
    """Divide every position of (B, C, H, W) by its length over the channels."""
    return features / (features.square().sum(dim=1, keepdim=True).sqrt() + _EPSILON)


class _Fire(nn.Module):
    """Squeeze to few channels, then expand with 1 x 1 and 3 x 3 convolutions side by side."""

    def __init__(self, channels: int, squeezed: int, expanded: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(channels, squeezed, 1)
        self.expand1x1 = nn.Conv2d(squeezed, expanded, 1)
        self.expand3x3 = nn.Conv2d(squeezed, expanded, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.squeeze(x).relu()
        return torch.cat([self.expand1x1(x).relu(), self.expand3x3(x).relu()], dim=1)


# ReLU out of place everywhere: a tap must not change after it is taken.
def _alex() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 64, 11, stride=4, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(64, 192, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(192, 384, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(384, 256, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(256, 256, 3, padding=1),
        nn.ReLU(),
    )


def _vgg() -> nn.Sequential:
    blocks: Sequence[Sequence[int]] = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
    layers: list[nn.Module] = []
    channels = 3
    for number, block in enumerate(blocks):
        if number:
            layers.append(nn.MaxPool2d(2, 2))
        for width in block:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
    return nn.Sequential(*layers)


def _squeeze() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, stride=2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        _Fire(64, 16, 64),
        _Fire(128, 16, 64),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        _Fire(128, 32, 128),
        _Fire(256, 32, 128),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        _Fire(256, 48, 192),
        _Fire(384, 48, 192),
        _Fire(384, 64, 256),
        _Fire(512, 64, 256),
    )


_BACKBONES = {"alex": _alex, "vgg": _vgg, "squeeze": _squeeze}
