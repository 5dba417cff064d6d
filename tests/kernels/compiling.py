"""Compile kernels for GPUs that are not there, with exactly the arguments that the launch functions give them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

# Shared memory that one program may use, in bytes: CUDA programming guide, technical specifications per capability.
SHARED_MEMORY = {
    80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024,
}  # fmt: skip

_TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64",
    torch.uint8: "u8",
}  # fmt: skip
_OPTIONS = ("num_warps", "num_stages", "maxnreg")


@dataclass(frozen=True)
class Compiled:
    """What the compilers said of one kernel: shared memory, registers and spills in bytes, and its PTX.

    `unwritten` holds the instructions that read a uniform register before any instruction writes it. There should be
    none: addresses of operands of tensor cores stand in these registers, and the assembler of CUDA 12.8 has been seen
    to lose such a write. `serialised` holds the assembler's warnings that products of wgmma have to run one by one, and
    `overwritten` the instructions that write to a register which a product of wgmma under way still uses.
    """

    name: str
    shared: int
    registers: int
    spills: int
    ptx: str
    unwritten: list[str]
    serialised: list[str]
    overwritten: list[str]


class _Recorder:
    def __init__(self, kernel: Any, launches: list[tuple[Any, tuple, dict]]) -> None:
        self._kernel, self._launches = kernel, launches

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: self._launches.append((self._kernel, args, kwargs))


def launches_of(modules: ModuleType | list[ModuleType], function: Callable[[], Any]) -> list[tuple[Any, tuple, dict]]:
    """Run `function` on CPU tensors, the kernels of its module(s) replaced: (kernel, args, kwargs) by launch."""
    launches: list[tuple[Any, tuple, dict]] = []
    with ExitStack() as stack:
        for module in modules if isinstance(modules, list) else [modules]:
            for name in [name for name in vars(module) if name.endswith("_kernel")]:
                stack.enter_context(mock.patch.object(module, name, _Recorder(getattr(module, name), launches)))
        function()
    return launches


def compile_launch(kernel: Any, args: tuple, kwargs: dict, arch: int) -> Compiled:
    """Compile one recorded launch for compute capability `arch` (90 for 9.0)."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    values = dict(zip(kernel.arg_names, args, strict=False))
    values |= {name: value for name, value in kwargs.items() if name not in _OPTIONS}
    general = set(getattr(kernel, "do_not_specialize", ()))
    constants: dict[Any, Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    constexprs = {p.name for p in kernel.params if p.is_constexpr}

    def type_of(value: Any, path: tuple[int, ...], name: str) -> Any:
        if name in constexprs or value is None:
            constants[path] = value
            return "constexpr"
        if isinstance(value, tuple):
            return tuple(type_of(part, (*path, i), name) for i, part in enumerate(value))
        if isinstance(value, torch.Tensor):
            attributes[path] = [["tt.divisibility", 16]]
            return f"*{_TYPES[value.dtype]}"
        if hasattr(value, "block_shape"):
            layout = f",{value.layout!r}" if kernel.is_gluon() else ""
            return f"tensordesc<{_TYPES[value.base.dtype]}{list(value.block_shape)}{layout}>"
        if isinstance(value, float):
            return "fp32"
        if value == 1 and name not in general:
            constants[path] = 1
            return "constexpr"
        if value % 16 == 0 and name not in general:
            attributes[path] = [["tt.divisibility", 16]]
        return "i32"

    signature = {name: type_of(values[name], (i,), name) for i, name in enumerate(kernel.arg_names)}
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constants, attributes)
    options = {name: kwargs[name] for name in _OPTIONS if name in kwargs}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    registers, spills, serialised = _resources(compiled.asm["ptx"])
    code = _disassemble(compiled.asm["cubin"])
    return Compiled(
        kernel.__name__, compiled.metadata.shared, registers, spills, compiled.asm["ptx"],
        reads_before_writes(code), serialised, writes_under_products(code),
    )  # fmt: skip


def _tool(name: str) -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends/nvidia/bin" / name)


def _disassemble(binary: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        return subprocess.run([_tool("nvdisasm"), "-c", file.name], capture_output=True, text=True, check=True).stdout


def reads_before_writes(code: str) -> list[str]:
    """Instructions of a kernel in machine code that read a uniform register which none before them has written.

    Instructions are taken in the order of their addresses, which finds every register that is never written before the
    loops. Descriptors in brackets, which span several registers of which not all count, are left out.
    """
    written: set[int] = set()
    found = []
    for line in code.splitlines():
        match = re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)\s*(.*?)\s*;", line)
        if match is None:
            continue
        name, operands = match[1], [operand.strip() for operand in match[2].split(",")]
        target = re.fullmatch(r"UR(\d+)", operands[0])
        if target is not None:
            operands = operands[1:]
        reads = re.findall(r"(?<!desc\[)\bUR(\d+)", " ".join(operands))
        if any(int(register) not in written for register in reads):
            found.append(" ".join([name, match[2]]))
            written.update(map(int, reads))
        if target is not None:
            written.update({int(target[1]), int(target[1]) + (".64" in name or ".WIDE" in name)})
    return found


def writes_under_products(code: str) -> list[str]:
    """Instructions of a kernel in machine code that write to a register of a product of wgmma before its wait.

    Products end in groups, in order; a wait leaves the last few groups under way. Taken in the order of addresses.
    """
    groups: list[set[int]] = [set()]
    found = []
    for line in code.splitlines():
        match = re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.x]+)\s*(.*?)\s*;", line)
        if match is None:
            continue
        name, operands = match[1], [operand.strip() for operand in match[2].split(",")]
        registers = [int(x[1]) if (x := re.match(r"R(\d+)\b", operand)) else None for operand in operands]
        if name.startswith("HGMMA"):
            columns = re.search(r"\.64x(\d+)x", name)
            assert columns is not None
            for first, width in zip(registers[:2], (int(columns[1]) // 2, 4), strict=True):
                groups[-1].update(range(first, first + width) if first is not None else ())
            if "gsb0" in operands:
                groups.append(set())
        elif name == "WARPGROUP.DEPBAR.LE":
            under_way = int(operands[1], 16)
            groups = groups[len(groups) - 1 - under_way :] if under_way < len(groups) else groups
        elif registers[0] is not None and not name.startswith(("ST", "RED", "SYNCS", "BAR")):
            wide = re.search(r"\.(64|128|WIDE|M88\.[24])", name)
            width = {"64": 2, "WIDE": 2, "M88.2": 2, "128": 4, "M88.4": 4}[wide[1]] if wide else 1
            if any(set(range(registers[0], registers[0] + width)) & group for group in groups):
                found.append(" ".join([name, match[2]]))
    return found


def _resources(ptx: str) -> tuple[int, int, list[str]]:
    """Registers per thread, bytes of spill stores and loads, and warnings of wgmma, from the assembler's report."""
    target = re.search(r"\.target (sm_(\d+)\w*)", ptx)
    assert target is not None
    ptxas = "ptxas-blackwell" if int(target[2]) >= 100 else "ptxas"
    run = subprocess.run(
        [_tool(ptxas), "-v", f"-arch={target[1]}", "-o", "/dev/null", "-"],
        input=ptx, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if run.returncode != 0:
        raise RuntimeError(run.stderr)
    registers = re.search(r"Used (\d+) registers", run.stderr)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", run.stderr)
    assert registers is not None, run.stderr
    assert spills is not None, run.stderr
    serialised = re.findall(r"C75\d\d\).*wgmma.*", run.stderr)
    return int(registers[1]), int(spills[1]) + int(spills[2]), serialised
