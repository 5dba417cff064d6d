"""Fréchet distance of two sets of features (Dowson and Landau 1982), from streamed moments in float64."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..errors import UserInputError


class FeatureMoments:
    """Mean and covariance of feature vectors that come in batches; batches are not kept.

    Args:
        dimensions: length of a feature vector.
    """

    def __init__(self, dimensions: int) -> None:
        self.count = 0
        self.mean = torch.zeros(dimensions, dtype=torch.float64)
        self._scatter = torch.zeros(dimensions, dimensions, dtype=torch.float64)

    def update(self, features: torch.Tensor) -> None:
        """Take a batch (n, dimensions); the moments of both parts are merged (Chan, Golub, LeVeque 1983).

        Raises:
            UserInputError: another shape, or values that are not finite.
        """
        if features.ndim != 2 or features.shape[1] != len(self.mean):
            raise UserInputError(f"features must have shape (n, {len(self.mean)}), got {tuple(features.shape)}")
        if not features.shape[0]:
            return
        batch = features.detach().to("cpu", torch.float64)
        if not torch.isfinite(batch).all():
            raise UserInputError("features must be finite, got NaN or infinity")
        count, mean = batch.shape[0], batch.mean(dim=0)
        centred = batch - mean
        shift, total = mean - self.mean, self.count + count
        self._scatter += centred.T @ centred + torch.outer(shift, shift) * (self.count * count / total)
        self.mean = self.mean + shift * (count / total)
        self.count = total

    @property
    def covariance(self) -> torch.Tensor:
        """Return the unbiased covariance (n - 1), (dimensions, dimensions)."""
        if self.count < 2:
            raise UserInputError(f"a covariance needs at least 2 samples, got {self.count}")
        return self._scatter / (self.count - 1)


@dataclass(frozen=True)
class FrechetResult:
    """A Fréchet distance and the sample counts it rests on.

    Args:
        name: with the feature network, such as ``"fd[effnet-lite0]"``.
        value: the distance, or `None`.
        reference_samples: of the dense side.
        test_samples: of the other side.
        features: length of a feature vector.
        floor: the distance of two disjoint halves of the reference, or `None` where they are too small.
        reason: why there is no value.
    """

    name: str
    value: float | None
    reference_samples: int
    test_samples: int
    features: int
    floor: float | None = None
    reason: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def frechet_distance(
    mean_1: torch.Tensor, covariance_1: torch.Tensor, mean_2: torch.Tensor, covariance_2: torch.Tensor
) -> float:
    """Return `|m1 - m2|^2 + tr(S1 + S2 - 2 (S1 S2)^(1/2))` of two normal laws, in float64.

    The root term is the sum of the square roots of the eigenvalues of `R S2 R` with `R` the symmetric root of `S1`: it
    equals the trace of the root of the product, and needs symmetric solvers only.

    Args:
        mean_1: (d,).
        covariance_1: (d, d), symmetric, positive semi-definite.
        mean_2: (d,).
        covariance_2: (d, d).
    """
    m1, s1, m2, s2 = (value.to("cpu", torch.float64) for value in (mean_1, covariance_1, mean_2, covariance_2))
    values, vectors = torch.linalg.eigh(s1)
    root = (vectors * values.clamp_min(0.0).sqrt()) @ vectors.T
    product = root @ s2 @ root
    overlap = torch.linalg.eigvalsh((product + product.T) / 2).clamp_min(0.0).sqrt().sum()
    return float((m1 - m2).square().sum() + s1.trace() + s2.trace() - 2 * overlap)


def frechet_result(
    name: str,
    reference: FeatureMoments,
    test: FeatureMoments,
    halves: tuple[FeatureMoments, FeatureMoments] | None = None,
) -> FrechetResult:
    """Return the distance when both sides have at least twice as many samples as features, else the reason.

    The estimate is biased upwards for few samples: compare models at equal counts only, and read the floor beside it.

    Args:
        name: for the result.
        reference: moments of the dense side.
        test: moments of the other side.
        halves: moments of two disjoint halves of the reference, for the floor.
    """
    dimensions = len(reference.mean)
    counts = reference.count, test.count, dimensions
    obstacle = too_few(name, *counts)
    if obstacle is not None:
        return obstacle
    enough = halves is not None and min(half.count for half in halves) >= 2 * dimensions
    floor = _distance(*halves) if halves is not None and enough else None
    return FrechetResult(name, _distance(reference, test), *counts, floor=floor)


def too_few(name: str, reference_samples: int, test_samples: int, features: int) -> FrechetResult | None:
    """Return a result without a value when a side has fewer samples than twice the features, else `None`."""
    if min(reference_samples, test_samples) >= 2 * features:
        return None
    reason = f"{name} needs at least {2 * features} samples on each side, got {reference_samples} and {test_samples}"
    return FrechetResult(name, None, reference_samples, test_samples, features, reason=reason)


def _distance(one: FeatureMoments, other: FeatureMoments) -> float:
    return frechet_distance(one.mean, one.covariance, other.mean, other.covariance)
