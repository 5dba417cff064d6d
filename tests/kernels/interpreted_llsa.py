"""Not a test file: run by test_llsa_triton.py in a process of its own, under the Triton interpreter.

TRITON_INTERPRET is read when a kernel is defined, so it must be set before anything imports Triton, and must not leak
into other tests. Writes one JSON object to stdout: what each test asserts on.
"""

import json
import os
import sys
import warnings
from functools import partial
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch.nn.functional import scaled_dot_product_attention

from diffsieve.kernels import testing
from diffsieve.kernels.llsa import hierarchical_topk, llsa_attention, pyramid, triton_backend
from diffsieve.kernels.llsa.levels import kept_per_level, level_lengths
from diffsieve.kernels.llsa.reference import hierarchical_topk_reference
from diffsieve.kernels.llsa.tiles import SelectionTile
from diffsieve.kernels.llsa.triton_backend import (
    enriched_attention_bwd_triton,
    enriched_attention_fwd_triton,
    hierarchical_topk_triton,
    pyramid_triton,
    pyramids_triton,
)
from tests.kernels import llsa_cases
from tests.kernels.llsa_triton_cases import CASES, measure, not_a_number, op_contract, out_of_range


def pyramid_errors() -> dict[str, float]:
    """Largest error of a level relative to the exact mean over raw tokens, per length; NaN beyond the length."""
    generator = torch.Generator().manual_seed(testing.SEED)
    errors = {}
    for length in (1, 8, 63, 65, 530):
        longer = torch.full((2, 1, length + 9, 20), float("nan"))
        longer[:, :, :length] = torch.randn(2, 1, length, 20, generator=generator)
        x = longer[:, :, :length]
        with testing.poisoned_memory():
            ours = pyramid_triton(x, 8, 4)
        exact = pyramid(x.double(), block_size=8, levels=4)
        errors[str(length)] = max(testing.error_ratio(a, b) for a, b in zip(ours, exact, strict=True))
    return errors


def selection_is_exact() -> dict[str, bool]:
    """Small integers: every score is exact and many are equal, so that the lists must be those of the reference."""
    generator = torch.Generator().manual_seed(testing.SEED)
    same = {}
    for length, block, topk, levels in [
        (7, 8, 3, 1),
        (130, 8, 6, 1),
        (520, 8, 3, 3),
        (300, 16, 40, 2),
        (300, 32, 1, 2),
    ]:
        lengths = level_lengths(length, block, levels)
        kept = kept_per_level(topk, lengths, block)
        q, k = (
            [torch.randint(-2, 3, (1, heads, n, 16), generator=generator).float() for n in lengths] for heads in (4, 2)
        )
        expected = hierarchical_topk_reference(q, k, topk=kept, block_size=block)
        # Candidates in many steps and in one, besides what the tables say.
        for tile in (None, SelectionTile(16, 4), SelectionTile(512, 4)):
            with testing.poisoned_memory():
                ours = hierarchical_topk_triton(q, k, kept, block, tile, tile)
            steps = "" if tile is None else f" by {tile.block_n}"
            same[f"{length}-b{block}-k{topk}-M{levels}{steps}"] = all(map(torch.equal, ours, expected))
    return same


def wide_offsets() -> dict[str, bool]:
    """Offsets of 64 bits inside a head, for heads that span 2**31 elements, give the same bits as those of 32."""
    same = {}
    for case in (case for case in CASES if case.layout != "contiguous"):
        query, key, value = (x.detach() for x in llsa_cases.make_inputs(case, dtype=torch.float32, device="cpu"))
        pyramids = pyramids_triton((query, key, value), case.block_size, case.levels)
        kept = kept_per_level(case.topk, level_lengths(case.length, case.block_size, case.levels), case.block_size)
        lists = hierarchical_topk_triton(*pyramids[:2], kept, case.block_size)
        run = partial(
            enriched_attention_fwd_triton, query, *pyramids[1:], lists,
            block_size=case.block_size, scale=case.dim**-0.5, enrich=case.enrich, disjoint=case.disjoint,
        )  # fmt: skip
        narrow = run()
        with mock.patch.object(triton_backend, "_is_wide", return_value=True):
            wide = run()
        same[str(case)] = all(map(torch.equal, narrow, wide))
    return same


def limits() -> dict[str, float]:
    """Errors of identities: all kept without overlap is dense; gradients through the log-sum-exp and by level."""
    generator = torch.Generator().manual_seed(testing.SEED)
    q, k, v = (torch.randn(1, 1, 83, 16, generator=generator) for _ in range(3))
    dense = scaled_dot_product_attention(q.double(), k.double(), v.double())
    errors = {}
    for levels in (1, 2):
        out = llsa_attention(q, k, v, block_size=8, topk=99, levels=levels, disjoint=True, backend="triton")
        errors[f"dense M{levels}"] = testing.error_ratio(out, dense)

    grads = []
    for dtype, backend in ((torch.float32, "triton"), (torch.float64, "reference")):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out, lse = llsa_attention(*leaves, block_size=8, topk=2, levels=2, return_lse=True, backend=backend)
        grads.append(torch.autograd.grad(out.square().sum() + lse.sin().sum(), leaves))
    for name, ours, exact in zip(("dq", "dk", "dv"), *grads, strict=True):
        errors[f"through lse {name}"] = testing.error_ratio(ours, exact)

    # Gradients level by level, folded here, are those that the kernels fold.
    from diffsieve.kernels.llsa.pyramid import fold_pyramid

    keys, values = (pyramid_triton(x, 8, 2) for x in (k, v))
    lists = hierarchical_topk_triton(pyramid_triton(q, 8, 2), keys, 2, 8)
    options = {"block_size": 8, "scale": 0.25, "enrich": True, "disjoint": False}
    out, lse = enriched_attention_fwd_triton(q, keys, values, lists, **options)
    inputs = (out, None, q, keys, values, out, lse, lists)
    apart = enriched_attention_bwd_triton(*inputs, **options)
    merged = enriched_attention_bwd_triton(*inputs, merge=True, **options)
    for name, levels_apart, one in zip(("dk", "dv"), apart[1:], merged[1:], strict=True):
        errors[f"levels apart {name}"] = testing.error_ratio(
            one[0], fold_pyramid([x.double() for x in levels_apart], length=83, block_size=8)
        )
    return errors


def long_lists() -> dict[str, float]:
    """One block that every query keeps, with lists cut into many parts: errors of the gradients."""
    from diffsieve.kernels.llsa.reference import enriched_attention_backward_reference

    generator = torch.Generator().manual_seed(testing.SEED)
    q, k, v, g = (torch.randn(1, 1, 203, 16, generator=generator) for _ in range(4))
    lengths = level_lengths(203, 8, 2)
    lists = [torch.tensor([0, 1], dtype=torch.int32).expand(1, 1, n, 2).contiguous() for n in lengths[1:]]
    lists[0][..., 1] = torch.arange(lengths[1]).clamp(min=1)
    options = {"block_size": 8, "scale": 0.25, "enrich": True, "disjoint": False}
    keys, values = (pyramid_triton(x, 8, 2) for x in (k, v))
    out, lse = enriched_attention_fwd_triton(q, keys, values, lists, **options)
    triton_backend._LIST_ROWS = 24
    ours = enriched_attention_bwd_triton(g, None, q, keys, values, out, lse, lists, merge=True, **options)
    exact_levels = [pyramid(x.double(), block_size=8, levels=2) for x in (k, v)]
    exact = enriched_attention_backward_reference(g.double(), None, q.double(), *exact_levels, lists, **options)
    pairs = zip(("dq", "dk", "dv"), (ours[0], ours[1][0], ours[2][0]), exact, strict=True)
    return {name: testing.error_ratio(a, b) for name, a, b in pairs}


def nested_lists() -> dict[str, bool]:
    """Lists of the selection, transposed by search and by sort: the same queries under each key, in the same order."""
    from diffsieve.kernels.llsa.triton_backend import _transposed

    generator = torch.Generator().manual_seed(testing.SEED)
    same = {}
    for length, block, topk, levels, kv_heads in [(7, 8, 3, 1, 1), (530, 8, 3, 3, 2), (1100, 16, 7, 2, 1)]:
        q, k = (torch.randn(2, heads, length, 16, generator=generator) for heads in (2, kv_heads))
        q[0, 0] = q[0, 0, :1]  # one head where all choose alike, so that lists are long
        pyramids = [pyramid_triton(x, block, levels) for x in (q, k)]
        kept = kept_per_level(topk, level_lengths(length, block, levels), block)
        lists = hierarchical_topk_triton(*pyramids, kept, block)
        triton_backend._LIST_ROWS = 24 * block
        with testing.poisoned_memory():
            ours, sorted_ = (_transposed(lists, kv_heads, block, nested) for nested in (True, False))
        for level, (a, b) in enumerate(zip(ours, sorted_, strict=True)):
            good = torch.equal(a.counts, b.counts)
            for head in range(2 * kv_heads):
                one, other = ([x.flatten(0, 1)[head] for x in (y.begins, y.counts, y.queries)] for y in (a, b))
                for begin, count, start in zip(one[0].tolist(), one[1].tolist(), other[0].tolist(), strict=True):
                    good &= torch.equal(one[2][begin : begin + count], other[2][start : start + count])
                # Every part of a long list has a slot of its own that names the key.
                used = int(a.used.flatten(0, 1)[head, 1])
                owners = a.slot_blocks.flatten(0, 1)[head, :used]
                parts = torch.where(one[1] > a.cap, (one[1] + a.cap - 1) // a.cap, 0)
                good &= torch.equal(owners.bincount(minlength=parts.numel()), parts)
                firsts = a.slot_firsts.flatten(0, 1)[head]
                for key in parts.nonzero().flatten().tolist():
                    good &= bool((owners[firsts[key] : firsts[key] + parts[key]] == key).all())
            same[f"{length}-b{block}-k{topk}-M{levels} level {level}"] = bool(good)
    return same


def nested_gradients() -> dict[str, bool]:
    """Gradients with the lists of the call itself are those with the same lists given, bit for bit."""
    generator = torch.Generator().manual_seed(testing.SEED)
    same = {}
    for options in (
        {"levels": 2, "topk": 3},
        {"levels": 1, "topk": 5, "disjoint": True},
        {"levels": 2, "enrich": False},
    ):
        form = {"block_size": 8, "backend": "triton"} | options
        leaves = [torch.randn(1, h, 203, 16, generator=generator).requires_grad_() for h in (2, 1, 1)]
        grad = torch.randn(1, 2, 203, 16, generator=generator)
        chosen = hierarchical_topk(*leaves[:2], block_size=8, topk=form.get("topk", 8), levels=form["levels"])
        with testing.poisoned_memory():
            outs = [llsa_attention(*leaves, **form, indices=lists) for lists in (None, chosen)]
            grads = [torch.autograd.grad(out, leaves, grad) for out in outs]
        same[str(options)] = torch.equal(*outs) and all(map(torch.equal, *grads))
    return same


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # fp16 costs the interpreter as much as fp32: the short cases have it, all the gains among them.
    halves = [case for case in CASES if case.length < 70]
    report = {f"{case}-fp32": measure(case, torch.float32) for case in CASES}
    report |= {f"{case}-fp16": measure(case, torch.float16) for case in halves}
    json.dump({
        "cases": report, "wide": wide_offsets(),
        "pyramid": pyramid_errors(), "selection": selection_is_exact(), "nan": not_a_number(),
        "out_of_range": out_of_range(), "op": op_contract(), "limits": limits(), "long_lists": long_lists(),
        "nested_lists": nested_lists(), "nested_gradients": nested_gradients(),
    }, sys.stdout)  # fmt: skip
