"""Muon: orthogonal steps, which parameters it takes, and what it refuses."""

import pytest
import torch
from torch import nn

from diffsieve.pipelines.training.muon import Muon, orthogonalise, split_parameters


@pytest.mark.parametrize("shape", [(2, 8, 8), (1, 4, 16), (3, 16, 4)], ids=["square", "wide", "tall"])
def test_singular_values_come_close_to_one(generator, shape):
    # a well-conditioned start; the quintic keeps values within about 30 % of 1
    matrices = torch.randn(shape, generator=generator) + 3 * torch.eye(*shape[1:])
    values = torch.linalg.svdvals(orthogonalise(matrices))
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_the_directions_of_a_matrix_stay(generator):
    matrix = torch.randn(1, 6, 6, generator=generator)
    u, _, vh = torch.linalg.svd(matrix[0])
    turned = u.T @ orthogonalise(matrix)[0] @ vh.T
    assert (turned - turned.diag().diag()).abs().max() < 1e-3


def test_a_step_has_the_size_of_the_learning_rate(generator):
    weight = nn.Parameter(torch.zeros(8, 2, 2, 2))
    weight.grad = torch.randn(weight.shape, generator=generator)
    Muon([weight], lr=0.1).step()
    values = torch.linalg.svdvals(weight.detach().flatten(1)) / 0.1
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_it_lowers_a_loss(generator):
    layer = nn.Linear(6, 5, bias=False)
    x, target = torch.randn(64, 6, generator=generator), torch.randn(64, 5, generator=generator)
    optimizer = Muon(layer.parameters(), lr=0.02, weight_decay=0.01)
    losses = []
    for _ in range(30):
        loss = (layer(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]


def test_vectors_are_refused():
    with pytest.raises(ValueError, match="at least 2 axes"):
        Muon([nn.Parameter(torch.zeros(3))])


def test_parameters_are_split_by_layer():
    model = nn.ModuleDict(
        {"first": nn.Conv3d(3, 4, 3), "hidden": nn.Linear(4, 4), "norm": nn.LayerNorm(4), "last": nn.Linear(4, 2)}
    )
    hidden, other = split_parameters([model], excluded=[model["first"], model["last"]])
    assert [id(p) for p in hidden] == [id(model["hidden"].weight)]
    assert {id(p) for p in hidden} | {id(p) for p in other} == {id(p) for p in model.parameters()}
    assert len(hidden) + len(other) == len(list(model.parameters()))
