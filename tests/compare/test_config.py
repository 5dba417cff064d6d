"""Wrong arguments are refused with their name before anything is loaded."""

import pytest

from diffsieve.compare import CompareConfig, GenerateConfig
from diffsieve.compare.methods import METHODS
from diffsieve.errors import UserInputError
from diffsieve.pipelines.defaults import MINI_WAN_DEFAULTS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sparsity": 1.0}, r"sparsity must be in \[0, 1\), got 1.0"),
        ({"sparsity": -0.1}, "sparsity must be"),
        ({"sparsity": float("nan")}, "sparsity must be"),
        ({"preset": "fast"}, "preset must be one of default, paper"),
        ({"backend": "cutlass"}, "backend must be one of auto, reference, torch, triton"),
        ({"method": "magic"}, "method must be one of ba-att, llsa, auto, got 'magic'"),
        ({"method": "dense"}, "method must be one of ba-att, llsa, auto, got 'dense'"),
        ({"method": "ba-att", "topk": 4}, "topk has no meaning for ba-att, got 4"),
        ({"topk": 0}, "topk must be a positive integer"),
        ({"method": "llsa", "sparsity": 0.5}, "sparsity has no meaning for llsa, got 0.5"),
        ({"method": "llsa", "warmup": 2}, "warmup has no meaning for llsa, got 2"),
        ({"method": "llsa", "preset": "paper"}, "preset has no meaning for llsa"),
        ({"method": "llsa", "min_tokens": 0}, "min_tokens has no meaning for llsa, got 0"),
        ({"topk": 4, "sparsity": 0.5}, "sparsity has no meaning for llsa"),
        ({"warmup": -1}, "warmup must be a whole number"),
        ({"warmup": 1.5}, "warmup must be a whole number"),
        ({"max_sequence_length": 100_000}, "max_sequence_length must be at most 4096, got 100000"),
        ({"block_size": 0}, "block_size must be a positive integer, got 0"),
        ({"min_tokens": -1}, "min_tokens must be 0 or more"),
        ({"steps": 0}, "steps must be a positive integer"),
        ({"frames": -3}, "frames must be a positive integer"),
        ({"height": 1.5}, "height must be a positive integer"),
        ({"fps": True}, "fps must be a positive integer"),
        ({"guidance_scale": float("inf")}, "guidance_scale must be finite"),
        ({"seed": ()}, "seed must hold at least one"),
        ({"seed": (-1,)}, "seed must be an integer in"),
        ({"seed": (1, 1)}, "seed must not name a value twice"),
        ({"prompt": ("a", "a")}, "prompt must not name a value twice"),
        ({"prompt": ("a", " ")}, "prompt must be a text that is not empty"),
        ({"prompt": "a cat"}, "prompt must be a tuple"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_wrong_arguments_are_named(changes, message):
    with pytest.raises(UserInputError, match=message):
        CompareConfig(**changes)


SPARSE = {"preset": "paper", "sparsity": 0.5, "topk": 4, "warmup": 2, "block_size": 64, "min_tokens": 0}


def test_generate_may_be_dense_without_what_makes_it_sparse():
    assert GenerateConfig(method="dense").sparsity is None
    for name, value in {**SPARSE, "backend": "torch"}.items():
        with pytest.raises(UserInputError, match=f"{name} must be left out for method dense, got {name}={value!r}"):
            GenerateConfig(method="dense", **{name: value})
    with pytest.raises(UserInputError, match=r"sparsity, warmup must be left out .* got sparsity=0.5, warmup=2"):
        GenerateConfig(method="dense", warmup=2, sparsity=0.5)
    with pytest.raises(UserInputError, match="method must be one of ba-att, llsa, dense"):
        GenerateConfig(method="magic")


def test_defaults_fill_only_what_is_missing():
    config = CompareConfig(steps=3, prompt=("a cat",)).filled(MINI_WAN_DEFAULTS)
    assert (config.steps, config.prompt) == (3, ("a cat",))
    assert (config.frames, config.width) == (MINI_WAN_DEFAULTS.frames, MINI_WAN_DEFAULTS.width)
    assert CompareConfig().filled(MINI_WAN_DEFAULTS).prompt == MINI_WAN_DEFAULTS.prompts[:1]


def test_the_method_gets_its_arguments():
    attention = METHODS["ba-att"].config(CompareConfig(sparsity=0.75, warmup=3, preset="paper", block_size=64), None)
    assert (attention.kept, attention.warmup_steps, attention.preset, attention.block_size) == (0.25, 3, "paper", 64)
    assert METHODS["ba-att"].config(CompareConfig(warmup=0.5), None).warmup_steps == 0.5


def test_settings_leave_out_what_does_not_change_a_clip():
    assert not {"prompt", "seed", "out"} & CompareConfig().settings().keys()
