"""LLSA: levels, pyramid, choice of keys, its transpose, its picture."""

from dataclasses import replace

import pytest
import torch

from diffsieve import UserInputError
from diffsieve.kernels.llsa import hierarchical_topk, llsa_selection_map, pyramid, resolve_levels, transpose_index
from diffsieve.kernels.llsa.levels import kept_per_level, level_lengths
from diffsieve.kernels.llsa.pyramid import fold_pyramid
from diffsieve.kernels.llsa.reference import token_weights
from diffsieve.kernels.orders import morton_order
from tests.kernels import llsa_cases
from tests.kernels.llsa_cases import BASE, CASES

BACKENDS = ["reference", "torch"]


@pytest.mark.parametrize(
    ("levels", "length", "block", "expected"),
    [
        ("auto", 5, 16, 1),
        ("auto", 16_384, 16, 1),
        ("auto", 16_385, 16, 2),
        ("auto", 262_143, 16, 2),
        ("auto", 262_144, 16, 3),
        ("paper", 4_096, 16, 2),
        ("paper", 16_384, 16, 2),
        ("paper", 65_536, 16, 3),
        ("paper", 300, 16, 1),
        (3, 203, 4, 3),
        (4, 203, 4, 4),
        (3, 3, 4, 1),
    ],
)
def test_number_of_levels(levels, length, block, expected):
    assert resolve_levels(levels, length, block) == expected


@pytest.mark.parametrize(
    ("levels", "message"),
    [
        (0, r"levels must be an int in \[1, 4\]"),
        (5, r"levels must be an int in \[1, 4\]"),
        (True, r"levels must be an int in \[1, 4\]"),
        (2, "levels must be at most 1 for 16 tokens in blocks of 16"),
    ],
)
def test_levels_that_do_not_fit(levels, message):
    with pytest.raises(UserInputError, match=message):
        resolve_levels(levels, 16, 16)


@pytest.mark.parametrize("levels", ["auto", "paper", 1])
@pytest.mark.parametrize("block", [1, 0, -4])
def test_blocks_that_pool_nothing_have_no_levels(levels, block):
    """`"paper"` would count levels for ever."""
    with pytest.raises(UserInputError, match=f"block_size must be at least 2, got {block}"):
        resolve_levels(levels, 100, block)
    with pytest.raises(UserInputError, match="length must be at least 1, got 0"):
        resolve_levels(levels, 0, 16)


def test_keys_per_level_are_clamped_to_the_candidates():
    lengths = level_lengths(203, 4, 3)
    assert lengths == [203, 51, 13, 4]
    assert kept_per_level(99, lengths, 4) == [51, 13, 4]
    assert kept_per_level(1, lengths, 4) == [1, 1, 1]
    assert kept_per_level([20, 6, 1], lengths, 4) == [16, 4, 1]


@pytest.mark.parametrize("length", [1, 5, 64, 97, 203])
def test_pyramid_holds_means_of_raw_tokens(length):
    x = torch.randn(2, 3, length, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    levels = pyramid(x, block_size=4, levels=3)
    assert levels[0] is x
    for level, pooled in enumerate(levels):
        span = 4**level
        expected = torch.stack([x[:, :, s : s + span].mean(2) for s in range(0, length, span)], dim=2)
        torch.testing.assert_close(pooled, expected, rtol=1e-12, atol=1e-12)


def test_pyramid_of_low_precision_is_summed_in_fp32():
    x = torch.randn(1, 1, 1_000, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    pooled = pyramid(x, block_size=64, levels=1)[1]
    assert pooled.dtype == torch.float32
    torch.testing.assert_close(pooled[0, 0, 0], x[0, 0, :64].double().mean(0).float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.ones(2, 97, 5)}, r"x must be 4-dimensional, got \(2, 97, 5\)"),
        ({"x": torch.ones(1, 2, 0, 5)}, r"x must be not empty, got \(1, 2, 0, 5\)"),
        ({"x": torch.ones(1, 2, 97, 5).int()}, "x must be floating point, got torch.int32"),
        ({"block_size": 0}, "block_size must be an int >= 2, got 0"),
        ({"levels": 0}, r"levels must be an int in \[1, 4\], got 0"),
        ({"levels": "auto"}, r"levels must be an int in \[1, 4\], got 'auto'"),
    ],
)
def test_pyramid_refuses(changes, message):
    with pytest.raises(UserInputError, match=message):
        pyramid(**{"x": torch.ones(1, 2, 97, 5), "block_size": 4, "levels": 2} | changes)


def test_folding_is_the_gradient_of_the_pyramid():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, 97, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    levels = pyramid(x, block_size=4, levels=3)
    grads = [torch.randn(level.shape, dtype=torch.float64, generator=generator) for level in levels]
    expected = torch.autograd.grad(sum((a * b).sum() for a, b in zip(levels, grads, strict=True)), x)[0]
    actual = fold_pyramid(grads, length=97, block_size=4)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_choice_equals_a_search_in_plain_python(case, backend):
    case = replace(case, batch=1, heads=2, kv_heads=1, dim=4)
    query, key, _ = llsa_cases.make_inputs(case, dtype=torch.float64)
    depth = resolve_levels(case.levels, case.length, case.block_size)
    indices = hierarchical_topk(query, key, **case.selection, backend=backend)
    pooled_q, pooled_k = (pyramid(x, block_size=case.block_size, levels=depth) for x in (query, key))
    assert [index.shape[2] for index in indices] == [x.shape[2] for x in pooled_q[1:]]
    for level in range(depth, 0, -1):
        scores = (pooled_q[level][0, 1] @ pooled_k[level][0, 0].T).tolist()
        wanted = case.topk if isinstance(case.topk, int) else case.topk[level - 1]
        for i, row in enumerate(indices[level - 1][0, 1].tolist()):
            candidates = range(len(scores))
            if level < depth:
                above = indices[level][0, 1, i // case.block_size].tolist()
                candidates = [j for j in candidates if j // case.block_size in above]
            best = sorted(sorted(candidates, key=lambda j: (-scores[i][j], j))[:wanted])
            assert row == best + [-1] * (len(row) - len(best))


@pytest.mark.parametrize("backend", BACKENDS)
def test_ties_go_to_the_lowest_index(backend):
    query = key = torch.ones(1, 1, 203, 4)
    indices = hierarchical_topk(query, key, block_size=4, topk=3, levels=2, backend=backend)
    assert (indices[1] == torch.tensor([0, 1, 2])).all()
    assert (indices[0] == torch.tensor([0, 1, 2])).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_topk_per_level(backend):
    query, key, _ = llsa_cases.make_inputs(replace(BASE, length=203), dtype=torch.float32)
    indices = hierarchical_topk(query, key, block_size=4, topk=(5, 2, 1), levels=3, backend=backend)
    assert [index.shape[-1] for index in indices] == [5, 2, 1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["query", "key"])
def test_bad_values_never_choose_what_is_not_there(where, bad):
    query, key, _ = llsa_cases.make_inputs(replace(BASE, length=203), dtype=torch.float32)
    query, key = query.detach(), key.detach()
    (query if where == "query" else key)[0, 0, 50] = bad
    both = [hierarchical_topk(query, key, block_size=4, topk=6, levels=3, backend=name) for name in BACKENDS]
    for reference, index in zip(*both, strict=True):
        assert torch.equal(reference, index)
        assert index.max() < index.shape[2]
        assert (index[..., 0] >= 0).all()
        assert ((index[..., 1:] > index[..., :-1]) | (index[..., 1:] == -1)).all()


def test_transpose_lists_queries_by_key():
    index = torch.tensor([[[[0, 2, -1], [2, 3, -1], [0, 2, 3], [2, -1, -1]]]], dtype=torch.int32)
    offsets, queries = transpose_index(index, 5)
    assert offsets.tolist() == [[[0, 2, 2, 6, 8, 8]]]  # nobody keeps 1 and 4, everybody keeps 2
    assert queries.tolist() == [[[0, 2, 0, 1, 2, 3, 1, 2, -1, -1, -1, -1]]]
    assert offsets.dtype == queries.dtype == torch.int32


@pytest.mark.parametrize("num_keys", [1, 7, 40])
def test_transpose_equals_that_of_a_matrix(num_keys):
    generator = torch.Generator().manual_seed(0)
    width = min(num_keys, 5)
    index = torch.rand(2, 3, 23, num_keys, generator=generator).argsort(-1)[..., :width].int()
    index = torch.where(torch.rand(index.shape, generator=generator) < 0.2, -1, index)
    offsets, queries = transpose_index(index, num_keys)
    for batch in range(2):
        for head in range(3):
            for key in range(num_keys):
                expected = (index[batch, head] == key).any(-1).nonzero()[:, 0].tolist()
                first, last = offsets[batch, head, key : key + 2].tolist()
                assert queries[batch, head, first:last].tolist() == expected
    shuffled = index[..., torch.randperm(width, generator=generator)]
    assert all(torch.equal(a, b) for a, b in zip(transpose_index(shuffled, num_keys), (offsets, queries), strict=True))


@pytest.mark.parametrize(
    ("index", "num_keys", "message"),
    [
        (torch.zeros(1, 3, 2).int(), 5, r"index must be 4-dimensional, got \(1, 3, 2\)"),
        (torch.zeros(1, 1, 3, 2).long(), 5, "index must be int32, got int64"),
        (torch.full((1, 1, 3, 2), 5).int(), 5, "index must be less than num_keys, 5, got 5"),
        (torch.zeros(1, 1, 3, 2).int(), 0, r"num_keys must be an int in \[1, 2147483646\], got 0"),
        (torch.zeros(1, 1, 3, 2).int(), 2.5, r"num_keys must be an int in \[1, 2147483646\], got 2.5"),
    ],
)
def test_transpose_refuses(index, num_keys, message):
    with pytest.raises(UserInputError, match=message):
        transpose_index(index, num_keys)


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_selection_map_tells_the_finest_level(levels):
    case = replace(BASE, length=203, block_size=4, levels=levels)
    query, key, _ = llsa_cases.make_inputs(case, dtype=torch.float32)
    indices = hierarchical_topk(query, key, **case.selection)
    positions = [0, 77, 202]
    actual = llsa_selection_map(indices, positions, length=203, block_size=4)
    assert actual.dtype == torch.int8
    weights = token_weights(indices, length=203, block_size=4, enrich=True, disjoint=False)
    tokens = torch.arange(203)
    for level in range(levels + 1):  # the weights say of each level by itself what is attended
        attended = (weights[level] > 0)[:, :, positions][..., tokens // 4**level]
        assert torch.equal(attended, actual <= level)


def test_selection_map_in_raster_order():
    grid = (1, 9, 7)
    order = morton_order(grid)
    case = replace(BASE, length=63, block_size=4, levels=2)
    query, key, _ = llsa_cases.make_inputs(case, dtype=torch.float32)
    indices = hierarchical_topk(query, key, **case.selection)
    plain = llsa_selection_map(indices, order.argsort()[[5, 60]], length=63, block_size=4)
    raster = llsa_selection_map(indices, [5, 60], length=63, block_size=4, order=order)
    assert torch.equal(raster[..., order], plain)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"positions": [63]}, r"positions must be in \[0, 62\], got \[63\]"),
        ({"positions": [-1]}, r"positions must be in \[0, 62\], got \[-1\]"),
        ({"positions": [1.5]}, r"positions must be integers in a list, got \[1.5\]"),
        ({"positions": 3}, "positions must be integers in a list, got 3"),
        ({"positions": [0], "order": torch.arange(5)}, r"order must be of shape \(63,\), got \(5,\)"),
        ({"positions": [0], "order": torch.zeros(63).long()}, "order must hold each of 0 to 62 once"),
        ({"positions": [0], "order": [0]}, "order must be an int64 tensor, got list"),
        ({"positions": [0], "length": 100}, r"indices\[0\] must be of shape \(1, 1, 25, K\), got \(1, 1, 16, 8\)"),
        ({"positions": [0], "block_size": 8}, r"indices\[0\] must be of shape \(1, 1, 8, K\), got \(1, 1, 16, 8\)"),
        ({"positions": [0], "indices": []}, "indices must be a list of tensors, one per level, got none"),
    ],
)
def test_selection_map_refuses(options, message):
    query = torch.ones(1, 1, 63, 4)
    arguments = {"indices": hierarchical_topk(query, query, block_size=4), "length": 63, "block_size": 4} | options
    with pytest.raises(UserInputError, match=message):
        llsa_selection_map(**arguments)
