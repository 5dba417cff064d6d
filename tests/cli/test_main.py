"""The command line as a process: help, exit codes, one line for an expected error."""

import importlib
import subprocess
import sys

import pytest

import diffsieve
from diffsieve import BackendUnavailableError, DiffsieveError, UserInputError
from diffsieve.cli import info, main
from diffsieve.errors import is_out_of_memory

HEAVY = ("torch", "diffusers", "transformers", "triton", "numpy")


def run_main(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return caught.value.code or 0


def raiser(error: BaseException):
    def collect() -> dict[str, object]:
        raise error

    return collect


def test_help_lists_the_commands_without_loading_torch():
    code = (
        "import sys\nfrom diffsieve.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    code = end.code\n"
        f"print('heavy:', [name for name in {HEAVY} if name in sys.modules], 'code:', code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for command in ("generate", "compare", "info", "data", "train"):
        assert f" {command} " in done.stdout
    assert done.stdout.splitlines()[-1] == "heavy: [] code: 0"


def test_module_and_version():
    done = subprocess.run([sys.executable, "-m", "diffsieve", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"diffsieve {diffsieve.__version__}\n"


@pytest.mark.parametrize(
    "arguments", [("nonsense",), ("info", "--nonsense"), ("info", "extra")], ids=["command", "option", "argument"]
)
def test_wrong_usage_exits_with_2(arguments, capsys):
    assert run_main(*arguments) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "error",
    [
        DiffsieveError("density must be in (0, 1], got 1.5"),
        UserInputError("density must be in (0, 1], got 1.5"),
        BackendUnavailableError("density must be in (0, 1], got 1.5"),
        PermissionError("density must be in (0, 1], got 1.5"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_expected_error_is_one_line_on_stderr(error, monkeypatch, capsys):
    monkeypatch.setattr(info, "collect", raiser(error))
    assert run_main("info") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "diffsieve: density must be in (0, 1], got 1.5\n"


def test_an_error_of_several_lines_is_joined(monkeypatch, capsys):
    monkeypatch.setattr(info, "collect", raiser(UserInputError("first\n  second")))
    assert run_main("info") == 1
    assert capsys.readouterr().err == "diffsieve: first second\n"


def test_debug_lets_the_error_through(monkeypatch):
    monkeypatch.setattr(info, "collect", raiser(UserInputError("wrong")))
    with pytest.raises(UserInputError, match=r"^wrong$"):
        main(["info", "--debug"])


def test_an_unexpected_error_is_not_hidden(monkeypatch):
    monkeypatch.setattr(info, "collect", raiser(KeyError("a defect")))
    with pytest.raises(KeyError, match="a defect"):
        main(["info"])


def test_an_interrupt_exits_with_130(monkeypatch, capsys):
    monkeypatch.setattr(info, "collect", raiser(KeyboardInterrupt()))
    assert run_main("info") == 130
    assert capsys.readouterr().err == "diffsieve: interrupted\n"


CPU_ALLOCATOR = (
    "[enforce fail at alloc_cpu.cpp:126] . DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "107374182400 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (lambda torch: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has"),
         "the GPU (could not get 20.00 GiB)"),
        (lambda torch: RuntimeError("MPS backend out of memory"), "the GPU"),
        (lambda torch: RuntimeError(CPU_ALLOCATOR), "the CPU (could not get 100.00 GiB)"),
        (lambda torch: MemoryError(), "the CPU"),
    ],
    ids=["gpu", "mps", "cpu", "python"],
)  # fmt: skip
def test_memory_that_ran_out_is_one_line_with_what_to_lower(error, told, monkeypatch, capsys, tmp_path):
    import torch

    def run_out(*_args, **_kwargs):
        raise error(torch)

    # as a module: the package has a function of its name
    monkeypatch.setattr(importlib.import_module("diffsieve.compare.generate"), "load_pipeline", run_out)
    out = tmp_path / "out"
    assert run_main("generate", "--out", str(out), "--prompt", "a cat") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1] == (
        f"diffsieve: out of memory on {told}: lower --frames, --height or --width, or give --dtype bfloat16 if the "
        "model runs in float32; what was finished before is whole"
    )
    assert "Traceback" not in captured.err
    assert not out.exists()


@pytest.mark.slow
def test_memory_that_runs_out_in_the_middle_leaves_whole_files_only(monkeypatch, capsys, tmp_path):
    module = importlib.import_module("diffsieve.compare.generate")
    real, seeds = module.generate_clip, []

    def run_out_at_the_second(*args, seed, **options):
        seeds.append(seed)
        if len(seeds) == 2:
            raise RuntimeError(CPU_ALLOCATOR)
        return real(*args, seed=seed, **options)

    monkeypatch.setattr(module, "generate_clip", run_out_at_the_second)
    sizes = ("--frames", "5", "--height", "32", "--width", "32", "--steps", "2")
    assert run_main("generate", "--out", str(tmp_path), "--prompt", "a cat", "--seed", "0", "--seed", "1", *sizes) == 1
    assert "out of memory on the CPU" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["001-a-cat-seed0.mp4"]


def test_the_cpu_allocator_really_says_so():
    import torch

    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_debug_shows_where_memory_ran_out(monkeypatch):
    monkeypatch.setattr(info, "collect", raiser(MemoryError("here")))
    with pytest.raises(MemoryError, match="here"):
        main(["info", "--debug"])
    assert run_main("info") == 1


def test_another_runtime_error_is_not_hidden(monkeypatch):
    monkeypatch.setattr(info, "collect", raiser(RuntimeError("a defect")))
    with pytest.raises(RuntimeError, match="a defect"):
        main(["info"])
