"""The Hopper kernel without a GPU: its source on an emulator, and what the compilers say; tests that await a GPU."""

import importlib.util
import inspect
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from diffsieve.errors import BackendUnavailableError, UserInputError
from diffsieve.kernels import testing
from diffsieve.kernels.block_sparse import block_sparse_attention, choose_backend, fallbacks
from tests.kernels.compiling import SHARED_MEMORY, Compiled, compile_launch, launches_of, writes_under_products
from tests.kernels.gluon_emulator import DeadlockError, Machine
from tests.kernels.hopper_cases import BASE, HOPPER_CASES
from tests.kernels.own_process import run_script

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton has no build for this platform"
)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def kernel_file() -> Path:
    from diffsieve.kernels.block_sparse import hopper_backend

    return Path(inspect.getfile(hopper_backend)).with_name("hopper_kernel.py")


class Emulated:
    """Stands in for the kernel: a launch runs its source on the emulator."""

    def __init__(self, seed: int, path: Path | None = None) -> None:
        self.machine = Machine(seed)
        self.kernel = self.machine.load_kernel(path or kernel_file()).block_sparse_fwd_hopper_kernel

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *args, **kwargs: self.machine.launch(self.kernel, grid, args, kwargs)


def emulate(inputs: testing.AttentionInputs, block_size: int, kernel: Emulated, tile: Any = None, **more: Any) -> Any:
    from diffsieve.kernels.block_sparse import hopper_backend

    options = {"block_size": block_size, "scale": inputs.query.shape[-1] ** -0.5, "return_lse": True, "tile": tile}
    with mock.patch.object(hopper_backend, "block_sparse_fwd_hopper_kernel", kernel), testing.poisoned_memory():
        return hopper_backend.block_sparse_attention_hopper(*inputs.tensors(), **options, **more)


def check(inputs: testing.AttentionInputs, block_size: int, out: torch.Tensor, lse: torch.Tensor) -> None:
    exact, exact_lse = testing.exact_attention(inputs, block_size=block_size)
    single = inputs.floats_to(torch.float32).tensors()
    _, single_lse = block_sparse_attention(*single, block_size=block_size, backend="reference", return_lse=True)
    bound = testing.error_bound(testing.masked_sdpa(inputs, block_size=block_size), exact)
    assert testing.error_ratio(out, exact) <= bound
    assert testing.lse_error(lse, exact_lse) <= testing.lse_bound(single_lse, exact_lse)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", HOPPER_CASES, ids=str)
def test_emulated_error_is_at_most_twice_that_of_dense_attention(case, dtype):
    inputs = testing.make_inputs(case, dtype=DTYPES[dtype])
    out, lse = emulate(inputs, case.block_size, Emulated(0))
    check(inputs, case.block_size, out, lse)
    assert out.stride() == torch.empty_like(inputs.query).stride()


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize(("consumers", "block_n"), [(1, 64), (1, 128), (2, 64), (2, 128)])
def test_emulated_tiles(consumers, block_n, stages):
    from diffsieve.kernels.block_sparse.hopper_backend import HopperTile

    tile = HopperTile(consumers, block_n, stages, query_in_registers=stages != 2)
    for length in (936, 1001):  # the last block holds 40 keys, one step of 64, or 105, two
        case = replace(BASE, len_q=200, len_k=length, density=1.0, heads=1, kv_heads=1)
        inputs = testing.make_inputs(case, dtype=torch.bfloat16)
        for seed in range(2):
            check(inputs, 128, *emulate(inputs, 128, Emulated(seed), tile))


@pytest.mark.parametrize("case", HOPPER_CASES, ids=str)
def test_emulated_fixed_stabiliser(case):
    inputs = testing.make_inputs(case, dtype=torch.bfloat16)
    check(inputs, case.block_size, *emulate(inputs, case.block_size, Emulated(0), fixed_stabiliser=True))


def test_the_fixed_stabiliser_computes_only_flagged_programs_again():
    inputs = testing.make_inputs(replace(BASE, density=1.0), dtype=torch.bfloat16)
    programs = 2 * 3
    kernel = Emulated(0)
    emulate(inputs, 128, kernel, fixed_stabiliser=True)
    assert kernel.machine.specialised == programs
    # The last block, which is computed first, has small logits: those of the others leave the range in one tile.
    query, key = inputs.query.clone(), inputs.key.clone()
    query[:, 1, 128 + 64 :] *= 40
    key[:, :, :384] *= 8
    inputs, kernel = replace(inputs, query=query, key=key), Emulated(0)
    out, lse = emulate(inputs, 128, kernel, fixed_stabiliser=True)
    check(inputs, 128, out, lse)
    assert kernel.machine.specialised == programs + 2


def changed_kernel(right: str, wrong: str, folder: Path) -> Path:
    source = kernel_file().read_text(encoding="utf-8")
    assert source.count(right) == 1
    path = folder / "kernel.py"
    path.write_text(source.replace(right, wrong), encoding="utf-8")
    return path


def test_a_flag_that_is_not_set_shows(tmp_path):
    path = changed_kernel("gl.max(b_bad, 0))", "gl.max(b_bad, 0) * 0)", tmp_path)
    inputs = testing.make_inputs(replace(BASE, gain=16.0), dtype=torch.bfloat16)
    out, _ = emulate(inputs, 128, Emulated(0, path), fixed_stabiliser=True)
    assert not out.isfinite().all()


FORMS = {"bf16": (torch.bfloat16, False), "bf16-fixed": (torch.bfloat16, True), "fp16": (torch.float16, False)}
forms = pytest.mark.parametrize("form", FORMS)


@forms
@pytest.mark.parametrize("density", [0.5, 1.0])
@pytest.mark.parametrize("dim", [64, 128])
def test_emulated_error_where_one_key_takes_all_of_the_weight(dim, density, form):
    dtype, fixed = FORMS[form]
    case = replace(BASE, len_q=512, len_k=700, dim=dim, density=density, gain=200.0)
    inputs, kernel = testing.make_inputs(case, dtype=dtype), Emulated(0)
    out, lse = emulate(inputs, 128, kernel, fixed_stabiliser=fixed)
    exact, exact_lse = testing.exact_attention(inputs, block_size=128)
    assert testing.error_ratio(out, exact) <= testing.one_key_bound(dtype)
    assert (out == exact.to(dtype)).double().mean() > 0.99
    assert ((lse - exact_lse).abs() <= exact_lse.abs() * 1e-6).all()
    assert kernel.machine.specialised == 2 * 2 * 4  # every program ran twice


def test_large_logits_without_a_flag_show(tmp_path):
    path = changed_kernel("gl.constexpr(2.0**13)", "gl.constexpr(2.0**40)", tmp_path)
    for dtype in (torch.bfloat16, torch.float16):
        inputs = testing.make_inputs(replace(BASE, len_q=512, len_k=700, density=1.0, gain=200.0), dtype=dtype)
        exact, _ = testing.exact_attention(inputs, block_size=128)
        out, _ = emulate(inputs, 128, Emulated(0, path))
        assert (out == exact.to(dtype)).double().mean() < 0.9
        assert dtype is torch.float16 or testing.error_ratio(out, exact) > testing.one_key_bound(dtype)


@forms
@pytest.mark.parametrize(("largest", "flagged"), [(8191.0, 0), (8300.0, 1), (-8191.0, 0), (-8300.0, 1)])
def test_one_key_gives_its_value_bit_for_bit_on_both_sides_of_the_limit(largest, flagged, form):
    """`largest`: in base 2, of the first row; those below it go down by steps, so that roundings differ."""
    dtype, fixed = FORMS[form]
    length = 64
    inputs = testing.make_inputs(
        replace(BASE, heads=1, kv_heads=1, len_q=64, len_k=length, block_size=64), dtype=torch.float32
    )
    ln_2 = 0.6931471805599453
    query, key = torch.zeros_like(inputs.query), torch.zeros_like(inputs.key)
    query[..., 0] = 64.0
    query[..., 1] = torch.arange(64) * 0.25
    # The scale is 1/8: key 7 has the logit `largest`, less a step by row; all others are 2,000 below.
    logit = largest * ln_2 * 8 / 64
    key[..., 0], key[..., 1] = logit - 250.0, -1.0
    key[:, :, 7, 0] = logit
    inputs = replace(inputs, query=query, key=key).floats_to(dtype)
    kernel = Emulated(0)
    out, _ = emulate(inputs, 64, kernel, fixed_stabiliser=fixed)
    assert torch.equal(out, inputs.value[:, :, 7:8].expand_as(out))
    assert kernel.machine.specialised == 1 + flagged


@forms
def test_equal_keys_with_large_logits_share_the_weight_exactly(form):
    dtype, fixed = FORMS[form]
    inputs = testing.make_inputs(replace(BASE, density=1.0, gain=200.0), dtype=dtype)
    key = inputs.key[:, :, :1].expand_as(inputs.key).contiguous()
    inputs = replace(inputs, key=key)
    out, _ = emulate(inputs, 128, Emulated(0), fixed_stabiliser=fixed)
    mean = inputs.value.double().mean(2, keepdim=True).expand_as(out)
    assert testing.error_ratio(out, mean) <= testing.one_key_bound(dtype)


def test_the_fixed_stabiliser_needs_the_range_of_bf16():
    inputs = testing.make_inputs(BASE, dtype=torch.float16)
    with pytest.raises(UserInputError, match="query must be bfloat16 with fixed_stabiliser, got float16"):
        emulate(inputs, 128, Emulated(0), fixed_stabiliser=True)


@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_emulated_lists_of_every_length(width):
    inputs = testing.make_inputs(replace(BASE, len_q=128 * 6, len_k=600, density=1.0), dtype=torch.bfloat16)
    index = inputs.block_index[..., :width].contiguous()
    count = torch.arange(6, dtype=torch.int32).clamp(max=width).expand(1, 2, 6)
    inputs = replace(inputs, block_index=index, block_count=count)
    check(inputs, 128, *emulate(inputs, 128, Emulated(0)))


def test_emulated_lists_out_of_range_read_nothing_outside():
    case = replace(BASE, heads=1, kv_heads=1, len_q=384, len_k=300, layout="padded")
    inputs = testing.make_inputs(case, dtype=torch.bfloat16)
    for entries in ([-5, -1, 0], [0, 1, 900], [700, 800, 900], [1, 2, 2], [2, 0, 1]):
        index = torch.tensor(entries, dtype=torch.int32).expand(1, 1, 3, 3)
        out, lse = emulate(replace(inputs, block_index=index), 128, Emulated(0))
        assert out.isfinite().all()
        assert lse.isfinite().all()


def test_one_list_for_all_query_blocks_is_read_where_it_is():
    inputs = testing.make_inputs(replace(BASE, density=1.0), dtype=torch.bfloat16)
    one = torch.arange(4, dtype=torch.int32).expand(1, 2, 3, 4)
    kernel = Emulated(0)
    with mock.patch.object(torch.Tensor, "contiguous", side_effect=AssertionError("copied")):
        out, _ = emulate(replace(inputs, block_index=one), 128, kernel)
    assert torch.equal(out, emulate(inputs, 128, Emulated(0))[0])


def test_inputs_that_the_copy_engine_cannot_read_are_copied():
    inputs = testing.make_inputs(replace(BASE, density=1.0, len_q=200, len_k=200), dtype=torch.bfloat16)
    whole, _ = emulate(inputs, 128, Emulated(0))
    query = inputs.query.transpose(2, 3).contiguous().transpose(2, 3)  # a last axis with a stride
    key = torch.cat([inputs.key.new_zeros(1), inputs.key.flatten()])[1:].view(inputs.key.shape)  # an odd start
    value = inputs.value[:, :1].expand(-1, 2, -1, -1)  # an axis of stride 0
    out, _ = emulate(replace(inputs, query=query, key=key), 128, Emulated(0))
    assert torch.equal(out, whole)
    assert out.stride() == torch.empty_like(query).stride()
    expanded, copied = (emulate(replace(inputs, value=x), 128, Emulated(0))[0] for x in (value, value.contiguous()))
    assert torch.equal(expanded, copied)


# What each line of synchronisation is for: without it, or with it in the wrong place, results are wrong or never come.
MISTAKES = {
    "keys released before their product ends": (
        "            b_s = warpgroup_mma_wait(1, deps=[b_s])\n"
        "            mbarrier.arrive(k_empty.index(slot), count=1)\n",
        "            mbarrier.arrive(k_empty.index(slot), count=1)\n"
        "            b_s = warpgroup_mma_wait(1, deps=[b_s])\n",
    ),
    "values released before their product ends": (
        "            b_acc = warpgroup_mma_wait(0, deps=[b_acc])\n"
        "            mbarrier.arrive(v_empty.index(before), count=1)\n",
        "            mbarrier.arrive(v_empty.index(before), count=1)\n"
        "            b_acc = warpgroup_mma_wait(0, deps=[b_acc])\n",
    ),
    "keys never released": ("            mbarrier.arrive(k_empty.index(slot), count=1)\n", ""),
    "values never released": ("            mbarrier.arrive(v_empty.index(before), count=1)\n", ""),
    "first wait for a free slot with the wrong parity": ("((t // STAGES) & 1) ^ 1", "((t // STAGES) & 1)"),
    "no wait for the values": ("            mbarrier.wait(v_full.index(before), ((t - 1) // STAGES) & 1)\n", ""),
    "wrong parity in later rounds": (
        "mbarrier.wait(k_full.index(slot), (t // STAGES) & 1)", "mbarrier.wait(k_full.index(slot), 0)",
    ),
    "the producer does not wait": ("    mbarrier.wait(empty.index(slot), ((t // STAGES) & 1) ^ 1)\n", ""),
    "values of another step": ("t - 1, batch, kv_head, before, STAGES", "t - 1, batch, kv_head, start, STAGES"),
    "one consumer frees for both": ("mbarrier.init(k_empty.index(slot), count=CONSUMERS)",
                                    "mbarrier.init(k_empty.index(slot), count=1)"),
    "too few bytes": ("CONSUMERS * query.block_type.nbytes", "query.block_type.nbytes"),
    "queries not awaited": ("    mbarrier.wait(q_full, 0)\n", ""),
    "tail not masked": ("gl.where((o_n < first_keys)[None, :], b_s, float(\"-inf\"))", "b_s"),
    "output not awaited": ("    tma.store_wait(0)\n", ""),
    "one step too few": (
        "for t in range(1, steps):\n            slot", "for t in range(1, steps - 1):\n            slot",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_emulator_sees_mistakes(mistake, tmp_path):
    right, wrong = MISTAKES[mistake]
    path = changed_kernel(right, wrong, tmp_path)
    inputs = testing.make_inputs(replace(BASE, len_q=128, len_k=1000, density=1.0), dtype=torch.bfloat16)

    def try_seeds() -> None:
        for seed in range(20):
            check(inputs, 128, *emulate(inputs, 128, Emulated(seed, path)))

    with pytest.raises((AssertionError, DeadlockError)):
        try_seeds()


def launches(dtype: str, dim: int, block_size: int, **more: Any) -> list[tuple[Any, tuple, dict]]:
    from diffsieve.kernels.block_sparse import hopper_backend

    case = replace(BASE, dim=dim, block_size=block_size, len_q=512, len_k=512, variable=True)
    inputs = testing.make_inputs(case, dtype=DTYPES[dtype])

    def run() -> None:
        hopper_backend.block_sparse_attention_hopper(
            *inputs.tensors(), block_size=block_size, scale=0.1, return_lse=True, **more
        )

    return launches_of(hopper_backend, run)


needs_compiler = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1 replaces the compiler"
)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    ("dim", "block_size", "form"),
    [(dim, 128, form) for dim in (64, 128) for form in ("bf16", "fp16", "bf16-fixed")]
    + [(64, 64, "fp16"), (128, 64, "bf16"), (64, 64, "bf16-fixed"), (128, 64, "bf16-fixed"), (128, 256, "bf16")],
)
def test_compiles_without_spills_or_serialised_products(dim, block_size, form):
    dtype, fixed = form[:4], form.endswith("fixed")
    recorded = launches(dtype, dim, block_size, fixed_stabiliser=fixed)
    assert len(recorded) == 2
    for one in recorded:
        check_compiled(compile_launch(*one, 90), 1 if block_size == 64 else 2)


def check_compiled(compiled: Compiled, consumers: int) -> None:
    assert compiled.spills == 0
    assert compiled.serialised == []
    assert compiled.unwritten == []
    assert compiled.overwritten == []
    assert compiled.shared <= SHARED_MEMORY[90]
    for instruction in ("wgmma.mma_async", "cp.async.bulk.tensor.4d", "setmaxnreg"):
        assert instruction in compiled.ptx
    # An arrival by one thread speaks for its warpgroup only after a barrier over it.
    lines = [line.split("\t")[1].strip() for line in compiled.ptx.splitlines() if "\t" in line]
    marks = [
        x for x in lines if x.startswith(("bar.sync", "barrier.sync", "wgmma.wait_group")) or ".arrive.shared" in x
    ]
    arrivals = [i for i, mark in enumerate(marks) if "mbarrier.arrive" in mark]
    assert len(arrivals) == 3 * consumers
    for i in arrivals:
        assert marks[i - 1].startswith("bar")
        assert marks[i - 2].startswith("wgmma.wait_group")


def test_writes_to_registers_of_products_under_way_are_found():
    code = """
        /*0100*/                   HGMMA.64x16x16.F32.BF16 R24, R180, gdesc[UR16], RZ, !UPT, gsb0 ;
        /*0110*/                   HGMMA.64x16x16.F32.BF16 R40, R184, gdesc[UR16].tnspB, R40, gsb0 ;
        /*0120*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0130*/                   FMUL R24, R24, R2 ;
        /*0140*/              @!P0 MOV R187, R3 ;
        /*0150*/                   CS2R R38, SRZ ;
        /*0160*/                   LDS.128 R38, [R2] ;
        /*0170*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0180*/                   MOV R187, R3 ;
"""
    assert writes_under_products(code) == ["MOV R187, R3", "LDS.128 R38, [R2]"]


@pytest.mark.slow
@needs_compiler
def test_a_tile_that_is_too_large_is_seen_to_spill():
    from diffsieve.kernels.block_sparse.hopper_backend import HopperTile

    one, _ = launches("bf16", 64, 256, tile=HopperTile(2, 256, 2))
    compiled = compile_launch(*one, 90)
    assert compiled.spills > 0
    assert compiled.serialised


@pytest.mark.slow
@needs_compiler
def test_launches_of_all_lengths_share_one_kernel():
    found = run_script("launched_hopper.py")
    # A tile of 128 channels comes in two boxes of 64, the width of the swizzle.
    boxes = [[1, 1, 64, 64], [1, 1, 128, 64], [1, 1, 128, 64], [1, 1, 64, 64]]
    assert found == {"boxes": boxes, "launches": 6, "kernels": 2, "warps": 12}


def test_tiles_and_rates_are_those_measured():
    from diffsieve.kernels.block_sparse.hopper_backend import select_hopper_tile
    from diffsieve.kernels.block_sparse.rates import RATES_SM90

    path = Path(__file__).parents[2] / "benchmarks/results/h200/block_sparse_hopper.json"
    report = json.loads(path.read_text(encoding="utf-8"))
    assert len(report["best"]) == 2 * len(RATES_SM90)
    for best in report["best"]:
        dim, block_size = map(int, re.findall(r"\d+", best["shape"]))
        tile = asdict(select_hopper_tile(dim, block_size, fixed_stabiliser=best["fixed"]))
        rows = {(row.get("fixed"), str(row.get("tile"))): row for row in report["tune"][best["shape"]]}
        (triton,) = [row for row in rows.values() if row["name"].endswith("triton")]
        name = "hopper" if best["fixed"] else "hopper-exact"
        measured = rows[best["fixed"], str(tile)]
        # Two runs differ by that much.
        assert rows[best["fixed"], str(best["tile"])]["tflops"] < 1.02 * measured["tflops"]
        if (dim, block_size) != (128, 128):
            assert RATES_SM90[dim, block_size][name] == round(measured["tflops"], 1)
            assert RATES_SM90[dim, block_size]["triton"] == round(triton["tflops"], 1)
    later = json.loads((path.parent / "bench/block-sparse.json").read_text(encoding="utf-8"))
    rows = {row["method"]: row for row in later["rows"] if row["tokens"] == 75_648 and row["sparsity"] == 0.5}
    for name, rate in RATES_SM90[128, 128].items():
        assert rate == round(rows["FlashAttention-4" if name == "flash4" else name]["tflops"], 1)
    assert select_hopper_tile(64, 512) == select_hopper_tile(64, 128)


def test_the_table_of_rates_holds_at_other_lengths():
    """The first of one length is the fastest at the others too, to 4 % where few blocks are kept."""
    from diffsieve.kernels.block_sparse.rates import by_rate

    path = Path(__file__).parents[2] / "benchmarks/results/h200/bench/block-sparse.json"
    rows = [row for row in json.loads(path.read_text(encoding="utf-8"))["rows"] if row["sparsity"]]
    first, *others = ("FlashAttention-4" if name == "flash4" else name for name in by_rate((9, 0), 128, 128))
    times: dict[tuple[int, float], dict[str, float]] = {}
    for row in rows:
        times.setdefault((row["tokens"], row["sparsity"]), {})[row["method"]] = row["graph_ms"]
    assert sorted({tokens for tokens, _ in times}) == [8_192, 16_384, 32_768, 75_648]
    for (tokens, sparsity), found in times.items():
        best = min(found[name] for name in others)
        if sparsity <= 0.75:
            assert found[first] < best
        # Below the crossover no call is sparse unless asked for.
        elif tokens >= 16_384:
            assert found[first] < 1.04 * best


def on_gpu(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Any:
    """A query on a GPU that is not there."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    values = {"is_cuda": True, "dtype": torch.bfloat16, "shape": (1, 2, 4096, 128), "device": torch.device("cuda:0")}
    return mock.Mock(**values | changes, **{"numel.return_value": 2**20})


@pytest.mark.parametrize(
    ("changes", "block_size", "capability", "name", "passed_over"),
    [
        ({}, 128, (9, 0), "hopper", None),
        ({"dtype": torch.float16}, 64, (9, 0), "hopper", None),
        ({"shape": (1, 2, 4096, 64)}, 256, (9, 0), "hopper", None),
        ({"shape": (1, 2, 4096, 96)}, 128, (9, 0), "triton", "hopper needs a head dimension D of 64 or 128, got 96"),
        ({}, 32, (9, 0), "triton", "hopper needs a block_size that is a power of two, at least 64, got 32"),
        ({}, 48, (9, 0), "torch", "hopper needs a block_size that is a power of two, at least 64, got 48"),
        ({"dtype": torch.float32}, 128, (9, 0), "torch", None),
        ({"dtype": torch.float64}, 128, (9, 0), "torch", None),
        ({}, 128, (8, 0), "triton", None),
        ({}, 128, (10, 0), "triton", None),
        ({}, 128, (7, 5), "torch", "triton needs a GPU of compute capability 8.0 or later, got 7.5"),
    ],
    ids=str,
)
def test_auto_takes_the_fastest_that_can_run(changes, block_size, capability, name, passed_over, monkeypatch):
    query = on_gpu(capability, monkeypatch, **changes)
    choice = choose_backend(query, query, block_size=block_size)
    assert (choice.name, choice.passed_over) == (name, passed_over)
    assert passed_over is None or passed_over in choice.reason


def test_auto_takes_triton_where_gluon_is_unusable(monkeypatch):
    from diffsieve.kernels.block_sparse import flash4_backend, hopper_backend

    query = on_gpu((9, 0), monkeypatch)
    monkeypatch.setattr(hopper_backend, "GLUON_OBSTACLE", "needs Triton 3.6 to 3.8, whose Gluon it is written for")
    monkeypatch.setattr(flash4_backend, "interface_obstacle", lambda: "needs the package flash-attn-4")
    choice = choose_backend(query, query, block_size=128)
    assert choice.name == "triton"
    assert "hopper needs Triton 3.6 to 3.8" in choice.reason


@pytest.mark.parametrize(
    ("change", "capability", "message"),
    [
        ({"dtype": torch.float32}, (9, 0), "needs dtype bfloat16 or float16, got float32"),
        ({"shape": (1, 2, 4096, 96)}, (9, 0), "needs a head dimension D of 64 or 128, got 96"),
        ({"block_size": 32}, (9, 0), "needs a block_size that is a power of two, at least 64, got 32"),
        ({"block_size": 192}, (9, 0), "needs a block_size that is a power of two, at least 64, got 192"),
        ({"is_cuda": False, "device": torch.device("cpu")}, (9, 0), "needs an NVIDIA Hopper GPU, got cpu tensors"),
        ({}, (8, 0), "needs a Hopper GPU, of compute capability 9.0, got 8.0"),
        ({}, (10, 0), "needs a Hopper GPU, of compute capability 9.0, got 10.0"),
    ],
    ids=str,
)
def test_says_why_it_cannot_run(change, capability, message, monkeypatch):
    block_size = change.pop("block_size", 128)
    query = on_gpu(capability, monkeypatch, **change)
    with pytest.raises(BackendUnavailableError, match=rf'backend="hopper" {message}; use backend="triton" or "auto"'):
        choose_backend(query, query, block_size=block_size, backend="hopper")


@pytest.mark.parametrize("version", ["3.5.1", "3.9.0", "4.0.0", "unknown"])
def test_other_versions_of_triton_are_refused(version, monkeypatch):
    from diffsieve.kernels.block_sparse import hopper_backend

    obstacle = hopper_backend._gluon_obstacle(version)
    assert obstacle == f"needs Triton 3.6 to 3.8, whose Gluon it is written for, got {version}"
    monkeypatch.setattr(hopper_backend, "GLUON_OBSTACLE", obstacle)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    query = mock.Mock(is_cuda=True, dtype=torch.bfloat16, shape=(1, 2, 4096, 128))
    with pytest.raises(BackendUnavailableError, match=version):
        choose_backend(query, query, block_size=128, backend="hopper")


def test_the_installed_triton_can_build_it():
    from diffsieve.kernels.block_sparse import hopper_backend

    assert hopper_backend.GLUON_OBSTACLE is None


def test_a_gluon_that_cannot_be_imported_is_refused(monkeypatch):
    from diffsieve.kernels import block_sparse
    from diffsieve.kernels.block_sparse import hopper_backend

    monkeypatch.delattr(block_sparse, "hopper_kernel")
    monkeypatch.setitem(sys.modules, "diffsieve.kernels.block_sparse.hopper_kernel", None)
    obstacle = hopper_backend._gluon_obstacle("3.6.0")
    assert obstacle is not None
    assert "import from Triton 3.6.0 failed" in obstacle


def test_the_choice_can_be_compiled(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    from torch._subclasses import FakeTensorMode

    def function(x):
        choice = choose_backend(x, x, block_size=128)
        return x + 1, choice.name, choice.reason

    compiled = torch.compile(function, fullgraph=True, backend="eager")
    with FakeTensorMode(allow_non_fake_inputs=True):
        query = torch.empty(1, 2, 256, 128, device="cuda", dtype=torch.bfloat16)
        assert compiled(query)[1:] == ("hopper", "CUDA GPU sm_90, bfloat16, D 128")
        # What fails later is seen by code that is compiled already.
        monkeypatch.setitem(fallbacks.FAILED, ("hopper", (9, 0)), "could not be built (Error)")
        assert compiled(query)[1:] == (
            "hopper-exact", "CUDA GPU sm_90, bfloat16, D 128; hopper could not be built (Error)",
        )  # fmt: skip


@pytest.fixture
def hopper_gpu() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the GPU is not a Hopper")


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize(("backend", "dtype"), [("hopper", "bf16"), ("hopper", "fp16"), ("hopper-exact", "bf16")])
@pytest.mark.parametrize(
    "case", [*HOPPER_CASES, replace(BASE, len_q=5000, len_k=5000, dim=128, variable=True)], ids=str
)
def test_error_on_a_gpu(case, backend, dtype):
    inputs = testing.make_inputs(case, dtype=DTYPES[dtype], device="cuda")
    options = {"block_size": case.block_size, "return_lse": True, "backend": backend}
    with testing.poisoned_memory():
        out, lse = block_sparse_attention(*inputs.tensors(), **options)
        again, lse_again = block_sparse_attention(*inputs.tensors(), **options)
    check(inputs, case.block_size, out, lse)
    assert torch.equal(out, again)
    assert torch.equal(lse, lse_again)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("gain", [1.0, 4.0, 16.0, 200.0])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("backend", ["hopper", "hopper-exact"])
def test_large_activations_on_a_gpu(backend, dim, gain):
    case = replace(BASE, len_q=2000, len_k=2000, dim=dim, gain=gain)
    inputs = testing.make_inputs(case, dtype=torch.bfloat16, device="cuda")
    with testing.poisoned_memory():
        out, lse = block_sparse_attention(*inputs.tensors(), block_size=128, return_lse=True, backend=backend)
    check(inputs, 128, out, lse)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("density", [0.5, 1.0])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("backend", "dtype"), [("hopper", "bf16"), ("hopper", "fp16"), ("hopper-exact", "bf16")])
def test_error_where_one_key_takes_all_of_the_weight_on_a_gpu(backend, dtype, dim, density):
    case = replace(BASE, len_q=2000, len_k=2000, dim=dim, density=density, gain=200.0)
    inputs = testing.make_inputs(case, dtype=DTYPES[dtype], device="cuda")
    with testing.poisoned_memory():
        out, again = (block_sparse_attention(*inputs.tensors(), block_size=128, backend=backend) for _ in range(2))
    exact, _ = testing.exact_attention(inputs, block_size=128)
    assert testing.error_ratio(out, exact) <= testing.one_key_bound(DTYPES[dtype])
    assert (out == exact.to(out.dtype)).double().mean() > 0.99
    assert torch.equal(out, again)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
def test_gradients_on_a_gpu():
    case = replace(BASE, len_q=450, len_k=450, variable=True)
    inputs = testing.make_inputs(case, dtype=torch.bfloat16, device="cuda")
    grads = {}
    for backend in ("hopper", "triton"):
        leaves = [x.detach().clone().requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]
        lists = inputs.block_index, inputs.block_count
        out = block_sparse_attention(*leaves, *lists, block_size=128, backend=backend)
        out.float().square().sum().backward()
        grads[backend] = [x.grad for x in leaves]
    for ours, theirs in zip(grads["hopper"], grads["triton"], strict=True):
        assert testing.error_ratio(ours, theirs) < 2**-6


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
def test_a_new_length_does_not_compile_again_on_a_gpu():
    from diffsieve.kernels.block_sparse.hopper_backend import block_sparse_fwd_hopper_kernel

    compiled = []
    for length in (128, 129, 450, 1024, 2000):
        inputs = testing.make_inputs(replace(BASE, len_q=length, len_k=length), dtype=torch.bfloat16, device="cuda")
        block_sparse_attention(*inputs.tensors(), block_size=128, backend="hopper")
        compiled.append(sum(len(cache[0]) for cache in block_sparse_fwd_hopper_kernel.device_caches.values()))
    assert len(set(compiled)) == 1
