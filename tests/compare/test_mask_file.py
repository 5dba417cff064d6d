"""Block masks of a whole run: what is collected, how it is looked up, what is refused."""

import numpy as np
import pytest
import torch

from diffsieve import apply_sparse_attention
from diffsieve.compare import compare, recorded
from diffsieve.compare.mask_file import read_masks, write_masks
from diffsieve.compare.recorded import spread
from diffsieve.errors import UserInputError
from diffsieve.processors import BAAttConfig, recorded_masks
from tests.tiny import HEADS, generate


def masks_of(config, pipe):
    report = compare(config, pipe=pipe)
    clip = report["clips"][0]
    return read_masks(config.out / clip["folder"] / clip["files"]["masks"])


def test_every_sparse_layer_and_step_is_there(pipe, small):
    masks = masks_of(small(save_masks=True), pipe)
    assert masks.layer_names() == ["transformer.blocks.1", "transformer.blocks.2"]
    for layer in masks.layer_names():
        assert masks.steps_of(layer) == [1, 2, 3]
    assert (masks.heads, masks.grid_thw, masks.block_size, masks.num_blocks) == (HEADS, (3, 2, 4), 5, 5)


def test_the_last_step_is_what_the_layer_recorded(pipe, small):
    masks = masks_of(small(save_masks=True), pipe)
    config = {"block_size": 5, "warmup_steps": 1, "min_tokens": 0, "record_masks": (1, 2)}
    apply_sparse_attention(pipe, BAAttConfig(**config))
    generate(pipe, steps=4, guidance=1.0, height=16, num_frames=9)
    for found in recorded_masks(pipe):
        for head in range(HEADS):
            matrix = found.matrix(head).numpy()
            assert np.array_equal(masks.mask(found.layer, 3, head), matrix)
            query, key = found.token_blocks(head)
            for token in ((0, 0, 0), (2, 1, 3), (1, 0, 2)):
                place = int(np.ravel_multi_index(token, masks.grid_thw))
                expected = torch.from_numpy(matrix[query[place]])[key].reshape(masks.grid_thw)
                assert np.array_equal(masks.attended(found.layer, 3, head, token), expected.numpy())
        assert masks.orders_of(found.layer, 3) == found.orders


def test_a_run_without_a_sparse_step_has_no_masks(pipe, small):
    report = compare(small(save_masks=True, warmup=1.0), pipe=pipe)
    assert "masks" not in report["clips"][0]["files"]


def test_steps_are_left_out_where_memory_ends(pipe, small, monkeypatch):
    monkeypatch.setattr(recorded, "MAX_BYTES", 500)
    masks = masks_of(small(save_masks=True, steps=6), pipe)
    for layer in masks.layer_names():
        assert 1 <= len(masks.steps_of(layer)) < 5
        assert masks.steps_of(layer)[-1] == 5


def test_thinned_masks_survive_a_file(pipe, small, tmp_path):
    masks = masks_of(small(save_masks=True), pipe)
    write_masks(tmp_path / "thin.npz", masks.thinned(2))
    thin = read_masks(tmp_path / "thin.npz")
    for layer in masks.layer_names():
        assert thin.steps_of(layer) == [1, 3]
        assert np.array_equal(thin.mask(layer, 3, 1), masks.mask(layer, 3, 1))


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (
            ("nowhere", 1, 0, (0, 0, 0)),
            "layer must be one of transformer.blocks.1, transformer.blocks.2, got 'nowhere'",
        ),
        (("transformer.blocks.1", 0, 0, (0, 0, 0)), "step must be one of 1, 2, 3, got 0"),
        (("transformer.blocks.1", 1, 2, (0, 0, 0)), r"head must be in \[0, 1\], got 2"),
        (("transformer.blocks.1", 1, 0, (3, 0, 0)), r"frame must be in \[0, 2\], got 3"),
        (("transformer.blocks.1", 1, 0, (0, 0, -1)), r"column must be in \[0, 3\], got -1"),
    ],
)
def test_places_that_are_not_there(pipe, small, place, message):
    masks = masks_of(small(save_masks=True), pipe)
    with pytest.raises(UserInputError, match=message):
        masks.attended(*place)


@pytest.mark.parametrize(
    ("count", "expected"), [(0, []), (1, [9]), (2, [0, 9]), (4, [0, 3, 6, 9]), (50, list(range(10)))]
)
def test_spread(count, expected):
    assert spread(range(10), count) == expected
