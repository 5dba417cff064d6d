"""Tiles of the Triton kernels: they fit the GPUs they are for, one kernel serves all lengths, tuned ones are kept."""

import importlib.util
import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from diffsieve.kernels.block_sparse import tuned_tiles
from diffsieve.kernels.block_sparse.tiles import (
    TileConfig,
    architecture,
    candidates,
    reads_shared,
    select_tile,
    shared_bytes,
    shared_limit,
)
from diffsieve.kernels.block_sparse.tuned_tiles import TileKey, read_tiles, tuned_tile, write_tiles
from tests.kernels.compiling import SHARED_MEMORY, compile_launch, launches_of
from tests.kernels.own_process import run_script

CAPABILITIES = {80: (8, 0), 86: (8, 6), 89: (8, 9), 90: (9, 0), 100: (10, 0), 120: (12, 0)}
DIMS = (16, 32, 64, 128, 256)
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton has no build for this platform"
)
needs_compiler = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1 replaces the compiler"
)


@pytest.mark.parametrize("arch", CAPABILITIES)
def test_every_tile_fits_by_the_formula(arch):
    capability = CAPABILITIES[arch]
    assert shared_limit(capability) == SHARED_MEMORY[arch]
    for dim in DIMS:
        for block_size in (16, 64, 128):
            assert candidates(capability, dim, block_size)[0] == select_tile(capability, dim, block_size, 2)
            for tile in candidates(capability, dim, block_size):
                assert shared_bytes(tile, capability, dim, 2) <= SHARED_MEMORY[arch]
                assert block_size % tile.block_m == 0
                assert block_size % tile.block_n == 0
    assert 5 <= len(candidates(capability, 128, 128)) <= 24


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((8, 0), "sm80"),
        ((8, 7), "sm80"),
        ((8, 6), "sm86"),
        ((8, 9), "sm86"),
        ((9, 0), "sm90"),
        ((10, 0), "sm100"),
        ((10, 3), "sm100"),
        ((11, 0), "sm100"),
        ((12, 0), "sm120"),
        ((12, 1), "sm120"),
        ((13, 0), "sm120"),
    ],
    ids=str,
)
def test_each_gpu_has_its_rows(capability, name):
    assert architecture(capability) == name


def tiles_to_compile(arch: int) -> list[tuple[int, TileConfig]]:
    """Each row of the table, and of the candidates at head size 128 the one that takes the most."""
    capability = CAPABILITIES[arch]
    largest = max(candidates(capability, 128, 128), key=lambda tile: shared_bytes(tile, capability, 128, 2))
    return [*((dim, select_tile(capability, dim, 128, 2)) for dim in DIMS[1:]), (128, largest)]


# 8.9 takes the code of 8.6.
@pytest.mark.slow
@needs_triton
@needs_compiler
@pytest.mark.parametrize("arch", [arch for arch in CAPABILITIES if arch != 89])
def test_compiled_tiles_take_what_the_formula_says(arch):
    from diffsieve.kernels.block_sparse import triton_backend

    capability = CAPABILITIES[arch]
    for dim, tile in tiles_to_compile(arch):
        x, index = torch.zeros(1, 2, 256, dim, dtype=torch.bfloat16), torch.zeros(1, 2, 2, 2, dtype=torch.int32)
        options = {"block_size": 128, "scale": 0.1, "return_lse": True, "tile": tile}

        def run(x=x, index=index, options=options) -> None:
            triton_backend.block_sparse_attention_triton(
                x, x, x, index, None, **options, use_descriptors=reads_shared(capability)
            )

        launch, _ = launches_of(triton_backend, run)
        compiled = compile_launch(*launch, arch)
        assert compiled.shared <= shared_bytes(tile, capability, dim, 2), (dim, tile)
        # A few registers may go through memory; a tile that is too large spills thousands of bytes.
        assert tile != select_tile(capability, dim, 128, 2) or compiled.spills <= 1024, (dim, tile)


@pytest.mark.slow
@needs_triton
@needs_compiler
def test_a_new_length_compiles_nothing():
    found = run_script("launched_triton.py")
    # Kernel, memory order, head size: launches at six lengths, kernels built. With a head size that is no multiple of
    # 16, strides are multiples of 16 at some lengths only, and those have a kernel of their own.
    assert {name: counts for name, counts in found.items() if counts[0]} == {
        "block_sparse_fwd_kernel contiguous D64": [12, 2],
        "block_sparse_fwd_kernel blhd D64": [12, 2],
        "block_sparse_bwd_dq_kernel blhd D64": [6, 1],
        "block_sparse_bwd_dkdv_kernel blhd D64": [6, 1],
        "block_sparse_fwd_kernel contiguous D40": [12, 4],
    }


KEY = TileKey("NVIDIA H200", "3.6.0", 128, 128, "bfloat16")
TILE = TileConfig(64, 32, 4, 3)


@pytest.fixture
def cache_folder(tmp_path, monkeypatch):
    """An empty cache folder of the user; nothing of it was read yet, and GPUs have the name of `KEY`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: KEY.gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    for function in (tuned_tiles._tiles, tuned_tiles._tiles_of):
        function.cache_clear()
    yield tmp_path / "diffsieve"
    for function in (tuned_tiles._tiles, tuned_tiles._tiles_of):
        function.cache_clear()


def look_up(**changes):
    return tuned_tile(**{
        "device": torch.device("cuda:0"), "triton": "3.6.0", "dim": 128, "block_size": 128, "dtype": torch.bfloat16,
    } | changes)  # fmt: skip


def test_tiles_are_kept_for_what_they_were_measured_for(cache_folder):
    write_tiles(tuned_tiles.tuned_tiles_file(), {KEY: TILE})
    assert read_tiles(cache_folder / "tiles.json") == {KEY: TILE}
    assert [path.name for path in cache_folder.iterdir()] == ["tiles.json"]
    assert look_up() == TILE
    for other in ({"triton": "3.7.0"}, {"dim": 64}, {"block_size": 64}, {"dtype": torch.float16}):
        assert look_up(**other) is None


@pytest.mark.usefixtures("cache_folder")
def test_a_user_without_a_home_has_none(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 5)
    with pytest.raises(RuntimeError):
        Path.home()
    assert look_up() is None


def test_a_process_keeps_the_tiles_that_it_began_with(cache_folder):
    assert look_up() is None
    write_tiles(tuned_tiles.tuned_tiles_file(), {KEY: TILE})
    assert look_up() is None


@pytest.mark.parametrize(
    "content",
    [
        "no JSON",
        "[" * 100_000,
        "[]",
        '{"format": 2, "tiles": []}',
        '{"format": 1}',
        json.dumps({"format": 1, "tiles": [{"for": vars(KEY), "tile": {"block_m": 64}}]}),
        json.dumps({"format": 1, "tiles": [{"for": vars(KEY), "tile": vars(TileConfig(96, 32, 4, 3))}]}),
        json.dumps({"format": 1, "tiles": [{"for": vars(KEY), "tile": vars(TileConfig(256, 32, 4, 3))}]}),
        json.dumps({"format": 1, "tiles": [{"for": vars(KEY), "tile": vars(TileConfig(64, 32, 4, 0))}]}),
        json.dumps({"format": 1, "tiles": [{"for": vars(KEY), "tile": vars(TILE) | {"block_n": "32"}}]}),
        json.dumps({"format": 1, "tiles": [{"for": vars(KEY) | {"block_size": "128"}, "tile": vars(TILE)}]}),
        json.dumps({"format": 1, "tiles": [{"for": vars(KEY) | {"dim": 96}, "tile": vars(TILE)}]}),
        json.dumps({"format": 1, "tiles": [{"for": vars(KEY) | {"dtype": "float32"}, "tile": vars(TILE)}]}),
    ],
    ids=[
        "text",
        "deep",
        "list",
        "format",
        "no-tiles",
        "fields",
        "power",
        "block",
        "stages",
        "type",
        "key",
        "dim",
        "dtype",
    ],
)
def test_a_damaged_file_is_said_and_left_out(content, cache_folder, caplog):
    cache_folder.mkdir()
    (cache_folder / "tiles.json").write_text(content)
    with caplog.at_level(logging.WARNING):
        assert look_up() is None
        assert look_up() is None
    assert [record.message.split(" (")[0] for record in caplog.records] == [
        f"{cache_folder / 'tiles.json'} is not a file of tiles"
    ]


def test_a_tile_without_room_on_the_gpu_is_said_and_the_others_stay(cache_folder, caplog):
    large = TileConfig(128, 128, 8, 5)
    assert shared_bytes(large, (9, 0), 256, 2) > shared_limit((9, 0))
    too_large, other_gpu = replace(KEY, dim=256), replace(KEY, dim=256, gpu="another GPU")
    write_tiles(tuned_tiles.tuned_tiles_file(), {too_large: large, other_gpu: large, KEY: TILE})
    with caplog.at_level(logging.WARNING):
        assert look_up(dim=256) is None
        assert look_up(dim=256) is None
        assert look_up() == TILE
    (record,) = caplog.records
    assert record.message.startswith(
        f"{cache_folder / 'tiles.json'}: the row for D 256, blocks of 128, bfloat16, Triton 3.6.0, NVIDIA H200 may "
    )
    assert "the built-in tile is taken" in record.message


@needs_triton
@pytest.mark.parametrize("tuned", [True, False])
def test_the_backend_takes_a_tuned_tile_before_that_of_the_table(tuned, cache_folder, monkeypatch):
    from diffsieve.kernels.block_sparse import triton_backend

    if tuned:
        key = TileKey(KEY.gpu, triton_backend.triton.__version__, 128, 128, "bfloat16")
        write_tiles(tuned_tiles.tuned_tiles_file(), {key: TILE})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    query = torch.zeros(1, 2, 256, 128, dtype=torch.bfloat16)
    lists = torch.zeros(1, 2, 2, 1, dtype=torch.int32)

    def run() -> None:
        with mock.patch.object(torch.Tensor, "is_cuda", True):
            triton_backend.block_sparse_attention_triton(
                query, query, query, lists, None, block_size=128, scale=0.1, return_lse=False
            )

    (_, _, options), _ = launches_of(triton_backend, run)
    found = TileConfig(options["BLOCK_M"], options["BLOCK_N"], options["num_warps"], options["NUM_STAGES"])
    assert found == (TILE if tuned else select_tile((8, 0), 128, 128, 2))
