"""Not a test file: run by test_replay.py in a process of its own, where it replaces Triton's driver.

Kernels of LLSA are compiled for sm_90 and nearly launched, by whole calls and by repeated ones: all that reaches the
driver is noted. Writes one JSON object to stdout: what each test asserts on.
"""

import gc
import json
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from triton import knobs

from diffsieve.kernels import replay
from diffsieve.kernels.llsa import triton_calls
from diffsieve.kernels.llsa.levels import kept_per_level, level_lengths
from tests.kernels.driver_stand_in import replace_driver


class Launch(NamedTuple):
    kernel: str  # its hash
    grid: tuple[int, ...]
    args: list[Any]  # flat; tensors, or their addresses as (address,)


LAUNCHES: list[Launch] = []


def flatten(types: Sequence[Any], values: Sequence[Any], args: list[Any]) -> None:
    for kind, value in zip(types, values, strict=True):
        if isinstance(kind, tuple):
            flatten(kind, value, args)
        else:
            args.append((value,) if kind[0] == "*" and isinstance(value, int) else value)


class Launcher:
    """Notes a launch instead of making it."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.hash, self.types = metadata.hash, list(source.signature.values())

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, metadata: Any, *rest: Any) -> None:
        args: list[Any] = []
        flatten(self.types, rest[3:], args)
        LAUNCHES.append(Launch(self.hash, (x, y, z), args))


GENERATOR = torch.Generator().manual_seed(0)
SELECT = 16, (8, 8)  # block size, kept per level
ATTEND = 2, 16, 0.125, True, False  # levels, block size, scale, enrich, disjoint


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GENERATOR).bfloat16()


def select_inputs(misaligned: int = -1, layout: str = "bhld", shared: bool = False) -> list[Tensor]:
    """Query, key, value; `misaligned`: which of them begins two bytes behind a multiple of 16."""
    if shared:
        x = random(1, 2, 700, 64)
        return [x, x, x]
    if layout == "fused":
        return list(random(1, 700, 6, 64).transpose(1, 2).split(2, 1))
    tensors = [random(1, 2, 700, 64) if layout == "bhld" else random(1, 700, 2, 64).transpose(1, 2) for _ in range(3)]
    if misaligned >= 0:
        tensors[misaligned] = random(1 + 2 * 700 * 64)[1:].view(1, 2, 700, 64)
    return tensors


def attend_inputs(**options: Any) -> list[Tensor]:
    tensors = select_inputs(**options)
    lists = [torch.zeros(1, 2, n, k, dtype=torch.int32) for n, k in ((44, 8), (3, 3))]
    pooled = [random(1, 2, n, 64) for _ in range(2) for n in (44, 3)]
    return [*tensors, *lists, *pooled]


def differentiate_inputs(grad_lse: bool = False, **options: Any) -> list[Tensor | None]:
    query, *others = attend_inputs(**options)
    lse = torch.zeros(1, 2, 700)
    return [
        random(1, 2, 700, 64), lse.clone() if grad_lse else None, query, *others[:2], torch.empty_like(query), lse,
        *others[2:],
    ]  # fmt: skip


def launches(function: Callable[..., Any], inputs: Sequence[Tensor | None], options: Any) -> tuple[list[Launch], Any]:
    LAUNCHES.clear()
    results = function(inputs, *options)
    return list(LAUNCHES), results


def same(
    function: Any, make: Callable[[], Sequence[Tensor | None]], options: Any, repeated_by: Any = None
) -> dict[str, bool]:
    """Whether a repeated call launches what a whole call does, each at its own tensors."""
    repeated_by = repeated_by or partial(replay.replayed, function)
    launches(repeated_by, make(), options)  # recorded
    inputs, other = make(), make()
    # All that is made stays alive, so that an address means one tensor.
    with replay._Recording(inputs) as kept:
        whole, results = launches(function, inputs, options)
    zeros_made = {kept.made[i].untyped_storage().data_ptr() for i in kept.zeros}
    again, other_results = launches(repeated_by, other, options)

    found = {
        "repeated": all(not isinstance(arg, Tensor) for launch in again for arg in launch.args),
        "kernels": [x.kernel for x in whole] == [x.kernel for x in again],
        "grids": [x.grid for x in whole] == [x.grid for x in again],
    }
    # Where a tensor of the whole call is in the repeated one; memory of both, by its beginning.
    places: dict[int, int] = {}
    known = [(a, b) for a, b in zip((*inputs, *results), (*other, *other_results), strict=True) if a is not None]
    expected = {a.data_ptr(): b.data_ptr() for a, b in known}
    sizes: dict[int, int] = {}
    storages = [a.untyped_storage().data_ptr() for a in inputs if a is not None]
    values = True
    for one, two in zip(whole, again, strict=True):
        for a, b in zip(one.args, two.args, strict=True):
            if not isinstance(a, Tensor):
                values &= type(a) is type(b) and a == b
                continue
            (address,) = b
            values &= places.setdefault(a.data_ptr(), address) == address
            values &= expected.get(a.data_ptr(), address) == address
            sizes[address] = a.untyped_storage().nbytes() - a.storage_offset() * a.element_size()
            if storages.count(a.untyped_storage().data_ptr()) > 1:  # inputs that share memory lie in one another
                sizes[address] = a.element_size()
            values &= (a.data_ptr() % 16 == 0) == (address % 16 == 0)
            if a.untyped_storage().data_ptr() in zeros_made:
                sizes[address] = a.numel() * a.element_size()
    found["arguments"] = values
    ends = sorted((address, address + size) for address, size in sizes.items())
    found["apart"] = all(end <= begin for (_, end), (begin, _) in pairwise(ends))
    found["results"] = all(
        (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
        for a, b in zip(results, other_results, strict=True)
    )
    return found


def differentiate(tensors: Sequence[Tensor], levels: int, *options: Any) -> Any:
    """`triton_calls.differentiate` with the arguments of `_differentiate`."""
    rest = tensors[7:]
    return triton_calls.differentiate(*tensors[:7], rest[:levels], rest[levels:], *options)


def memory_ratio(length: int, levels: int) -> float:
    """Memory of a repeated forward and backward at the end of the backward, where it is most.

    Over that of queries, keys, values, output, their gradients and the lists. B 2, H 4, D 64, block 16, topk 8, bf16.
    """
    replay._CALLS.clear()
    # Nobody writes to these: they take addresses and no memory.
    query, key, value, grad_out = (torch.empty(2, 4, length, 64, dtype=torch.bfloat16) for _ in range(4))
    kept: list[Tensor] = []
    for _ in range(2):
        found = triton_calls.select(
            query, key, value, 16, kept_per_level([8] * levels, level_lengths(length, 16, levels), 16)
        )
        lists, pooled = found[:levels], found[levels:]
        out, lse = triton_calls.attend(query, key, value, lists, pooled, *ATTEND[1:])
        with torch.no_grad():
            grads = triton_calls.differentiate(
                grad_out, None, query, key, value, out, lse, lists, pooled, *ATTEND[1:], True
            )
        kept = [query, key, value, grad_out, out, lse, *grads, *pooled]
    calls = list(replay._CALLS.values())
    assert len(calls) == 3
    list_bytes = sum(x.nbytes for x in lists)
    backward = calls[2]
    zeros = sum(size.numel() * dtype.itemsize for size, _, dtype in backward.forms[backward.n_results :])
    peak = sum(x.nbytes for x in kept) + list_bytes + backward.scratch_bytes + zeros
    return peak / (8 * query.nbytes + list_bytes)


def kernels(function: Any, inputs: Sequence[Tensor | None], options: Any) -> list[str]:
    """Of a call that may be repeated."""
    return [x.kernel for x in launches(partial(replay.replayed, function), inputs, options)[0]]


def is_repeated(function: Any, make: Callable[[], Sequence[Tensor | None]], options: Any) -> bool:
    kernels(function, make(), options)
    kernels(function, make(), options)
    return all(not isinstance(arg, Tensor) for launch in LAUNCHES for arg in launch.args)


def frees_what_it_recorded(function: Any, make: Callable[[], Sequence[Tensor | None]], options: Any) -> bool:
    """Whether no tensor of a recorded call is left after it, without the garbage collector."""
    found: list[weakref.ref[Tensor]] = []

    def noted(inputs: Sequence[Tensor | None], *rest: Any) -> Any:
        found.extend(weakref.ref(x) for x in inputs if x is not None)
        return function(inputs, *rest)

    gc.collect()
    gc.disable()
    try:
        replay.replayed(noted, make(), *options)
        LAUNCHES.clear()
        return len(found) > 0 and all(ref() is None for ref in found)
    finally:
        gc.enable()


def with_an_operation(inputs: Sequence[Tensor], *options: Any) -> Any:
    """What cannot be repeated by launches alone."""
    inputs[0].mul_(2)
    return triton_calls._select(inputs, *options)


def with_a_copy(inputs: Sequence[Tensor], *options: Any) -> Any:
    return triton_calls._select([inputs[0].clone(), *inputs[1:]], *options)


def main() -> None:
    replace_driver(Launcher)
    select, attend, backward = triton_calls._select, triton_calls._attend, triton_calls._differentiate
    nested = *ATTEND, True
    report: dict[str, Any] = {
        "same": {
            "select": same(select, select_inputs, SELECT),
            "select, tokens before heads": same(select, lambda: select_inputs(layout="blhd"), SELECT),
            "select, misaligned": same(select, lambda: select_inputs(misaligned=1), SELECT),
            "attend": same(attend, attend_inputs, ATTEND),
            "attend, misaligned": same(attend, lambda: attend_inputs(misaligned=0), ATTEND),
            "differentiate": same(backward, differentiate_inputs, nested),
            "differentiate, with lse": same(backward, lambda: differentiate_inputs(grad_lse=True), nested),
            # Slices of one tensor: their gradients cannot have the same strides, so the backward copies them.
            "select, fused": same(select, lambda: select_inputs(layout="fused"), SELECT),
            "attend, fused": same(attend, lambda: attend_inputs(layout="fused"), ATTEND),
            "differentiate, fused": same(
                backward, lambda: differentiate_inputs(layout="fused"), nested, repeated_by=differentiate
            ),
        }
    }
    # A kernel for aligned tensors must not get others, nor the other way round.
    aligned, misaligned = (kernels(select, select_inputs(misaligned=i), SELECT) for i in (-1, 1))
    report["other kernel when misaligned"] = aligned[0] != misaligned[0]
    replay._CALLS.clear()
    kernels(select, select_inputs(shared=True), SELECT)
    inputs = select_inputs()
    kernels(select, inputs, SELECT)
    firsts = {address for arg in LAUNCHES[0].args if isinstance(arg, tuple) for address in arg}
    report["one tensor first, three then"] = {x.data_ptr() for x in inputs} <= firsts
    report["not repeated"] = {
        "operation": not is_repeated(with_an_operation, select_inputs, SELECT),
        "copy": not is_repeated(with_a_copy, select_inputs, SELECT),
        "lists of unknown origin": not is_repeated(backward, differentiate_inputs, (*ATTEND, False)),
    }
    hook = mock.Mock()
    knobs.runtime.launch_enter_hook.add(hook)
    report["not repeated"]["profiler"] = not is_repeated(select, select_inputs, SELECT)
    knobs.runtime.launch_enter_hook.remove(hook)
    report["frees what it recorded"] = frees_what_it_recorded(backward, differentiate_inputs, nested)
    with mock.patch.object(replay, "_MOST_CALLS", 1):
        report["forgotten"] = is_repeated(attend, attend_inputs, ATTEND) and len(replay._CALLS) == 1
    report["memory"] = {f"{n} tokens": memory_ratio(n, levels) for n, levels in ((16_384, 2), (262_144, 3))}
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
