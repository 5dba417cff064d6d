"""Muon: momentum steps made orthogonal, for matrices and convolution kernels.

Method after Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks": the momentum of a matrix is
replaced by the nearest (semi-)orthogonal matrix, found by a quintic Newton-Schulz iteration: in bfloat16 on a GPU,
where that is enough and fast, in float32 elsewhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

# coefficients of the odd quintic a x + b x^3 + c x^5: steep at 0, values near 1 stay within about [0.7, 1.2]
_QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices: torch.Tensor, iterations: int = 5) -> torch.Tensor:
    """Bring the singular values of each matrix close to 1.

    Args:
        matrices: (N, R, C), any floating dtype.
        iterations: Newton-Schulz steps.

    Returns:
        (N, R, C) in bfloat16 on a GPU, else float32; singular values within about [0.7, 1.2], apart from those that
        were zero.
    """
    a, b, c = _QUINTIC
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.transpose(1, 2) if tall else matrices
    x = x / (torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True) + 1e-7)
    x = x.to(torch.bfloat16 if x.is_cuda else torch.float32)
    for _ in range(iterations):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.transpose(1, 2) if tall else x


class Muon(torch.optim.Optimizer):
    """Optimiser for parameters of two or more axes; a kernel (O, I, ...) counts as the matrix (O, I * ...).

    Args:
        params: Parameters.
        lr: Spectral size of a step on a wide or square matrix; a tall one gets `sqrt(rows / columns)` times as much.
        momentum: Nesterov momentum.
        weight_decay: Decoupled, relative to `lr`.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float = 0.02, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        params = list(params)
        if any(parameter.ndim < 2 for parameter in params):
            raise ValueError("params must have at least 2 axes; give vectors and scalars to another optimiser")
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[(parameter.shape[0], parameter[0].numel())].append(parameter)
            for shape, parameters in by_shape.items():
                self._step_shape(group, shape, parameters)

    def _step_shape(self, group: dict[str, Any], shape: tuple[int, int], parameters: list[nn.Parameter]) -> None:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        weights: list[torch.Tensor] = [*parameters]
        for parameter in parameters:
            if "momentum" not in self.state[parameter]:
                self.state[parameter]["momentum"] = torch.zeros_like(parameter)
        momenta = [self.state[parameter]["momentum"] for parameter in parameters]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        looked_ahead = torch._foreach_lerp(gradients, momenta, group["momentum"])
        updates = orthogonalise(torch.stack([update.reshape(shape) for update in looked_ahead]))
        scale = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
        if group["weight_decay"]:
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        steps = [
            update.to(parameter.dtype).view_as(parameter) for update, parameter in zip(updates, parameters, strict=True)
        ]
        torch._foreach_add_(weights, steps, alpha=-scale)


def split_parameters(
    modules: Iterable[nn.Module], excluded: Iterable[nn.Module] = ()
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Weights of hidden linear and convolution layers for Muon, everything else for AdamW.

    Args:
        modules: Modules to train.
        excluded: Layers, anywhere below `modules`, that AdamW keeps: input and output layers and embeddings of
            conditions.

    Returns:
        Parameters for Muon and for AdamW, in a fixed order.
    """
    kept = {id(inner) for layer in excluded for inner in layer.modules()}
    hidden: dict[int, nn.Parameter] = {}
    everything: dict[int, nn.Parameter] = {}
    for module in modules:
        for layer in module.modules():
            if isinstance(layer, (nn.Linear, nn.Conv2d, nn.Conv3d)) and id(layer) not in kept:
                weight: Any = layer.weight
                hidden[id(weight)] = weight
        everything.update((id(parameter), parameter) for parameter in module.parameters())
    return list(hidden.values()), [parameter for key, parameter in everything.items() if key not in hidden]
