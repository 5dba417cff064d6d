"""The adapter to FlashAttention-4: how it calls the package, with a stand-in for it; the package itself on a GPU."""

import importlib.util
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch._subclasses import FakeTensorMode

from diffsieve.errors import BackendUnavailableError
from diffsieve.kernels import testing
from diffsieve.kernels.block_sparse import backends, block_sparse_attention, choose_backend, flash4_backend
from diffsieve.kernels.block_sparse.rates import RATES_SM90, by_rate
from diffsieve.kernels.block_sparse.reference import block_sparse_attention_reference
from diffsieve.kernels.testing import AttentionCase
from tests.kernels import flash4_stand_in

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton has no build for this platform"
)
BASE = AttentionCase(heads=2, kv_heads=2, dim=64, block_size=64, len_q=150, len_k=200)
CASES = [
    replace(BASE, density=1.0),
    replace(BASE, variable=True),
    replace(BASE, len_q=1, len_k=1, heads=1, kv_heads=1),
    replace(BASE, len_q=257, len_k=640, dim=128, block_size=128, density=1.0),
    replace(BASE, batch=2, heads=4, kv_heads=2, layout="blhd", variable=True),
    replace(BASE, len_q=200, layout="fused_qkv"),
    replace(BASE, layout="padded", dim=128, block_size=128),
    *(replace(BASE, gain=gain) for gain in (4.0, 16.0, 200.0)),
]


@pytest.fixture
def stand_in(monkeypatch):
    """The package's place taken by `flash4_stand_in`, from import to call."""
    monkeypatch.setattr(flash4_backend, "import_module", flash4_stand_in.MODULES.__getitem__)
    flash4_backend.interface_obstacle.cache_clear()
    yield
    flash4_backend.interface_obstacle.cache_clear()


def attend(inputs, case, *, return_lse=True):
    return flash4_backend.block_sparse_attention_flash4(
        *inputs.tensors(), block_size=case.block_size, scale=case.dim**-0.5, return_lse=return_lse
    )


def check(inputs, case, out, lse):
    exact, exact_lse = testing.exact_attention(inputs, block_size=case.block_size)
    single = inputs.floats_to(torch.float32).tensors()
    _, single_lse = block_sparse_attention_reference(*single, block_size=case.block_size, scale=case.dim**-0.5)
    bound = testing.error_bound(testing.masked_sdpa(inputs, block_size=case.block_size), exact)
    assert testing.error_ratio(out, exact) <= bound
    assert testing.lse_error(lse, exact_lse) <= testing.lse_bound(single_lse, exact_lse)
    assert out.stride() == torch.empty_like(inputs.query).stride()


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_stand_in_gets_the_same_problem(case):
    inputs = testing.make_inputs(case, dtype=torch.float16)
    with testing.poisoned_memory():
        out, lse = attend(inputs, case)
    check(inputs, case, out, lse)
    assert attend(inputs, case, return_lse=False)[1] is None


@pytest.mark.usefixtures("stand_in")
def test_inputs_that_it_cannot_read_in_place_are_copied():
    inputs = testing.make_inputs(BASE, dtype=torch.float16)
    spread = torch.zeros(*inputs.query.shape, 2, dtype=torch.float16)
    spread[..., 0] = inputs.query
    one = inputs.key[:, :1]
    query = spread[..., 0].requires_grad_()
    lists = inputs.block_index, inputs.block_count
    plain = attend(testing.AttentionInputs(inputs.query, one.repeat(1, 2, 1, 1), inputs.value, *lists), BASE)
    strided = attend(testing.AttentionInputs(query, one.expand(1, 2, -1, -1), inputs.value, *lists), BASE)
    assert torch.equal(plain[0], strided[0])
    assert torch.equal(plain[1], strided[1])


@pytest.mark.usefixtures("stand_in")
def test_lists_out_of_range_read_nothing_outside():
    lists = torch.tensor([[[[-5, 1, 900, 7, 7]]]], dtype=torch.int32)
    found = flash4_backend.flash4_lists(lists, torch.tensor([[[9]]], dtype=torch.int32), len_k=200, block_size=64)
    assert found.full_block_idx.tolist() == [[[[0, 1, 3, 3]]]]
    assert found.full_block_cnt.tolist() == [[[4]]]


def gpu_query(**changes):
    values = {"is_cuda": True, "dtype": torch.bfloat16, "shape": (1, 2, 4096, 128), "device": torch.device("cuda:0")}
    query = mock.Mock(**values | changes)
    query.numel.return_value = torch.Size(query.shape).numel()
    return query


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("change", "capability", "message"),
    [
        ({"dtype": torch.float32}, (9, 0), "needs dtype bfloat16 or float16, got float32"),
        ({"shape": (1, 2, 4096, 96)}, (9, 0), "needs a head dimension D of 64 or 128, got 96"),
        ({"block_size": 32}, (9, 0), "needs a block_size of 64 or 128, got 32"),
        ({"block_size": 256}, (9, 0), "needs a block_size of 64 or 128, got 256"),
        ({"shape": (1, 16, 2**20, 128)}, (9, 0), "needs tensors of less than 2\\^31 elements, got 2147483648"),
        ({"is_cuda": False, "device": torch.device("cpu")}, (9, 0), "needs an NVIDIA Hopper GPU, got cpu tensors"),
        (
            {"is_cuda": False, "device": torch.device("cpu"), "dtype": torch.float32, "block_size": 32},
            (9, 0), "needs an NVIDIA Hopper GPU, got cpu tensors",
        ),
        ({}, (10, 0), "needs a Hopper GPU, of compute capability 9.0, got 10.0"),
    ],
    ids=str,
)  # fmt: skip
def test_says_why_it_cannot_run(change, capability, message, monkeypatch):
    block_size = change.get("block_size", 128)
    query = gpu_query(**{name: value for name, value in change.items() if name != "block_size"})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    with pytest.raises(BackendUnavailableError, match=rf'backend="flash4" {message}; use backend="triton" or "auto"'):
        choose_backend(query, query, block_size=block_size, backend="flash4")


@pytest.mark.usefixtures("stand_in")
def test_keys_that_are_too_large_are_seen(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    with pytest.raises(BackendUnavailableError, match=r"needs tensors of less than 2\^31 elements, got 2147483648"):
        choose_backend(gpu_query(), gpu_query(shape=(1, 16, 2**20, 128)), block_size=128, backend="flash4")


@pytest.mark.usefixtures("stand_in")
def test_runs_by_name_on_a_hopper_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    choice = choose_backend(gpu_query(), gpu_query(), block_size=128, backend="flash4")
    assert (choice.name, choice.reason) == ("flash4", "asked for by name")


@needs_triton
@pytest.mark.parametrize(("asked", "installed", "name"), [("flash4", True, "flash4"), ("auto", False, "triton")])
def test_compiled_code_leaves_the_package_to_the_op(asked, installed, name, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(backends, "_HAS_FLASH4", installed)
    monkeypatch.setattr(f"{backends.__package__}.hopper_backend.GLUON_OBSTACLE", "needs Triton 3.6 to 3.8")

    def function(x):
        return x + 1, choose_backend(x, x, block_size=128, backend=asked).name

    compiled = torch.compile(function, fullgraph=True, backend="eager")
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert compiled(torch.empty(1, 2, 256, 128, device="cuda", dtype=torch.bfloat16))[1] == name


def test_another_package_with_its_module_is_not_it(tmp_path, monkeypatch):
    """FlashAttention-2 has the module `flash_attn` too."""
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").touch()
    (tmp_path / "flash_attn-2.8.3.dist-info").mkdir()
    (tmp_path / "flash_attn-2.8.3.dist-info" / "METADATA").write_text("Name: flash-attn\nVersion: 2.8.3\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert backends._is_installed("flash-attn")
    assert importlib.util.find_spec("flash_attn") is not None
    assert not backends._is_installed("flash-attn-4")


@needs_triton
def test_auto_takes_it_where_it_was_measured_to_be_the_next(monkeypatch):
    assert by_rate((9, 0), 128, 128) == ("hopper", "hopper-exact", "flash4", "triton")
    assert all("flash4" not in by_rate((9, 0), *shape) for shape in RATES_SM90 if shape != (128, 128))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(f"{backends.__package__}.hopper_backend.GLUON_OBSTACLE", "needs Triton 3.6 to 3.8")
    for obstacle, name in ((None, "flash4"), ("needs the package flash-attn-4", "triton")):
        monkeypatch.setattr(flash4_backend, "interface_obstacle", lambda obstacle=obstacle: obstacle)
        choice = choose_backend(gpu_query(), gpu_query(), block_size=128)
        assert (choice.name, choice.passed_over) == (name, "hopper needs Triton 3.6 to 3.8")


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ({}, "needs the package flash-attn-4, which is not installed \\(pip install flash-attn-4\\)"),
        (
            {flash4_backend.INTERFACE: SimpleNamespace(_flash_attn_fwd=lambda q, k, v, out: None)},
            "it has no block_sparse_tensors, lse, pack_gqa, softmax_scale",
        ),
        ({flash4_backend.INTERFACE: SimpleNamespace(flash_attn_func=None)}, "needs another version of the package"),
    ],
    ids=["absent", "other-arguments", "other-names"],
)
def test_an_interface_that_moved_is_refused(modules, message, monkeypatch):
    def found(name):
        if modules:
            return (flash4_stand_in.MODULES | modules)[name]
        raise ModuleNotFoundError("No module named 'flash_attn'", name="flash_attn")

    monkeypatch.setattr(flash4_backend, "import_module", found)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    flash4_backend.interface_obstacle.cache_clear()
    with pytest.raises(BackendUnavailableError, match=message):
        choose_backend(gpu_query(), gpu_query(), block_size=128, backend="flash4")
    flash4_backend.interface_obstacle.cache_clear()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("no CUDA driver"), r"whose import failed \(RuntimeError: no CUDA driver\)"),
        (
            ModuleNotFoundError("No module named 'cutlass'", name="cutlass"),
            r"whose import failed \(ModuleNotFoundError",
        ),
    ],
    ids=["compiler", "part"],
)
def test_a_package_that_cannot_be_imported_is_told(error, message, monkeypatch):
    monkeypatch.setattr(flash4_backend, "import_module", mock.Mock(side_effect=error))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    flash4_backend.interface_obstacle.cache_clear()
    with pytest.raises(BackendUnavailableError, match=f"needs the package flash-attn-4, {message}"):
        choose_backend(gpu_query(), gpu_query(), block_size=128, backend="flash4")
    flash4_backend.interface_obstacle.cache_clear()


@pytest.fixture
def package() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the GPU is not a Hopper")
    if importlib.util.find_spec("flash_attn") is None:
        pytest.skip("flash-attn-4 is not installed")


@pytest.mark.gpu
@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_error_on_a_gpu(case, dtype):
    inputs = testing.make_inputs(case, dtype=dtype, device="cuda")
    options = {"block_size": case.block_size, "return_lse": True, "backend": "flash4"}
    with testing.poisoned_memory():
        out, lse = block_sparse_attention(*inputs.tensors(), **options)
        again, lse_again = block_sparse_attention(*inputs.tensors(), **options)
    check(inputs, case, out, lse)
    assert torch.equal(out, again)
    assert torch.equal(lse, lse_again)


@pytest.mark.gpu
@pytest.mark.usefixtures("package")
def test_gradients_on_a_gpu():
    case = replace(BASE, variable=True)
    inputs = testing.make_inputs(case, dtype=torch.bfloat16, device="cuda")
    grads = {}
    for backend in ("flash4", "triton"):
        leaves = [x.detach().clone().requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]
        lists = inputs.block_index, inputs.block_count
        out = block_sparse_attention(*leaves, *lists, block_size=case.block_size, backend=backend)
        out.float().square().sum().backward()
        grads[backend] = [x.grad for x in leaves]
    for ours, theirs in zip(grads["flash4"], grads["triton"], strict=True):
        assert testing.error_ratio(ours, theirs) < 2**-6
