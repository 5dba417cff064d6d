"""Step 1 of BA-Att: permutations per head, and that they are undone exactly."""

import pytest
import torch

from diffsieve import UserInputError
from diffsieve.kernels.ba_att import CANDIDATE_ORDERS, default_window, gather_tokens, token_orders, undo_order
from diffsieve.kernels.ba_att.norm_sort import sort_windows
from diffsieve.kernels.ba_att.ordering import _cached_table, _sort_all_heads, _sort_known_heads
from diffsieve.kernels.ba_att.reference import orders_of_head, sort_by_norm
from diffsieve.kernels.orders import frame_hilbert_order, hilbert_order

GRID, LENGTH = (5, 9, 10), 450


def heads(generator, batch=2, num=3, length=LENGTH, dim=8, dtype=torch.float64):
    """Queries or keys in the memory order of a diffusers processor, with a common bias and uneven norms."""
    tokens = torch.randn(batch, length, num, dim, generator=generator, dtype=dtype)
    scale = 1 + torch.rand(batch, length, num, 1, generator=generator, dtype=dtype)
    return (tokens * scale + 0.7).transpose(1, 2)


def full(perm, like):
    """A permutation as (B, H, L)."""
    length = like.shape[2]
    perm = torch.arange(length) if perm is None else perm
    return perm.expand(like.shape[0], like.shape[1], length)


@pytest.mark.parametrize("descending", [True, False], ids=["descending", "ascending"])
@pytest.mark.parametrize("window", [None, 64, 96], ids=["window-default", "window-64", "window-96"])
@pytest.mark.parametrize("order", CANDIDATE_ORDERS)
def test_matches_reference(order, window, descending, generator):
    query, key = heads(generator), heads(generator)
    got = token_orders(query, key, grid_thw=GRID, orders=order, block_size=32, window=window, descending=descending)
    window = default_window(LENGTH, 32) if window is None else window
    for b in range(2):
        for h in range(3):
            expected = orders_of_head(query[b, h], key[b, h], order, GRID, window, descending)
            assert torch.equal(full(got.query, query)[b, h], expected[0])
            assert torch.equal(full(got.key, key)[b, h], expected[1])


@pytest.mark.parametrize("descending", [True, False], ids=["descending", "ascending"])
def test_table_of_ids_matches_names(descending, generator):
    query, key = heads(generator, num=5), heads(generator, num=5)
    options = {"grid_thw": GRID, "block_size": 32, "descending": descending}
    table = token_orders(query, key, orders=torch.tensor([4, 3, 2, 1, 0]), **options)
    mixed = token_orders(query, key, orders=[4, "hilbert_window", 2, 1, "raster"], **options)
    for h, name in enumerate(reversed(CANDIDATE_ORDERS)):
        one = token_orders(query, key, orders=name, **options)
        assert torch.equal(table.query[:, h], full(one.query, query)[:, h])
        assert torch.equal(table.key[:, h], full(one.key, key)[:, h])
    assert torch.equal(mixed.query, table.query)
    assert torch.equal(mixed.key, table.key)


def test_table_with_shared_key_heads(generator):
    query, key = heads(generator, num=4), heads(generator, num=2)
    table = token_orders(query, key, grid_thw=GRID, orders=torch.tensor([3, 4, 3, 1]), block_size=32)
    expanded = token_orders(
        query, key.repeat_interleave(2, dim=1), grid_thw=GRID, orders=torch.tensor([3, 4, 3, 1]), block_size=32
    )
    assert torch.equal(table.key, expanded.key)


@pytest.mark.parametrize("descending", [True, False], ids=["descending", "ascending"])
@pytest.mark.parametrize("kv_heads", [2, 6])
def test_a_table_that_cannot_be_read_gives_the_same_orders(kv_heads, descending, generator):
    query, key = heads(generator, num=6), heads(generator, num=kv_heads)
    key[:, :, 40:60] = key[:, :, 40:41]  # equal norms
    table = _cached_table(*GRID, torch.device("cpu"))
    ids = [3, 0, 4, 2, 3, 1]
    known = _sort_known_heads(query, key, ids, table, 96, descending, False)
    assert torch.equal(known, _sort_all_heads(query, key, torch.tensor(ids), table, 96, descending))
    assert known.is_contiguous()


def test_heads_of_one_order_share_a_sort(generator, monkeypatch):
    query, key = heads(generator, num=6), heads(generator, num=6)
    sort, sorted_heads = torch.sort, []

    def count(keys, **options):
        sorted_heads.append(keys.shape[1])
        return sort(keys, **options)

    monkeypatch.setattr(torch, "sort", count)
    _sort_known_heads(query, key, [3, 4, 0, 3, 4, 3], _cached_table(*GRID, torch.device("cpu")), 96, True, False)
    assert sorted_heads == [3, 4]  # the windows of three heads; queries and keys of two


def test_static_orders_neither_sort_nor_measure(generator, monkeypatch):
    query, key = heads(generator), heads(generator)
    for name in ("sort_windows", "token_norms", "mean_key"):
        monkeypatch.setattr(f"diffsieve.kernels.ba_att.ordering.{name}", None)  # a call would raise
    order = token_orders(query, key, grid_thw=GRID, orders=torch.tensor([2, 0, 1]), block_size=32)
    for perm in order:
        expected = torch.stack([hilbert_order(GRID), torch.arange(LENGTH), frame_hilbert_order(GRID)])
        assert torch.equal(perm, expected.expand(2, 3, LENGTH))


def test_tables_are_kept_and_their_number_is_bounded():
    cpu = torch.device("cpu")
    assert _cached_table(*GRID, cpu) is _cached_table(*GRID, cpu)
    for width in range(1, 20):
        _cached_table(1, 1, width, cpu)
    assert _cached_table.cache_info().currsize <= 8


@pytest.mark.parametrize("descending", [True, False], ids=["descending", "ascending"])
@pytest.mark.parametrize(("length", "window"), [(1, 64), (64, 64), (65, 64), (450, 96), (450, 450), (450, 1000)])
def test_windows_are_sorted_stably(length, window, descending, generator):
    norm = (8 * torch.rand(2, 3, length, generator=generator)).round() / 4  # many ties, zeros among them
    norm[0, 0, length // 2], norm[0, 1, 0] = torch.inf, 1e-42
    got = sort_windows(norm, window, descending)
    for row, perm in zip(norm.flatten(0, 1), got.flatten(0, 1), strict=True):
        assert torch.equal(perm, sort_by_norm(row, window, descending))


@pytest.mark.parametrize("descending", [True, False], ids=["descending", "ascending"])
def test_nan_of_any_bits_counts_as_the_largest_norm(descending):
    norm = torch.arange(1.0, 101.0)[None, None]
    norm.view(torch.int32)[0, 0, [3, 70, 99]] = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000], dtype=torch.int32)
    got = sort_windows(norm, 32, descending)[0, 0]
    assert torch.equal(got.sort().values, torch.arange(100))
    assert int(got[0 if descending else 31]) == 3
    assert set(got.tolist()[96:]) == {96, 97, 98, 99}


def test_names_gather_no_more_than_needed(generator):
    query, key = heads(generator), heads(generator)
    make = {"grid_thw": GRID, "block_size": 32}
    assert token_orders(query, key, orders="raster", **make) == (None, None)
    assert token_orders(query, key, orders=(0, 0, 0), **make) == (None, None)
    assert torch.equal(token_orders(query, key, orders="hilbert", **make).key, hilbert_order(GRID))
    assert torch.equal(token_orders(query, key, orders="frame_hilbert", **make).query, frame_hilbert_order(GRID))
    assert token_orders(query, key, orders="hilbert_window", **make).query.shape == (LENGTH,)


def test_norm_sort_of_unequal_lengths(generator):
    query, key = heads(generator, length=70), heads(generator, length=129)
    order = token_orders(query, key, orders="norm_sort", descending=False)
    for tokens, perm in ((query, order.query), (key, order.key)):
        norms = gather_tokens(tokens, perm).norm(dim=-1).float()
        assert (norms.diff(dim=-1) >= 0).all()


def test_equal_norms_keep_their_order():
    tokens = torch.ones(1, 1, 300, 4)
    for descending in (True, False):
        order = token_orders(tokens, tokens, orders="norm_sort", descending=descending)
        assert torch.equal(order.key[0, 0], torch.arange(300))


@pytest.mark.parametrize("layout", ["bhld", "blhd", "neither"])
@pytest.mark.parametrize("perm_shape", ["shared", "per_head", "expanded_heads"])
def test_gather_is_undone_bit_for_bit(layout, perm_shape, generator):
    tokens = heads(generator, dtype=torch.float32)
    if layout == "bhld":
        tokens = tokens.contiguous()
    elif layout == "neither":
        tokens = torch.randn(2, 3, 8, LENGTH, generator=generator).transpose(2, 3)
    if perm_shape == "shared":
        perm = torch.randperm(LENGTH, generator=generator)
    else:
        num = 3 if perm_shape == "per_head" else 6
        perm = torch.rand(2, num, LENGTH, generator=generator).argsort(dim=-1)
    source = tokens if perm_shape != "expanded_heads" else tokens.repeat_interleave(2, dim=1)
    gathered = gather_tokens(tokens, perm)
    assert torch.equal(gathered, source.gather(2, full(perm, source)[..., None].expand_as(source)))
    assert torch.equal(undo_order(gathered, perm), source)


def test_gradient_flows_through_the_gather(generator):
    tokens = heads(generator, batch=1, length=20, dim=2).requires_grad_()
    perm = torch.rand(1, 3, 20, generator=generator).argsort(dim=-1)
    assert torch.autograd.gradcheck(lambda x: undo_order(gather_tokens(x, perm).sin(), perm), (tokens,))


def test_nan_does_not_break_the_permutation(generator):
    query, key = heads(generator), heads(generator)
    query[0, 0, 7], key[0, 1, 3, 2], key[1] = torch.nan, torch.nan, torch.nan
    order = token_orders(query, key, grid_thw=GRID, orders=torch.tensor([4, 3, 0]), block_size=32)
    for perm in order:
        assert torch.equal(perm.sort(dim=-1).values, torch.arange(LENGTH).expand(2, 3, LENGTH))


@pytest.mark.parametrize(("length", "block", "window"), [(75_600, 128, 2304), (4032, 64, 128), (10, 128, 256)])
def test_default_window(length, block, window):
    assert default_window(length, block) == window


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"orders": "spiral"}, "orders must be one of .*'spiral'"),
        ({"orders": [0, 1, 9]}, "orders must hold names of .* got 9"),
        ({"orders": []}, "orders must hold one entry per head"),
        ({"orders": torch.tensor([0, 1, 5])}, "orders must hold ids of .* got 5"),
        ({"orders": torch.tensor([0, 1])}, r"orders must be an integer tensor of shape \(3,\)"),
        ({"orders": torch.tensor([0.0, 1.0, 2.0])}, "orders must be an integer tensor .* got torch.float32"),
        ({"orders": "hilbert", "grid_thw": None}, "grid_thw must be given for the order 'hilbert', got None"),
        ({"orders": torch.tensor([0, 4, 1]), "grid_thw": None}, r"orders must hold ids of \[0, 4\] .* got 1"),
        ({"orders": "raster", "grid_thw": (5, 9, 11)}, r"grid_thw must have as many points .*\(450\).* with 495"),
        ({"orders": "raster", "grid_thw": (5, 9, 0)}, "grid_thw must be three positive integers"),
        (
            {"orders": "hilbert_window", "window": 48},
            r"window must be a positive multiple of block_size \(32\), got 48",
        ),
        ({"orders": "hilbert_window", "window": 0}, "window must be a positive multiple"),
        ({"orders": "hilbert_window", "window": "64"}, "window must be a whole number of tokens or None, got '64'"),
        ({"orders": "hilbert_window", "block_size": 0}, "block_size must be a whole number >= 1, got 0"),
        ({"orders": "hilbert_window", "block_size": 32.0}, "block_size must be a whole number >= 1, got 32.0"),
        ({"orders": "hilbert", "grid_thw": 450}, "grid_thw must be three positive integers .* got 450"),
        ({"orders": torch.tensor([0, 1, -1])}, "orders must hold ids of .* got -1"),
        (
            {"orders": torch.tensor([0, 1, 2], device="meta")},
            "orders must hold values, got a tensor on the device meta",
        ),
        ({"orders": 3}, "orders must be a name, a tensor of ids, or a sequence of either, got 3"),
        ({"orders": [[0], [1], [2]]}, r"orders must hold names of .* got \[0\]"),
        ({"orders": [True, 0, 1]}, "orders must hold names of .* got True"),
        ({"orders": "raster", "key": torch.ones(1, 2, 450, 4)}, r"key must be of shape \(.*, a divisor of 3, Lk, .*\)"),
        ({"orders": "raster", "query": torch.ones(3, 450, 4)}, r"query must be 4-dimensional, got \(3, 450, 4\)"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(str(v) for v in value.values()),
)
def test_bad_input(options, message, generator):
    tokens = heads(generator)
    with pytest.raises(UserInputError, match=message):
        token_orders(**{"query": tokens, "key": tokens, "grid_thw": GRID, "block_size": 32, **options})
