"""Run a Gluon kernel for Hopper on the CPU: its own source, with the hardware's promises and no more than these.

Roles of `warp_specialize` are threads of which one runs at a time; at every barrier, copy and product the next one is
drawn at random from those that can go on, some far more often than others, as the program has it. If none can, that
is a deadlock, and it is raised.

Asynchronous work ends as late or as early as the hardware may end it, again at random: the bytes of a copy arrive at
any time after its issue, and its target holds NaN until then; a product reads shared memory at its issue, or not until
the wait that ends it. So a slot that is released too early or read too soon shows in the result. Shared memory begins
as NaN. Loads and stores outside their tensor raise.

A product and a sum that follows it are rounded once, as the compiler makes one instruction of them.

Registers, layouts and the compiler's own barriers are not modelled: what the compilers say is for another test.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

_WEIGHTS = (1, 30)


class DeadlockError(AssertionError):
    pass


class Tile:
    """A tensor in registers."""

    def __init__(self, data: torch.Tensor, unrounded: torch.Tensor | None = None) -> None:
        self.data, self.unrounded = data, unrounded
        self.type = SimpleNamespace(layout=None)

    def __getitem__(self, key: Any) -> Tile:
        return Tile(self.data[key])

    def __mul__(self, other: Any) -> Tile:
        factors = self.data, other.data if isinstance(other, Tile) else torch.tensor(other, dtype=self.data.dtype)
        return Tile(factors[0] * factors[1], factors[0].double() * factors[1].double())

    def to(self, dtype: torch.dtype) -> Tile:
        return Tile(self.data.to(dtype))

    def reshape(self, shape: list[int]) -> Tile:
        return Tile(self.data.reshape(shape))


def _operator(name: str) -> Callable[[Tile, Any], Tile]:
    def apply(a: Tile, b: Any) -> Tile:
        other = b.data if isinstance(b, Tile) else b
        if a.unrounded is not None and name in ("__add__", "__sub__"):
            return Tile(getattr(a.unrounded, name)(other).to(a.data.dtype))
        return Tile(getattr(a.data, name)(other))

    return apply


for _name in ("add", "radd", "sub", "rsub", "truediv", "rtruediv", "lt", "eq"):
    setattr(Tile, f"__{_name}__", _operator(f"__{_name}__"))


class Scalar(int):
    def to(self, dtype: torch.dtype) -> int:
        return int(self)


@dataclass
class Pointer:
    data: torch.Tensor
    offset: Any = 0

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.data, offset + self.offset)

    def at(self, mask: Tile | None = None) -> torch.Tensor:
        offset = self.offset.data if isinstance(self.offset, Tile) else torch.tensor(self.offset)
        if mask is not None:
            offset = offset[mask.data]
        assert ((offset >= 0) & (offset < self.data.numel())).all(), "an access outside the tensor"
        return offset


class Shared:
    """A view of shared memory."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data, self.dtype = data, data.dtype

    def index(self, i: int) -> Shared:
        assert 0 <= i < len(self.data)
        return Shared(self.data[i])

    def reshape(self, shape: list[int]) -> Shared:
        return Shared(self.data.view(shape))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.permute(order))

    def load(self, layout: Any) -> Tile:
        return Tile(self.data.clone())

    def store(self, tile: Tile) -> None:
        assert tile.data.dtype == self.dtype
        self.data.copy_(tile.data)


class Barrier:
    """A phase ends when all arrivals of it are made and all bytes that it expects have come."""

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.ended = 0

    def settle(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.ended = self.count, self.ended + 1

    def arrive(self, count: int) -> None:
        assert 0 < count <= self.pending, "more arrivals than the barrier counts"
        self.pending -= count
        self.settle()

    def passed(self, parity: int) -> bool:
        # The hardware tells the last phase that ended by its parity alone; before the first it passes for parity 1.
        return (self.ended - 1) % 2 == parity


class Barriers(list):
    def index(self, i: int) -> Barrier:  # type: ignore[override]
        return self[i]


@dataclass
class Product:
    """A product under way: `run` reads the operands."""

    run: Callable[[], torch.Tensor]
    result: torch.Tensor | None = None


@dataclass
class Descriptor:
    source: Any  # a TensorDescriptor

    @property
    def dtype(self) -> torch.dtype:
        return self.source.base.dtype

    @property
    def layout(self) -> Any:
        return self.source.layout

    @property
    def block_type(self) -> SimpleNamespace:
        return SimpleNamespace(nbytes=torch.Size(self.source.block_shape).numel() * self.dtype.itemsize)

    def box(self, coordinates: list[int]) -> tuple[torch.Tensor, tuple[slice, ...]]:
        """The part of the tensor inside the box, and where it lies in the box."""
        x = torch.as_strided(self.source.base, self.source.shape, self.source.strides)
        inside, target = [], []
        for start, block, size in zip(coordinates, self.source.block_shape, self.source.shape, strict=True):
            low, high = max(start, 0), max(min(start + block, size), max(start, 0))
            inside.append(slice(min(low, size), min(high, size)))
            target.append(slice(low - start, low - start + inside[-1].stop - inside[-1].start))
        return x[tuple(inside)], tuple(target)


@dataclass
class Role:
    """A thread of `warp_specialize`."""

    run: Callable[[], None]
    ready: Callable[[], bool] = lambda: True
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    products: list[Product] = field(default_factory=list)
    stores: list[Callable[[], Any]] = field(default_factory=list)
    done: bool = False
    error: BaseException | None = None


class Machine:
    """One program at a time: roles, copies under way, and the module names that a kernel imports.

    `specialised` counts the programs that got as far as their roles.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.copies: list[Callable[[], None]] = []
        self.barriers: list[Barrier] = []
        self.role: Role | None = None
        self.back = threading.Semaphore(0)
        self.program = (0, 0, 0)
        self.grid = (1, 1, 1)
        self.specialised = 0

    # ---- scheduling

    def pause(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Let others run until `ready`."""
        role = self.role
        assert role is not None
        role.ready = ready
        self.back.release()
        role.turn.acquire()
        if role.error is not None:
            raise role.error

    def specialize(self, entries: list, worker_warps: list[int], worker_registers: list[int]) -> None:
        assert len(entries) - 1 == len(worker_warps) == len(worker_registers)
        self.specialised += 1
        roles = [Role(lambda function=function, args=args: function(*args)) for function, args in entries]
        threads = [threading.Thread(target=self._main, args=(role,), daemon=True) for role in roles]
        for thread in threads:
            thread.start()
        weights = {id(role): self.random.choice(_WEIGHTS) for role in roles}
        weight_of_copies = self.random.choice(_WEIGHTS)
        failure: BaseException | None = None
        while not all(role.done for role in roles):
            able = [role for role in roles if not role.done and (failure is not None or role.ready())]
            choices: list[Any] = [*able, *(self.copies if failure is None else [])]
            if not choices:
                failure = DeadlockError(f"{sum(not role.done for role in roles)} roles wait for what nobody will do")
                continue
            (chosen,) = self.random.choices(choices, [weights.get(id(x), weight_of_copies) for x in choices])
            if not isinstance(chosen, Role):
                self.copies.remove(chosen)
                chosen()
                continue
            if failure is not None:
                chosen.error = failure
            self.role = chosen
            chosen.turn.release()
            self.back.acquire()
            if failure is None and chosen.error is not None:
                failure = chosen.error
        for thread in threads:
            thread.join()
        if failure is not None:
            raise failure

    def _main(self, role: Role) -> None:
        role.turn.acquire()
        try:
            if role.error is None:
                role.run()
                assert not role.products, "a product was still under way at the end"
                assert not role.stores, "the output was still being read at the end"
        except BaseException as error:
            role.error = error
        role.done = True
        self.back.release()

    def launch(self, kernel: Callable[..., None], grid: tuple[int, int, int], args: tuple, kwargs: dict) -> None:
        self.grid = grid
        values = [self._argument(x) for x in args]
        options = {name: x for name, x in kwargs.items() if name not in ("num_warps", "maxnreg")}
        for z in range(grid[2]):
            for y in range(grid[1]):
                for x in range(grid[0]):
                    self.program, self.barriers = (x, y, z), []
                    kernel(*values, **options)
                    assert not self.copies, "a copy was still under way at the end"
                    assert all(barrier.bytes == 0 for barrier in self.barriers)

    @staticmethod
    def _argument(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            if not x.is_contiguous():  # expanded: what lies in memory
                x = x.as_strided((x.untyped_storage().nbytes() // x.element_size() - x.storage_offset(),), (1,))
            return Pointer(x.view(-1))
        return Descriptor(x) if hasattr(x, "block_shape") else x

    # ---- what a kernel imports

    def load_kernel(self, path: Path) -> ModuleType:
        """Run the file of a kernel with this machine in the place of Gluon."""
        language = self._language()
        hopper = SimpleNamespace(
            fence_async_shared=lambda: None, mbarrier=self._mbarrier(), tma=self._tma(),
            warpgroup_mma=self._mma, warpgroup_mma_wait=self._mma_wait,
        )  # fmt: skip
        gluon = SimpleNamespace(jit=lambda function=None, **_: function or (lambda f: f), language=language)
        modules = {
            "triton.experimental": SimpleNamespace(gluon=gluon),
            "triton.experimental.gluon": gluon,
            "triton.experimental.gluon.language.nvidia.hopper": hopper,
        }
        module = ModuleType("emulated_kernel")
        with mock.patch.dict(sys.modules, modules):  # type: ignore[arg-type]
            exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), module.__dict__)
        return module

    def _language(self) -> SimpleNamespace:
        def both(scalar: Callable, tensor: Callable) -> Callable:
            return lambda a, b: Tile(tensor(a.data, b.data)) if isinstance(a, Tile) else scalar(a, b)

        def where(condition: Any, a: Any, b: Any) -> Any:
            if not isinstance(condition, Tile):
                return a if condition else b
            a, b = (x.data if isinstance(x, Tile) else x for x in (a, b))
            return Tile(torch.where(condition.data, a, b))

        def store(pointer: Pointer, tile: Tile, mask: Tile | None = None) -> None:
            values = tile.data if mask is None else tile.data[mask.data]
            pointer.data[pointer.at(mask)] = values.to(pointer.data.dtype)

        def allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
            if layout == "mbarrier":
                new = Barriers(Barrier() for _ in range(shape[0]))
                self.barriers += new
                return new[0] if len(shape) == 1 else new
            return Shared(torch.full(shape, float("nan"), dtype=dtype))

        return SimpleNamespace(
            constexpr=lambda x: x, float32=torch.float32, int64=torch.int64,
            program_id=lambda axis: Scalar(self.program[axis]), num_programs=lambda axis: self.grid[axis],
            cdiv=lambda a, b: -(-a // b), minimum=both(min, torch.minimum), maximum=both(max, torch.maximum),
            static_range=range, where=where, exp2=lambda x: Tile(x.data.exp2()), log2=lambda x: Tile(x.data.log2()),
            abs=lambda x: Tile(x.data.abs()),
            max=lambda x, axis: Tile(x.data.amax(axis)), sum=lambda x, axis: Tile(x.data.sum(axis)),
            full=lambda shape, value, dtype, layout: Tile(torch.full(shape, value, dtype=dtype)),
            arange=lambda start, end, layout: Tile(torch.arange(start, end)), convert_layout=lambda x, layout: x,
            load=lambda pointer: int(pointer.data[pointer.at()]), store=store,
            NVMMADistributedLayout=lambda *_: None, DotOperandLayout=lambda *_: None, SliceLayout=lambda *_: None,
            allocate_shared_memory=allocate, warp_specialize=self.specialize,
        )  # fmt: skip

    def _mbarrier(self) -> SimpleNamespace:
        def init(barrier: Barrier, count: int) -> None:
            barrier.count = barrier.pending = count

        def expect(barrier: Barrier, nbytes: int) -> None:
            self.pause()
            barrier.bytes += nbytes
            barrier.arrive(1)

        def arrive(barrier: Barrier, count: int) -> None:
            self.pause()
            barrier.arrive(count)

        def wait(barrier: Barrier, phase: int) -> None:
            self.pause(lambda: barrier.passed(phase))

        return SimpleNamespace(init=init, expect=expect, arrive=arrive, wait=wait, MBarrierLayout=lambda: "mbarrier")

    def _tma(self) -> SimpleNamespace:
        def load(descriptor: Descriptor, coordinates: list[int], barrier: Barrier, target: Shared) -> None:
            self.pause()
            target.data.fill_(float("nan"))

            def arrive() -> None:
                source, place = descriptor.box(coordinates)
                target.data.zero_()
                target.data[place] = source
                barrier.bytes -= descriptor.block_type.nbytes
                barrier.settle()

            self.copies.append(arrive)

        def store(descriptor: Descriptor, coordinates: list[int], source: Shared) -> None:
            target, place = descriptor.box(coordinates)
            assert self.role is not None
            self.role.stores.append(lambda: target.copy_(source.data[place]))

        def store_wait(pending: int) -> None:
            self.pause()
            assert self.role is not None
            while len(self.role.stores) > pending:
                self.role.stores.pop(0)()

        return SimpleNamespace(
            async_copy_global_to_shared=load, async_copy_shared_to_global=store, store_wait=store_wait
        )

    def _mma(self, a: Any, b: Shared, acc: Any, use_acc: bool = True, is_async: bool = False) -> Product:
        assert is_async
        assert self.role is not None
        assert isinstance(acc, Tile), "an accumulator that is still being written"

        def run() -> torch.Tensor:
            result = a.data.float() @ b.data.float()
            return result + acc.data if use_acc else result

        product = Product(run)
        if self.random.random() < 0.5:
            product.result = run()
        self.role.products.append(product)
        self.pause()
        return product

    def _mma_wait(self, pending: int, deps: list[Product]) -> Any:
        self.pause()
        assert self.role is not None
        while len(self.role.products) > pending:
            product = self.role.products.pop(0)
            product.result = product.run() if product.result is None else product.result
        assert all(product not in self.role.products for product in deps), "a product that is still under way"
        tiles = [Tile(product.result) for product in deps if product.result is not None]
        return tiles[0] if len(tiles) == 1 else tuple(tiles)
