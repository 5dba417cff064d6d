"""What the interpreter and a GPU check of the kernels for scores and selection: a difference or equality each."""

from collections.abc import Callable

import torch

from diffsieve.kernels import testing
from diffsieve.kernels.ba_att import block_statistics, forms, select_blocks
from diffsieve.kernels.ba_att.fused_selection import list_blocks_by_head, list_blocks_fused, score_blocks_fused
from diffsieve.kernels.ba_att.norm_sort import sort_windows, token_norms
from diffsieve.kernels.ba_att.reference import select_row
from diffsieve.kernels.ba_att.scores import _tf32_part, score_blocks
from diffsieve.kernels.ba_att.selection import skipped_blocks

OPTIONS = {"beta": 0.5, "center_keys": True, "log_count": True, "second_order": True, "scale": 0.2}


def score_difference(device: str, score: str, length: int, dim: int, gain: float = 1.0, **options: object) -> float:
    """Largest difference from the scores in fp64, as a share of the sizes of all their terms, added up (at least 1)."""
    generator = torch.Generator().manual_seed(testing.SEED)
    query = gain * torch.randn(2, 4, length, dim, generator=generator) + 0.3
    key = gain * torch.randn(2, 2, length + 21, dim, generator=generator) + 0.5
    settings = {**OPTIONS, **options}
    stats = [block_statistics(x.to(device), 16) for x in (query, key)]
    with testing.poisoned_memory():
        got = score_blocks_fused(score, *stats, **settings).double()
    exact = [type(s)(*(x.double() for x in s)) for s in stats]
    expected = score_blocks(score, *exact, key.double(), 16, **settings)
    sizes = [type(s)(s.mean.abs(), s.variance, s.size) for s in exact]
    bound = score_blocks("moments", *sizes, key.double(), 16, **{**settings, "center_keys": False}).abs() + 1
    if score == "residual":
        # Sigma enters once more, by log(e^Sigma - 1) / 2: in large activations that is as much as all other terms.
        second_moment = (sizes[0].mean.square() + sizes[0].variance) * settings["scale"] ** 2
        key_variance = sizes[1].variance.repeat_interleave(2, dim=1)
        bound = bound + second_moment @ key_variance.transpose(-1, -2) / 2
    assert bool(got.isfinite().all())
    return float(((got - expected).abs() / bound).max())


def factors_are_equal(device: str) -> bool:
    """The parts that factors are split into, against those of PyTorch's product.

    A GPU may take the rest of a square from the product before it is rounded (one fused multiply-add), which is closer
    to the square than PyTorch's rest: both parts together are held to the rounding of one fp32 product.
    """
    from diffsieve.kernels.ba_att.scores_triton import split_moments_kernel

    generator = torch.Generator().manual_seed(testing.SEED)
    mean, variance = (100 * torch.randn(20, 48, generator=generator) for _ in range(2))
    factor = torch.full((20, 6 * 64), torch.nan, device=device)
    split_moments_kernel[3,](
        mean.to(device), variance.to(device), torch.zeros(48, device=device), factor, 1.0, 1.0, 20, 20,
        HEAD_DIM=48, PADDED_DIM=64, BLOCK_D=64, ROWS=8, OF_KEYS=True,
    )  # fmt: skip
    segments = factor.cpu().unflatten(1, (3, 2, 64))
    equal = [bool((segments[..., 48:] == 0).all())]
    for segment, values in zip(segments.unbind(1), (mean, mean.square(), variance), strict=True):
        equal.append(torch.equal(segment[:, 0, :48], _tf32_part(values)))
    for segment, values in zip(segments.unbind(1)[::2], (mean, variance), strict=True):
        equal.append(torch.equal(segment[:, 1, :48], values - _tf32_part(values)))
    square = mean.double().square()
    equal.append(bool(((segments[:, 1, :, :48].double().sum(1) - square).abs() <= 2**-24 * square).all()))
    return all(equal)


def lists_are_equal(device: str, scores: torch.Tensor, kept: int) -> bool:
    """Lists of kept and of skipped blocks against PyTorch's sort, and against the definition."""
    expected = select_blocks(scores, kept)
    others, _ = skipped_blocks(expected, None, scores.shape[-1])
    with testing.poisoned_memory():
        index, skipped = list_blocks_fused(scores.to(device), kept, return_skipped=True)
        alone, nothing = list_blocks_fused(scores.to(device), kept, return_skipped=False)
    same = [torch.equal(x.cpu(), y) for x, y in ((index, expected), (alone, expected), (skipped, others))]
    rows = zip(scores.flatten(0, -2), expected.flatten(0, -2), strict=True)
    return (
        all(same)
        and nothing.numel() == 0
        and {index.dtype, skipped.dtype} == {torch.int32}
        and (bool(scores.isnan().any()) or all(row.tolist() == select_row(score, kept) for score, row in rows))
    )


def lists_by_head_are_equal(device: str, scores: torch.Tensor) -> bool:
    """Lists of heads with budgets of their own: each head's against those of the call with one budget, and PyTorch's.

    The scores are cut into heads of one row each; the last keeps one block, the first all, those between more and less.
    """
    heads, num_key = scores[..., 0].numel(), scores.shape[-1]
    scores = scores.reshape(1, heads, 1, num_key)
    budgets = torch.linspace(num_key, 1, heads).long()
    equal = []
    for fused in (True, False):
        with testing.poisoned_memory():
            lists = list_blocks_by_head(scores.to(device), budgets, return_skipped=True, fused=fused)
            alone = list_blocks_by_head(scores.to(device), budgets, return_skipped=False, fused=fused)
        index, count, skipped, skipped_count = (x.cpu() for x in lists)
        equal += [torch.equal(alone[0].cpu(), index), torch.equal(alone[1].cpu(), count)]
        equal += [alone[2].numel() == 0, alone[3].numel() == 0, {x.dtype for x in lists} == {torch.int32}]
        for head, kept in enumerate(budgets.tolist()):
            expected = select_blocks(scores[:, head], kept)[0, 0]
            others = skipped_blocks(expected, None, num_key)[0]
            equal += [count[0, head, 0] == kept, skipped_count[0, head, 0] == num_key - kept]
            equal += [torch.equal(index[0, head, 0, :kept], expected)]
            equal += [torch.equal(skipped[0, head, 0, : num_key - kept], others)]
            rest = index[0, head, 0, kept:], skipped[0, head, 0, num_key - kept :]
            equal += [bool((x == num_key - 1).all()) for x in rest]
    return all(equal)


def window_order_is_equal(device: str, length: int, window: int, descending: bool, gain: float = 1.0) -> bool:
    """The windowed order by counting against PyTorch's sort, on tokens whose distances are exact and often equal."""
    from diffsieve.kernels.ba_att.windows_triton import window_orders_triton

    generator = torch.Generator().manual_seed(testing.SEED)
    # The keys of two heads, in the memory order of a diffusers processor.
    key = gain * torch.randint(-3, 4, (2, length, 3, 24), generator=generator).transpose(1, 2)[:, 1:].half()
    centre = gain * torch.randint(-1, 2, (2, 2, 1, 24), generator=generator).float()
    key[0, 0, length // 2, 3] = torch.nan
    key[1, 1, ::3] = centre[1, 1].half()
    curve = torch.randperm(length, generator=generator)
    expected = curve[sort_windows(token_norms(key, centre).index_select(-1, curve), window, descending)]
    arguments = [x.to(device) for x in (key, centre, curve)]
    equal = []
    for tile in (forms.WindowTile(32, 16, 4), forms.WindowTile(64, 64, 4)):
        with testing.poisoned_memory():
            got = window_orders_triton(*arguments, window, descending=descending, tile=tile)
        equal.append(got.dtype is torch.int64 and torch.equal(got.cpu(), expected))
    return all(equal)


def _scores() -> dict[str, tuple[torch.Tensor, int]]:
    generator = torch.Generator().manual_seed(testing.SEED)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    special = random(6, 9)
    special[0], special[1, 4], special[2, 3], special[3, 5], special[4] = (
        torch.nan, torch.nan, torch.inf, -torch.inf, -torch.inf
    )  # fmt: skip
    nans = random(2, 40)
    nans.view(torch.int32)[0, [3, 17, 30]] = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000], dtype=torch.int32)
    return {
        "one block": (random(3, 1), 1),
        "one of many": (random(2, 3, 5, 131), 1),
        "half of an odd number": (random(1, 2, 5, 53), 27),
        "all": (random(2, 3, 13), 13),
        "all but one": (random(4, 64), 63),
        "large and tiny values": (random(4, 70) * torch.tensor([1e30, 1e-30, 1e-42, 1.0])[:, None], 20),
        "many ties": ((4 * random(5, 100)).round(), 37),
        "equal scores": (torch.full((2, 70), -3.0), 13),
        "zeros of both signs": (torch.tensor([[0.0, -0.0] * 12, [-0.0, 0.0] * 12]), 7),
        "nan and infinity": (special, 4),
        "nan of any bits": (nans, 5),
    }


def checks() -> dict[str, Callable[[str], float | bool]]:
    """All checks by name; each takes the device."""
    found: dict[str, Callable[[str], float | bool]] = {}
    for score in ("moments", "residual"):
        for name, options in {
            "plain": {"length": 37, "dim": 24},
            "wide": {"length": 16 * 66 + 5, "dim": 128},
            "one block": {"length": 3, "dim": 64},
            "large activations": {"length": 100, "dim": 32, "gain": 16.0},
            "very large activations": {"length": 100, "dim": 32, "gain": 200.0},
            "small activations": {"length": 100, "dim": 32, "gain": 1e-3},
            "first order": {"length": 100, "dim": 32, "second_order": False},
            "paper": {"length": 100, "dim": 32, "beta": 1.0, "center_keys": False, "log_count": False},
        }.items():
            found[f"scores: {score}, {name}"] = lambda device, s=score, o=options: score_difference(device, s, **o)
    found["factors of the scores"] = factors_are_equal
    for length, window in ((1, 16), (33, 64), (75, 16), (450, 96), (450, 450)):
        for descending in (True, False):
            found[f"window order: {length} tokens, {window}, {descending}"] = (
                lambda device, a=(length, window, descending): window_order_is_equal(device, *a)
            )
    found["window order: large activations"] = lambda device: window_order_is_equal(device, 450, 96, True, gain=64.0)
    for name, (scores, kept) in _scores().items():
        found[f"lists: {name}"] = lambda device, s=scores, k=kept: lists_are_equal(device, s, k)
        found[f"lists by head: {name}"] = lambda device, s=scores: lists_by_head_are_equal(device, s)
    return found
