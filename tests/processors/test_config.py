"""BAAttConfig: presets, validation, round trip."""

import dataclasses
import json

import pytest

from diffsieve import BAAttConfig, BAAttProcessor, UserInputError
from diffsieve.kernels.ba_att import kept_blocks
from diffsieve.processors.ba_att import kernel_arguments


def test_default_preset():
    config = BAAttConfig()
    assert (config.sparsity, config.density, config.kept) == (0.5, None, 0.5)
    assert (config.warmup_steps, config.dense_layers, config.order, config.calibrates) == (0.2, (0,), "auto", True)
    assert (config.beta, config.cov_layers, config.center_keys, config.log_count) == ("auto", "all", True, True)
    assert config.descending is True


@pytest.mark.parametrize(
    ("options", "weight"),
    [
        ({}, 1.0),
        ({"sparsity": 0.6}, 1.0),
        ({"density": 0.4}, 1.0),
        ({"sparsity": 0.61}, 0.5),
        ({"sparsity": 0.9}, 0.5),
        ({"score": "moments"}, 0.5),
        ({"score": "halfk"}, 0.5),
        ({"top_p": 0.9}, 0.5),
        ({"beta": 0.7, "sparsity": 0.9}, 0.7),
        ({"preset": "paper", "sparsity": 0.9}, 1.0),
        ({"preset": "paper", "beta": "auto"}, 0.5),
    ],
)
def test_weight_of_the_second_order_term_goes_by_score_and_sparsity(options, weight):
    config = BAAttConfig(**options)
    assert config.second_order_weight == weight
    selection, _ = kernel_arguments(config, second_order=True)
    assert selection["beta"] == weight


def test_the_automatic_weight_follows_a_changed_sparsity():
    assert dataclasses.replace(BAAttConfig(), sparsity=0.9).second_order_weight == 0.5
    assert BAAttConfig.from_dict(BAAttConfig(sparsity=0.9).to_dict()) == BAAttConfig(sparsity=0.9)


def test_paper_preset():
    config = BAAttConfig(preset="paper")
    assert (config.warmup_steps, config.dense_layers, config.order, config.calibrates) == (10, (), "norm_sort", False)
    assert (config.beta, config.cov_layers, config.center_keys, config.log_count) == (1.0, "ends", False, False)
    assert config.descending is False


def test_given_fields_win_over_the_preset():
    config = BAAttConfig(preset="paper", beta=0.5, dense_layers=[0, -1], density=0.4)
    assert (config.beta, config.dense_layers, config.kept, config.sparsity) == (0.5, (0, -1), 0.4, None)
    assert config.order == "norm_sort"


def test_repr_shows_the_values_in_force():
    assert "order='norm_sort'" in repr(BAAttConfig(preset="paper"))
    assert "None" not in repr(BAAttConfig().warmup_steps)


@pytest.mark.parametrize(
    ("options", "shares", "calibrates"),
    [
        ({}, True, True),
        ({"budgets": "equal"}, False, False),
        ({"preset": "paper"}, False, False),
        ({"budgets": "auto", "preset": "paper"}, True, True),
        ({"budgets": "auto", "order": "hilbert"}, True, True),
        ({"budgets": "auto", "orders": {"blocks.1": ["raster"]}}, True, False),
        ({"budgets": "auto", "top_p": 0.9}, False, False),
        ({"budgets": "auto", "density": 1.0}, False, False),
    ],
)
def test_where_heads_share_their_blocks(options, shares, calibrates):
    config = BAAttConfig(**options)
    assert (config.shares_blocks, config.calibrates_budgets) == (shares, calibrates)


@pytest.mark.parametrize(
    "config",
    [
        BAAttConfig(),
        BAAttConfig(budgets="auto", order="hilbert"),
        BAAttConfig(preset="paper", density=0.25, record_masks=(1,)),
        BAAttConfig(orders={"blocks.1": ["raster", "hilbert"]}, warmup_steps=3, top_p=0.9, min_density=0.1),
    ],
    ids=["default", "budgets", "paper", "orders"],
)
def test_round_trip_through_json(config):
    assert BAAttConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("percent", range(0, 100, 5))
def test_sparsity_and_density_keep_the_same_blocks(percent):
    sparse, dense = BAAttConfig(sparsity=percent / 100), BAAttConfig(density=(100 - percent) / 100)
    counts = range(1, 700)
    assert [kept_blocks(n, sparse.kept) for n in counts] == [kept_blocks(n, dense.kept) for n in counts]


def test_a_sparsity_just_below_one_keeps_a_block():
    assert 0 < BAAttConfig(sparsity=1 - 2**-53).kept < 1e-9


def test_replace_keeps_the_other_fields():
    config = dataclasses.replace(BAAttConfig(preset="paper"), sparsity=0.75)
    assert (config.kept, config.order) == (0.25, "norm_sort")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sparsity": 1.0}, ["sparsity", "[0, 1)", "1.0"]),
        ({"sparsity": -0.1}, ["sparsity", "-0.1"]),
        ({"density": 1.5}, ["density", "(0, 1]", "1.5"]),
        ({"density": 0}, ["density", "0"]),
        ({"density": float("nan")}, ["density", "nan"]),
        ({"sparsity": "half"}, ["sparsity", "'half'"]),
        ({"sparsity": 0.5, "density": 0.5}, ["sparsity or density, not both"]),
        ({"block_size": 0}, ["block_size", ">= 1", "0"]),
        ({"block_size": 10**20}, ["block_size", "at most 65536", str(10**20)]),
        ({"block_size": 12.5}, ["block_size", "12.5"]),
        ({"block_size": True}, ["block_size", "True"]),
        ({"warmup_steps": -1}, ["warmup_steps", "-1"]),
        ({"warmup_steps": 1.5}, ["warmup_steps", "whole number of steps or a float share", "1.5"]),
        ({"warmup_until_sigma": -1.0}, ["warmup_until_sigma", "-1.0"]),
        ({"warmup_until_timestep": "900"}, ["warmup_until_timestep", "'900'"]),
        ({"preset": "fast"}, ["preset", "default, paper", "'fast'"]),
        ({"backend": "cuda"}, ["backend", "triton", "'cuda'"]),
        ({"order": "zigzag"}, ["order", "auto", "raster", "'zigzag'"]),
        ({"cov_layers": "some"}, ["cov_layers", "ends", "'some'"]),
        ({"budgets": "measured"}, ["budgets", "equal, auto", "'measured'"]),
        ({"score": "mean"}, ["score", "halfk", "'mean'"]),
        ({"compensate": True}, ["compensate", "centroid", "True"]),
        ({"text": "drop"}, ["text", "keep", "'drop'"]),
        ({"dense_layers": 3}, ["dense_layers", "tuple", "3"]),
        ({"dense_layers": (0.5,)}, ["dense_layers", "0.5"]),
        ({"record_masks": "0"}, ["record_masks", "'0'"]),
        ({"window": 200}, ["window", "multiple of block_size (128)", "200"]),
        ({"beta": -1}, ["beta", '>= 0 or "auto"', "-1"]),
        ({"beta": "half"}, ["beta", '>= 0 or "auto"', "'half'"]),
        ({"top_p": 1.2}, ["top_p", "1.2"]),
        ({"top_p": 0.9, "beta": 1.0}, ["top_p", "beta < 1", "1.0"]),
        ({"min_density": 0.3}, ["min_density", "top_p"]),
        ({"top_p": 0.9, "min_density": 0.7}, ["min_density", "[0, 0.5]", "0.7"]),
        ({"min_tokens": -5}, ["min_tokens", "-5"]),
        ({"center_keys": 1}, ["center_keys", "True or False", "1"]),
        ({"orders": 7}, ["orders", "path or a dict", "int"]),
        ({"sparsty": 0.5}, ["'sparsty'", "sparsity"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_wrong_values_are_named(options, words):
    with pytest.raises(UserInputError) as caught:
        BAAttConfig.from_dict(options)
    for word in words:
        assert word in str(caught.value)


def test_processor_takes_a_config_or_options():
    assert BAAttProcessor(sparsity=0.75).config == BAAttConfig(sparsity=0.75)
    assert BAAttProcessor(BAAttConfig(preset="paper")).config.preset == "paper"
    with pytest.raises(UserInputError, match="not both"):
        BAAttProcessor(BAAttConfig(), sparsity=0.5)
    with pytest.raises(UserInputError, match="BAAttConfig, got dict"):
        BAAttProcessor({"sparsity": 0.5})  # type: ignore[arg-type]


def test_top_p_ranks_by_mass():
    assert BAAttConfig().score == "residual"
    assert BAAttConfig(top_p=0.9).score == "moments"
    assert BAAttConfig(top_p=0.9, score="halfk").score == "halfk"
    with pytest.raises(UserInputError, match=r'top_p needs a score that predicts mass, .* got score="residual"'):
        BAAttConfig(top_p=0.9, score="residual")
