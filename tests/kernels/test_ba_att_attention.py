"""The whole BA-Att call against its definition in fp64 and against dense attention."""

import weakref
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from diffsieve import BackendUnavailableError, UserInputError
from diffsieve.kernels.ba_att import CANDIDATE_ORDERS, CustomSelection, TokenOrders, ba_attention, block_mask
from diffsieve.kernels.ba_att import attention as room
from diffsieve.kernels.ba_att.centroids import add_centroids
from diffsieve.kernels.ba_att.reference import ba_attention_reference

PAPER = {"descending": False, "beta": 1.0, "center_keys": False, "log_count": False}
PRESETS = {"default": {}, "paper": PAPER, "paper-mean": {**PAPER, "second_order": False}}
GRIDS = {1: (1, 1, 1), 127: (1, 1, 127), 128: (2, 8, 8), 129: (3, 43, 1), 450: (5, 9, 10), 6720: (7, 24, 40)}


def qkv(generator, length, heads=3, key_heads=None, dim=16, batch=2, dtype=torch.float64):
    """Inputs in the memory order of a diffusers processor, sharp enough that the selection matters."""

    def one(num, gain, bias):
        tokens = torch.randn(batch, length, num, dim, generator=generator, dtype=torch.float64)
        uneven = 0.5 + torch.rand(batch, length, num, 1, generator=generator, dtype=torch.float64)
        return (gain * tokens * uneven + bias).to(dtype).transpose(1, 2)

    return one(heads, 2.0, 0.3), one(key_heads or heads, 2.0, 1.0), one(key_heads or heads, 1.0, 0.0)


def check_against_reference(inputs, **options):
    out, info = ba_attention(*inputs, return_info=True, **options)
    expected, kept = ba_attention_reference(*inputs, **options)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-11)
    for b, in_batch in enumerate(kept):
        for h, rows in enumerate(in_batch):
            for g, row in enumerate(rows):
                count = len(row) if info.block_count is None else info.block_count[b, h, g]
                assert info.block_index[b, h, g, :count].tolist() == row
    return out, info


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("orders", [*CANDIDATE_ORDERS, "table"])
def test_matches_reference(orders, preset, generator):
    orders = torch.tensor([3, 4, 1]) if orders == "table" else orders
    check_against_reference(
        qkv(generator, 450), grid_thw=GRIDS[450], orders=orders, density=0.4, block_size=32, **PRESETS[preset]
    )


@pytest.mark.parametrize(
    ("length", "batch", "heads"),
    [(1, 1, 1), (1, 2, 3), (127, 2, 3), (128, 2, 1), (128, 2, 3), (129, 2, 3), (450, 2, 1), (6720, 1, 1)],
)
def test_matches_reference_at_any_length(length, batch, heads, generator):
    orders = torch.tensor([3, 4, 0])[:heads]
    inputs = qkv(generator, length, heads=heads, batch=batch)
    check_against_reference(inputs, grid_thw=GRIDS[length], orders=orders, density=0.3)


@pytest.mark.parametrize(
    "options",
    [
        {"score": "halfk"},
        {"score": "residual"},
        {"score": "residual", "compensate": "centroid", "text_suffix": 33},
        {"compensate": "centroid"},
        {"compensate": "centroid", "density": 1.0},
        {"top_p": 0.7, "density": 0.8, "min_density": 0.1},
        {"top_p": 0.6, "density": 1.0, "compensate": "centroid"},
        {"top_p": 1.0, "density": 0.5},
        {"top_p": 0.5, "density": 1.0, "log_count": False},
        {"scale": 0.11, "window": 96},
        {"text_prefix": 40, "text_suffix": 7},
        {"text_suffix": 33, "compensate": "centroid", "top_p": 0.5},
        {"text_prefix": 1, "density": 0.01},
    ],
    ids=lambda options: "-".join(f"{key}={value}" for key, value in options.items()),
)
@pytest.mark.parametrize("orders", ["raster", "table"])
def test_options_match_reference(orders, options, generator):
    orders = torch.tensor([2, 3, 1, 4]) if orders == "table" else orders
    length = 450 + options.get("text_prefix", 0) + options.get("text_suffix", 0)
    inputs = qkv(generator, length, heads=4, key_heads=2)
    check_against_reference(inputs, grid_thw=GRIDS[450], orders=orders, block_size=32, **{"density": 0.4, **options})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compensate": "centroid", "score": "residual"},
        {"score": "halfk", "compensate": "centroid"},
        {"compensate": "centroid", "text_prefix": 7, "text_suffix": 33},
        {"text_suffix": 5, "density": 0.01},
    ],
    ids=lambda options: "-".join(f"{key}={value}" for key, value in options.items()),
)
@pytest.mark.parametrize("budgets", [[1, 15, 6, 3], [15, 15, 15, 1], [4, 4, 4, 4]], ids=str)
def test_budgets_of_heads_match_reference(budgets, options, generator):
    num_text = options.get("text_prefix", 0) + options.get("text_suffix", 0)
    inputs = qkv(generator, 450 + num_text, heads=4, key_heads=2)
    options = {"density": 0.4, "orders": torch.tensor([2, 3, 1, 4]), "block_size": 32, **options}
    _, info = check_against_reference(inputs, grid_thw=GRIDS[450], budgets=torch.tensor(budgets), **options)
    text = -(-num_text // 32)
    assert info.kept_pairs == 2 * 15 * sum(budgets) + 2 * 4 * text * (15 + 15 + text)
    mask = block_mask(info.block_index, info.block_count, 15)
    assert mask.sum(-1).eq(torch.tensor(budgets)[:, None]).all()
    sizes = torch.tensor([32] * 14 + [2])
    tokens = (mask * sizes * sizes[:, None]).sum() + 2 * 4 * num_text * (450 + 450 + num_text)
    assert info.kept_token_pairs == tokens


@pytest.mark.parametrize("length", [1, 127, 129])
def test_budgets_match_reference_at_any_length(length, generator):
    blocks = -(-length // 16)
    budgets = torch.tensor([1, blocks, (blocks + 1) // 2], dtype=torch.int32)
    inputs = qkv(generator, length)
    options = {"grid_thw": GRIDS[length], "orders": "hilbert", "density": 0.3, "block_size": 16}
    check_against_reference(inputs, compensate="centroid", budgets=budgets, **options)


def test_equal_budgets_are_the_call_without_them(generator, monkeypatch):
    inputs = qkv(generator, 450, dtype=torch.float32)
    options = {"grid_thw": GRIDS[450], "orders": "hilbert", "density": 0.4, "block_size": 32, "return_info": True}
    expected, info = ba_attention(*inputs, compensate="centroid", **options)
    monkeypatch.setattr(room, "list_blocks_by_head", None)  # not called
    out, alike = ba_attention(*inputs, compensate="centroid", budgets=torch.tensor([6, 6, 6]), **options)
    assert torch.equal(out, expected)
    assert torch.equal(alike.block_index, info.block_index)
    assert alike.block_count is None


def test_gradients_with_budgets(generator):
    inputs = [x.detach().requires_grad_() for x in qkv(generator, 20, heads=2, dim=3, batch=1)]
    options = {"grid_thw": (1, 4, 5), "orders": torch.tensor([3, 4]), "density": 0.5, "block_size": 4}
    options |= {"compensate": "centroid", "budgets": torch.tensor([2, 5])}
    got = torch.autograd.grad(ba_attention(*inputs, **options).sin().sum(), inputs)
    dense = torch.autograd.grad(scaled_dot_product_attention(*inputs).sin().sum(), inputs)
    for one, other in zip(got, dense, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one[:, 1], other[:, 1], rtol=0, atol=1e-11)  # the head that keeps all
        assert not torch.allclose(one[:, 0], other[:, 0])


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("orders", [*CANDIDATE_ORDERS, "table"])
def test_all_blocks_are_dense_attention(orders, preset, generator):
    orders = torch.tensor([4, 3, 2]) if orders == "table" else orders
    inputs = qkv(generator, 450)
    dense = scaled_dot_product_attention(*inputs)
    for extra in ({}, {"top_p": 1.0}, {"compensate": "centroid"}):
        out = ba_attention(
            *inputs, grid_thw=GRIDS[450], orders=orders, density=1.0, block_size=32, **extra, **PRESETS[preset]
        )
        torch.testing.assert_close(out, dense, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 0.002), (torch.bfloat16, 0.005)], ids=["fp32", "bf16"])
def test_low_precision_at_full_density(dtype, bound, generator):
    # fp32 statistics and sorts of rounded inputs; with all blocks kept no choice can differ.
    inputs = qkv(generator, 450, dtype=dtype)
    exact = scaled_dot_product_attention(*(x.double() for x in inputs))
    out = ba_attention(*inputs, grid_thw=GRIDS[450], orders=torch.tensor([4, 3, 1]), density=1.0, block_size=32)
    assert out.dtype is dtype
    assert (out.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt() < bound


def test_one_kept_block(generator):
    _, info = check_against_reference(
        qkv(generator, 450), grid_thw=GRIDS[450], orders="hilbert_window", density=0.001, block_size=32
    )
    assert info.block_index.shape[-1] == 1


def test_common_key_shift(generator):
    query, key, value = qkv(generator, 450)
    shift = 2 * torch.randn(16, generator=generator, dtype=torch.float64)

    def kept(keys, **options):
        options = {"grid_thw": GRIDS[450], "density": 0.3, "block_size": 32, "return_info": True, **options}
        return ba_attention(query, keys, value, **options)

    for orders in ("raster", "hilbert", "hilbert_window"):
        before, after = kept(key, orders=orders), kept(key + shift, orders=orders)
        assert torch.equal(before[1].block_index, after[1].block_index)
        torch.testing.assert_close(before[0], after[0], rtol=0, atol=1e-10)
    before, after = (kept(keys, orders="raster", **PAPER)[1].block_index for keys in (key, key + shift))
    assert not torch.equal(before, after)


@pytest.mark.parametrize("orders", [*CANDIDATE_ORDERS, "table"])
def test_nothing_beyond_the_end_is_read(orders, generator):
    orders = torch.tensor([4, 3, 1]) if orders == "table" else orders
    inputs = [x.contiguous().float() for x in qkv(generator, 450)]
    padded = [torch.full((2, 3, 512, 16), torch.nan) for _ in inputs]
    for whole, x in zip(padded, inputs, strict=True):
        whole[:, :, :450] = x
    options = {"grid_thw": GRIDS[450], "orders": orders, "density": 0.4, "block_size": 64}
    out = ba_attention(*(x[:, :, :450] for x in padded), **options)
    assert torch.isfinite(out).all()
    assert torch.equal(out, ba_attention(*inputs, **options))


def test_repeats_bit_for_bit(generator):
    inputs = qkv(generator, 450, dtype=torch.float32)
    options = {"grid_thw": GRIDS[450], "orders": torch.tensor([4, 3, 1]), "density": 0.4, "block_size": 32}
    (first, info), (second, again) = (ba_attention(*inputs, return_info=True, **options) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(info.block_index, again.block_index)


@pytest.mark.parametrize(("prefix", "suffix"), [(0, 0), (40, 7)], ids=["video", "text"])
@pytest.mark.parametrize("top_p", [None, 0.6])
def test_info_counts_what_the_mask_keeps(top_p, prefix, suffix, generator):
    num_text = prefix + suffix
    length = 450 + num_text
    _, info = ba_attention(
        *qkv(generator, length),
        grid_thw=GRIDS[450],
        orders="hilbert",
        density=0.5,
        block_size=32,
        top_p=top_p,
        text_prefix=prefix,
        text_suffix=suffix,
        return_info=True,
    )
    mask = block_mask(info.block_index, info.block_count, 15)
    sizes = torch.tensor([32] * 14 + [2])
    text = -(-num_text // 32)
    pairs = mask.sum() + 6 * (text * 15 + text * 15 + text * text)
    token_pairs = (mask * sizes * sizes[:, None]).sum() + 6 * num_text * (450 + length)
    assert info.kept_pairs == pairs
    assert info.total_pairs == 6 * (15 + text) ** 2
    assert info.kept_token_pairs == token_pairs
    assert info.total_token_pairs == 6 * length**2
    assert info.backend == "torch"


def test_text_blocks_count_in_the_budget(generator):
    options = {"grid_thw": GRIDS[450], "orders": "raster", "block_size": 32, "return_info": True}
    # 15 video and 5 text blocks: half of 20 leaves 5 for the video.
    _, info = ba_attention(*qkv(generator, 450 + 150), density=0.5, text_suffix=150, **options)
    assert info.block_index.shape[-1] == 5


def test_gradients(generator):
    inputs = [x.detach().requires_grad_() for x in qkv(generator, 20, heads=2, dim=3, batch=1)]
    options = {"grid_thw": (1, 4, 5), "orders": torch.tensor([3, 4]), "density": 0.5, "block_size": 4}
    for extra in ({}, {"compensate": "centroid"}):
        out = ba_attention(*inputs, **options, **extra)
        assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), inputs))
    # Kept blocks are constants of the derivative, so that all blocks give the dense one.
    out = ba_attention(*inputs, **{**options, "density": 1.0})
    got = torch.autograd.grad(out.sin().sum(), inputs)
    expected = torch.autograd.grad(scaled_dot_product_attention(*inputs).sin().sum(), inputs)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("score", ["moments", "halfk"])
def test_nan_stays_visible_and_local(score, generator):
    query, key, value = qkv(generator, 450, dtype=torch.float32)
    clean = ba_attention(query, key, value, grid_thw=GRIDS[450], orders="hilbert", density=0.4, block_size=32)
    query = query.clone()
    query[0, 1, 100] = torch.nan
    options = {"grid_thw": GRIDS[450], "density": 0.4, "block_size": 32, "score": score, "return_info": True}
    for orders in ("hilbert", torch.tensor([4, 3, 2])):
        out, info = ba_attention(query, key, value, orders=orders, **options)
        assert torch.isnan(out[0, 1, 100]).all()
        assert torch.isfinite(out).all(dim=-1).sum() == 2 * 3 * 450 - 1
        assert 0 <= info.block_index.min() <= info.block_index.max() < 15
    # With NaN in a key, every row that keeps its block is NaN; other heads do not notice.
    key = key.clone()
    key[0, 0, 3] = torch.nan
    out, info = ba_attention(query.nan_to_num(), key, value, orders="hilbert", **options)
    rows_with_nan = torch.isnan(out[0, 0]).any(dim=-1).sum()
    assert rows_with_nan > 0
    assert torch.isfinite(out[1]).all()
    assert (info.block_index.diff(dim=-1) > 0).all()
    if score == "moments":
        torch.testing.assert_close(out[1], clean[1], rtol=0, atol=0)


@torch.no_grad()
def test_ordered_keys_and_values_are_gone_before_the_compensation(generator, monkeypatch):
    gathered, gone = [], []

    def attend(query, key, value, *rest, **options):
        gathered.extend(map(weakref.ref, (key, value)))
        return room._attend(query, key, value, *rest, **options)

    def compensate(*inputs, **options):
        gone.append([tensor() is None for tensor in gathered])
        return add_centroids(*inputs, **options)

    monkeypatch.setattr(room, "partial", lambda function, **options: partial(attend, **options))
    monkeypatch.setattr(room, "add_centroids", compensate)
    qkv = (torch.randn(1, 2, 450, 8, generator=generator) for _ in range(3))
    ba_attention(*qkv, grid_thw=(5, 9, 10), orders="hilbert", density=0.5, block_size=32, compensate="centroid")
    assert gone == [[True, True]]


def test_timer_sees_both_stages(generator):
    seen = []

    @contextmanager
    def timer(name):
        seen.append(name)
        yield

    options = {"grid_thw": GRIDS[450], "orders": "hilbert", "density": 0.4, "block_size": 32}
    inputs = qkv(generator, 450)
    assert torch.equal(ba_attention(*inputs, timer=timer, **options), ba_attention(*inputs, **options))
    assert seen == ["selection", "attention", "selection"]


GOOD = {"grid_thw": GRIDS[450], "orders": "raster", "density": 0.5, "block_size": 32}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"density": 0}, r"density must be in \(0, 1\], got 0"),
        ({"density": 1.5}, r"density must be in \(0, 1\], got 1.5"),
        ({"density": float("nan")}, r"density must be in \(0, 1\], got nan"),
        ({"block_size": 0}, r"block_size must be a whole number in \[1, 65536\], got 0"),
        ({"block_size": 10**9}, r"block_size must be a whole number in \[1, 65536\], got 1000000000"),
        ({"block_size": -128}, r"block_size must be a whole number in \[1, 65536\], got -128"),
        ({"block_size": 64.0}, r"block_size must be a whole number in \[1, 65536\], got 64.0"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"min_density": 0.7}, r"min_density must be in \[0, density=0.5\], got 0.7"),
        ({"compensate": "mean"}, "compensate must be .* got 'mean'"),
        ({"score": "max"}, "score must be .* got 'max'"),
        ({"text_prefix": -1}, "text_prefix must be at least 0, got -1"),
        (
            {"text_prefix": 400, "text_suffix": 50},
            r"text_prefix \+ text_suffix must be below .* \(450\), got 400 \+ 50",
        ),
        ({"grid_thw": (5, 9, 9)}, r"grid_thw must have as many points .* \(450\)"),
        ({"orders": "spiral"}, "orders must be one of"),
        ({"window": 33, "orders": "hilbert_window"}, "window must be a positive multiple"),
        ({"backend": "cuda"}, "backend must be one of"),
        ({"density": "0.5"}, "density must be a number, got '0.5'"),
        ({"density": None}, "density must be a number, got None"),
        ({"density": True}, "density must be a number, got True"),
        ({"density": torch.ones(1)}, r"density must be a number, got a tensor of shape \(1,\)"),
        ({"beta": "0.5"}, "beta must be a number, got '0.5'"),
        ({"beta": float("inf")}, "beta must be finite, got inf"),
        ({"min_density": None}, "min_density must be a number, got None"),
        ({"top_p": "0.9"}, "top_p must be a number or None, got '0.9'"),
        ({"scale": "1"}, "scale must be a number or None, got '1'"),
        ({"scale": 0.0}, "scale must be finite and above 0, or None, got 0.0"),
        ({"block_size": "32"}, r"block_size must be a whole number in \[1, 65536\], got '32'"),
        ({"text_prefix": 1.0}, "text_prefix must be a whole number, got 1.0"),
        ({"text_suffix": "2"}, "text_suffix must be a whole number, got '2'"),
        ({"window": "64"}, "window must be a whole number of tokens or None, got '64'"),
        ({"window": 64.0}, "window must be a whole number of tokens or None, got 64.0"),
        ({"center_keys": "no"}, "center_keys must be True or False, got 'no'"),
        ({"log_count": 1}, "log_count must be True or False, got 1"),
        ({"descending": None}, "descending must be True or False, got None"),
        ({"second_order": 0}, "second_order must be True or False, got 0"),
        ({"return_info": "yes"}, "return_info must be True or False, got 'yes'"),
        ({"grid_thw": 450}, "grid_thw must be three positive integers .* got 450"),
        ({"grid_thw": (5, 90)}, r"grid_thw must be three positive integers .* got \(5, 90\)"),
        ({"grid_thw": (5, 9, 10.0)}, r"grid_thw must be three positive integers .* got \(5, 9, 10.0\)"),
        ({"orders": 3}, "orders must be a name, .* got 3"),
        ({"orders": None}, "orders must be a name, .* got None"),
        ({"orders": [[0], [1]]}, r"orders must be a name, .* got \[\[0\], \[1\]\]"),
        ({"orders": [0, True]}, r"orders must be a name, .* got \[0, True\]"),
        ({"compensate": True}, 'compensate must be "none" or "centroid", got True'),
        ({"score": ["moments"]}, r"score must be one of .* got \['moments'\]"),
        ({"backend": None}, "backend must be one of .* got None"),
        ({"backend": ["torch"]}, r"backend must be one of .* got \['torch'\]"),
        ({"timer": 1}, "timer must be callable or None, got 1"),
        ({"custom": "hilbert"}, "custom must be a CustomSelection or None, got 'hilbert'"),
        ({"budgets": [1, 2, 3]}, "budgets must be a tensor or None, got list"),
        ({"budgets": torch.tensor([1, 2])}, r"budgets must be int64 or int32 of shape \(3,\) on the CPU, .* \(2,\)"),
        ({"budgets": torch.ones(3)}, "budgets must be int64 or int32 .* got torch.float32"),
        ({"budgets": torch.ones(3, dtype=torch.int64, device="meta")}, "budgets must be .* on meta"),
        ({"budgets": torch.tensor([0, 7, 14])}, r"budgets must hold whole numbers in \[1, 15\], got 0"),
        ({"budgets": torch.tensor([16, 16, 16])}, r"budgets must hold whole numbers in \[1, 15\], got 16"),
        ({"budgets": torch.tensor([1, 7, 14]), "top_p": 0.9}, "budgets must be None with top_p.* got top_p=0.9"),
        pytest.param(
            {"budgets": torch.tensor([1, 7, 14]), "custom": CustomSelection(select=lambda *_, **__: None)},
            "budgets must be None beside a custom selection",
            id="budgets with a custom selection",  # its own would hold an address, which differs between processes
        ),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(f"{k}={v}" for k, v in value.items()),
)
def test_bad_options(options, message, generator):
    with pytest.raises(UserInputError, match=message):
        ba_attention(*qkv(generator, 450), **{**GOOD, **options})


def test_bad_tensors(generator):
    query, key, value = qkv(generator, 450, heads=4)
    cases = [
        ((query[0], key, value), "query must have 4 dimensions"),
        ((query.tolist(), key, value), r"query must be a tensor \(B, H, L, D\), got list"),
        ((query, None, value), r"key must be a tensor \(B, H, L, D\), got NoneType"),
        ((query, key, value.numpy()), r"value must be a tensor \(B, H, L, D\), got ndarray"),
        ((query.long(), key.long(), value.long()), "query must be floating point, got torch.int64"),
        ((query[:, :, :0], key[:, :, :0], value[:, :, :0]), r"query must not be empty, got shape \(2, 4, 0, 16\)"),
        ((query, key.float(), value), "key must be torch.float64 on cpu like query, got torch.float32 on cpu"),
        ((query, key, value[:, :, 1:]), "value must have the shape of key"),
        (
            (query, key[:, :3], value[:, :3]),
            r"key must have shape \(2, a divisor of 4, 450, 16\), got \(2, 3, 450, 16\)",
        ),
        ((query, key[:1], value[:1]), "key must have shape"),
        ((query, key[:, :, 1:], value[:, :, 1:]), "key must have shape"),
        ((query, key.to("meta"), value), "key must be torch.float64 on cpu like query, got torch.float64 on meta"),
    ]
    for inputs, message in cases:
        with pytest.raises(UserInputError, match=message):
            ba_attention(*inputs, **GOOD)


def test_orders_and_selections_from_outside_that_do_not_fit(generator):
    inputs = qkv(generator, 450)

    def call(query, key=None, **options):
        custom = CustomSelection(order=lambda *_: TokenOrders(query, key))
        return ba_attention(*inputs, custom=custom, **GOOD, **options)

    for perm, message in (
        (torch.arange(10), r"custom.order: query must be int64 of shape \(450,\) or \(2, 3, 450\), got .* \(10,\)"),
        (torch.arange(450).int(), "custom.order: query must be int64 .* got torch.int32"),
        (torch.zeros(450).long(), "custom.order: query must hold each of 0 to 449 once"),
    ):
        with pytest.raises(UserInputError, match=message):
            call(perm)
        with pytest.raises(UserInputError, match=message.replace("query", "key")):
            call(None, perm)
    assert call(torch.arange(450).flip(0)).isfinite().all()
    custom = CustomSelection(select=lambda *_, **__: (torch.zeros(2, 3, 15, 1, dtype=torch.int32), None))
    with pytest.raises(UserInputError, match=r"top_p must be None beside a custom selection, .* got 0.5"):
        ba_attention(*inputs, custom=custom, top_p=0.5, **GOOD)


def test_named_backend_never_falls_back(generator):
    with pytest.raises(BackendUnavailableError, match="triton"):
        ba_attention(*qkv(generator, 450), **GOOD, backend="triton")
