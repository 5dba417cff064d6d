"""Repeat the Triton launches of a call without the Python that led to them, and without binding their arguments.

A short call waits for its host: Triton looks at every argument of every launch to find the compiled kernel, and the
functions here compute grids, tiles and sizes that follow from shapes. `replayed` runs a function once as it is and
notes which kernels it launched with what; later calls with tensors alike launch the same kernels at new addresses.

Alike means all that a launch depends on: shapes, strides, dtypes, device, whether addresses are multiples of 16 bytes
(Triton compiles another kernel where they are not), the other arguments, and PyTorch's setting for products in fp32.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver

Tensors = Sequence[Tensor | None]

# Calls remembered; beyond, all are forgotten.
_MOST_CALLS = 256
# Bytes between the beginnings of scratch tensors, as between allocations.
_ALIGNMENT = 512

_ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.zeros.default,
}
_VIEWS = {torch.ops.aten.select.int, torch.ops.aten.detach.default}

# What was recorded for tensors of a kind, None where it cannot be repeated.
_CALLS: dict[Any, _Call | None] = {}
_LOCAL = threading.local()


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """`kernel[grid](*args, **options)`, noted by `replayed`; every launch in a function given to it must be made so."""
    compiled = kernel[grid](*args, **options)
    recording: _Recording | None = getattr(_LOCAL, "recording", None)
    if recording is not None:
        recording.note(kernel, compiled, grid, args, options)


def replayed(function: Callable[..., Sequence[Tensor]], tensors: Tensors, *options: Any) -> Sequence[Tensor]:
    """`function(tensors, *options)`, from the second time on by its launches alone.

    A function that starts operations of PyTorch other than allocations, or launches with a tensor that is neither in
    `tensors` nor its own, is called every time. So it is while a profiler hooks Triton's launches, and under Triton's
    interpreter.

    Args:
        function: launches kernels by `launch` and returns tensors that it has allocated. What it launches depends on
            nothing but its arguments, as listed at the top of this file.
        tensors: its inputs, on one device, the first one not None.
        options: hashable.
    """
    key = function, options, torch.get_float32_matmul_precision(), *map(_kind, tensors)
    try:
        call = _CALLS[key]
    except KeyError:
        return _record(key, function, tensors, options)
    if call is None or _hooked(knobs.runtime.launch_enter_hook) or _hooked(knobs.runtime.launch_exit_hook):
        return function(tensors, *options)
    return call(tensors)


def _kind(x: Tensor | None) -> Any:
    """All that a launch depends on of a tensor, but its address."""
    return None if x is None else (x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() % 16 == 0)


def _hooked(hook: Any) -> bool:
    return bool(getattr(hook, "calls", hook))


def _record(key: Any, function: Callable[..., Sequence[Tensor]], tensors: Tensors, options: Any) -> Sequence[Tensor]:
    # Tensors of their own: here one may be several of the inputs, and not the next time.
    inputs = [None if x is None else x.detach() for x in tensors]
    recording = _Recording(inputs)
    _LOCAL.recording = recording
    try:
        with recording:
            results = function(inputs, *options)
    finally:
        _LOCAL.recording = None
    if len(_CALLS) >= _MOST_CALLS:
        _CALLS.clear()
    _CALLS[key] = recording.call(results)
    return results


class _Recording(TorchDispatchMode):
    """What a function allocates and launches."""

    def __init__(self, inputs: Tensors) -> None:
        super().__init__()
        self.inputs = inputs
        self.made: list[Tensor] = []
        self.zeros: set[int] = set()  # numbers of those that begin with zeros
        self.launches: list[tuple[CompiledKernel, tuple[int, ...], list[Any]]] = []
        self.possible = True  # to repeat it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            if func is torch.ops.aten.zeros.default:
                self.zeros.add(len(self.made))
            self.made.append(result)
        elif func not in _VIEWS:
            self.possible = False
        return result

    def note(self, kernel: Any, compiled: Any, grid: tuple[int, ...], args: Any, options: dict[str, Any]) -> None:
        if not isinstance(compiled, CompiledKernel):  # the interpreter compiles nothing
            self.possible = False
            return
        # No parameter has a default, the first ones come by position; options without a parameter say how to compile.
        ordered = [*args, *[options[name] for name in kernel.arg_names[len(args) :]]]
        self.launches.append((compiled, (*grid, 1, 1)[:3], ordered))

    def call(self, results: Sequence[Tensor]) -> _Call | None:
        """How to repeat it, or None."""
        n_inputs = len(self.inputs)
        numbers = [self.place(x)[0] - n_inputs for x in results]
        if min(numbers) < 0 or len(set(numbers)) < len(numbers) or self.zeros.intersection(numbers):
            return None
        if not all(x.shape == self.made[i].shape for x, i in zip(results, numbers, strict=True)):
            return None
        call = _Call(self, numbers)
        return call if self.possible else None

    def place(self, x: Tensor) -> tuple[int, int]:
        """Number among the inputs and then what was made, and bytes from there.

        Inputs are told by identity, as their memory may be shared; what was made is told by its memory.
        """
        for i, known in enumerate(self.inputs):
            if x is known:
                return i, 0
        memory = x.untyped_storage().data_ptr()
        for i, made in enumerate(self.made, start=len(self.inputs)):
            if memory == made.untyped_storage().data_ptr():
                return i, x.data_ptr() - made.data_ptr()
        self.possible = False
        return 0, 0


class _Call:
    """The launches of a function for tensors of one kind.

    All values stand in one list: constants, then addresses, then tuples of these; a launch picks its arguments.
    """

    def __init__(self, recording: _Recording, results: list[int]) -> None:
        n_inputs, made = len(recording.inputs), recording.made
        # Tensors of their own; all others are cut out of one, which comes first.
        own = results + sorted(recording.zeros)
        self.forms = [(made[i].size(), made[i].stride(), made[i].dtype) for i in own]
        self.n_results = len(results)
        self.scratch_bytes = 0
        origins = {i: (i, 0) for i in range(n_inputs)}
        origins |= {n_inputs + i: (n_inputs + 1 + own.index(i), 0) for i in own}

        constants: list[Any] = []
        addresses: list[tuple[int, int]] = []
        tuples: list[list[tuple[list[Any], int]]] = []
        self.constants, self.addresses = constants, addresses

        # Two functions: one that calls itself would keep what was recorded until the garbage collector finds it.
        def enter_one(arg: Any) -> tuple[list[Any], int]:
            """The list that holds a constant or an address, and where."""
            kind: list[Any] = constants
            if isinstance(arg, Tensor):
                number, offset = recording.place(arg)
                if number not in origins:  # only what a launch takes needs room
                    origins[number] = n_inputs, self.scratch_bytes
                    n_bytes = made[number - n_inputs].untyped_storage().nbytes()
                    self.scratch_bytes += -(-n_bytes // _ALIGNMENT) * _ALIGNMENT
                origin, begin = origins[number]
                kind, arg = addresses, (origin, begin + offset)
            kind.append(arg)
            return kind, len(kind) - 1

        def enter(arg: Any) -> tuple[list[Any], int]:
            """The same of any argument; tuples hold no tuples."""
            if not isinstance(arg, tuple):
                return enter_one(arg)
            tuples.append([enter_one(x) for x in arg])
            return tuples, len(tuples) - 1

        entered = [[enter(arg) for arg in args] for _, _, args in recording.launches]

        def number_of(entry: tuple[list[Any], int]) -> int:
            kind, i = entry
            return i + (kind is not constants) * len(constants) + (kind is tuples) * len(addresses)

        self.tuples = [[number_of(entry) for entry in entries] for entries in tuples]
        self.launches = [
            # With the kernel itself, which is unloaded when nobody holds it.
            (
                compiled.run,
                grid,
                compiled.function,
                compiled.packed_metadata,
                itemgetter(*map(number_of, args)),
                compiled,
            )
            for (compiled, grid, _), args in zip(recording.launches, entered, strict=True)
        ]

    def __call__(self, tensors: Tensors) -> list[Tensor]:
        query = tensors[0]
        assert query is not None
        device = query.device
        with torch.cuda.device_of(query):
            made = [torch.empty_strided(size, stride, dtype=dtype, device=device) for size, stride, dtype in self.forms]
            for x in made[self.n_results :]:
                x.zero_()
            scratch = torch.empty(self.scratch_bytes, dtype=torch.uint8, device=device)
            origins = [0 if x is None else x.data_ptr() for x in (*tensors, scratch, *made)]
            values = self.constants.copy()
            values += [origins[origin] + offset for origin, offset in self.addresses]
            for numbers in self.tuples:
                values.append(tuple([values[n] for n in numbers]))
            stream = driver.active.get_current_stream(device.index or 0)
            for run, grid, function, metadata, pick, _ in self.launches:
                run(*grid, stream, function, metadata, None, None, None, *pick(values))
        return made[: self.n_results]
