"""Tuning of tiles: what is measured, what is kept, what is refused. A stand-in for the kernel computes on the CPU."""

import pytest
import torch

from diffsieve.bench import tuning
from diffsieve.bench.config import BenchConfig
from diffsieve.errors import UserInputError
from diffsieve.kernels.block_sparse import block_sparse_attention
from diffsieve.kernels.block_sparse.tiles import TileConfig, candidates
from diffsieve.kernels.block_sparse.tuned_tiles import TileKey, read_tiles, write_tiles

pytest.importorskip("triton", reason="Triton has no build for this platform")
TABLE, *OTHERS = candidates((8, 0), 64, 64)
FAST, WRONG, LARGE = OTHERS[:3]


class _Timer:
    """Times by tile, in ms, in the place of a GPU's."""

    times: dict[TileConfig, float]

    def __init__(self, config):
        self.device = torch.device("cpu")

    def eager(self, call, rivals):
        medians = {name: self.times.get(rival.args[2], 2.0) for name, rival in rivals.items()}
        return {"ms": self.times.get(call.args[2], 2.0)}, medians


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of capability 8.0 whose kernel is PyTorch's on a CPU, wrong for one tile and too large for another."""

    def attend(inputs, block_size, tile):
        if tile == LARGE:
            raise RuntimeError("out of resource: shared memory")
        out = block_sparse_attention(*inputs.tensors(), block_size=block_size, backend="torch")
        return out * 1.1 if tile == WRONG else out

    def to_the_cpu(case, *, dtype, device):
        return make_inputs(case, dtype=dtype)

    make_inputs = tuning.testing.make_inputs
    monkeypatch.setattr(tuning, "_attend", attend)
    monkeypatch.setattr(tuning, "Timer", _Timer)
    monkeypatch.setattr(tuning, "_TOKENS", 512)
    monkeypatch.setattr(tuning, "choose_backend", lambda *args, **options: None)
    monkeypatch.setattr(tuning.testing, "make_inputs", to_the_cpu)
    monkeypatch.setattr(BenchConfig, "on_gpu", property(lambda self: True))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")


def run(tmp_path, dtype="bfloat16", **shapes):
    config = BenchConfig(out=tmp_path, device="cpu", dtype=dtype)
    lines = []
    file = tmp_path / "kept" / "tiles.json"
    found = tuning.tune(config, **{"dims": (64,), "block_sizes": (64,)} | shapes, file=file, progress=lines.append)
    return found, lines


@pytest.mark.usefixtures("gpu")
def test_the_fastest_that_is_right_is_kept(tmp_path):
    _Timer.times = {TABLE: 1.0, FAST: 0.5, WRONG: 0.1, LARGE: 0.1}
    other = TileKey("another GPU", "3.6.0", 128, 128, "float16")
    write_tiles(tmp_path / "kept" / "tiles.json", {other: FAST})
    (tuned,), (line,) = run(tmp_path)
    assert (tuned.tile, tuned.ms, tuned.table_ms) == (FAST, 0.5, 1.0)
    assert tuned.tried == len(OTHERS) - 1
    assert set(tuned.failed) == {tuning._name(WRONG), tuning._name(LARGE)}
    assert "beyond" in tuned.failed[tuning._name(WRONG)]
    assert "out of resource" in tuned.failed[tuning._name(LARGE)]
    assert line.startswith(f"D 64, blocks of 64, bfloat16: {tuning._name(FAST)}, 0.500 ms (the table's 1.000 ms)")
    assert tuned.key == TileKey("a GPU", tuning_triton(), 64, 64, "bfloat16")
    assert read_tiles(tmp_path / "kept" / "tiles.json") == {other: FAST, tuned.key: FAST}


@pytest.mark.usefixtures("gpu")
def test_a_gain_within_the_noise_changes_nothing(tmp_path):
    _Timer.times = {TABLE: 1.0, FAST: 0.99}
    ((tuned,), _) = run(tmp_path)
    assert tuned.tile == TABLE


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"dims": (64, 0)}, r"dim must be one of 16, 32, 64, 128, 256 \(others take the tile of .*\), got 0"),
        ({"dims": (96,)}, r"dim must be one of .*, got 96"),
        ({"dims": (512,)}, r"dim must be one of .*, got 512"),
        ({"block_sizes": (8,)}, r"block_size must be a power of two in \[16, 8192\], got 8"),
        ({"block_sizes": (96,)}, r"block_size must be a power of two in \[16, 8192\], got 96"),
        ({"block_sizes": (16_384,)}, r"block_size must be a power of two in \[16, 8192\], got 16384"),
    ],
    ids=str,
)
def test_names_a_shape_that_it_cannot_tune(shapes, message, tmp_path):
    with pytest.raises(UserInputError, match=message):
        run(tmp_path, **shapes)
    assert not (tmp_path / "kept").exists()


@pytest.mark.usefixtures("gpu")
def test_says_where_it_cannot_tune(tmp_path, monkeypatch):
    with pytest.raises(UserInputError, match="dtype must be bfloat16 or float16, got float32"):
        run(tmp_path, dtype="float32")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "tiles.json").write_text("{")
    with pytest.raises(UserInputError, match=r"tiles\.json must be a file of tiles"):
        run(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UserInputError, match="outside of the capture of a CUDA graph"):
        run(tmp_path)


def test_needs_a_gpu(tmp_path):
    with pytest.raises(UserInputError, match="device must be a CUDA GPU, got cpu"):
        run(tmp_path)


def tuning_triton() -> str:
    import triton

    return triton.__version__


@pytest.mark.gpu
def test_tunes_on_a_gpu(tmp_path):
    config = BenchConfig(out=tmp_path, budget_ms=300.0)
    (tuned,) = tuning.tune(config, dims=(64,), block_sizes=(64,), file=tmp_path / "tiles.json")
    assert read_tiles(tmp_path / "tiles.json") == {tuned.key: tuned.tile}
    assert tuned.table_ms is not None
    assert tuned.ms <= tuned.table_ms
    assert not tuned.failed
