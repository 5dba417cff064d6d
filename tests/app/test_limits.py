"""Every bound of a request, whatever type a client sends; texts are cleaned."""

import math

import pytest

from diffsieve.app.limits import Limits, check_model, check_request, check_sweep, parse_sweep
from diffsieve.errors import UserInputError
from tests.app.conftest import small

LIMITS = Limits(prompt=40, steps=10, frames=17, side=64, pixels=9 * 48 * 48, picture=1024, sweep=3)
MODELS = ["tiny", "other"]
CLASSES = ("Animals & Nature", "Objects")
HUGE = 10**400


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": ""}, "prompt must not be empty"),
        ({"prompt": " \n\x00 "}, "prompt must not be empty"),
        ({"prompt": 5}, "prompt must be a text, got 5"),
        ({"prompt": "x" * 41}, "prompt must have at most 40 characters, got 41"),
        ({"negative_prompt": {"a": 1}}, "negative prompt must be a text"),
        ({"negative_prompt": "x" * 41}, "negative prompt must have at most 40"),
        ({"method": "dense"}, "method must be one of ba-att"),
        ({"method": 1}, "method must be one of"),
        ({"preset": "../x"}, "preset must be one of default, paper"),
        ({"sparsity": 1.0}, "sparsity must be a number from 0 to 0.99, got 1.0"),
        ({"sparsity": -0.1}, "sparsity must be"),
        ({"sparsity": math.nan}, "sparsity must be .* got nan"),
        ({"sparsity": "0.5"}, "sparsity must be .* got '0.5'"),
        ({"sparsity": True}, "sparsity must be"),
        ({"steps": 0}, "steps must be a whole number from 1 to 10, got 0"),
        ({"steps": 11}, "steps must be"),
        ({"steps": HUGE}, "steps must be"),
        ({"steps": 2.5}, "steps must be a whole number .* got 2.5"),
        ({"steps": math.inf}, "steps must be"),
        ({"steps": math.nan}, "steps must be"),
        ({"steps": None}, "steps must be"),
        ({"steps": [4]}, "steps must be"),
        ({"warmup": -1}, "warm-up must be a number from 0 to 1, got -1"),
        ({"warmup": 5}, "warm-up must be"),
        ({"warmup": None}, "warm-up must be"),
        ({"frames": 18}, "frames must be a whole number from 1 to 17"),
        ({"width": 80}, "width must be a whole number from 16 to 64"),
        ({"width": 40}, "width must be a multiple of 16 pixels, got 40"),
        ({"height": 0}, "height must be"),
        ({"height": -32}, "height must be"),
        ({"width": 64, "height": 64}, r"frames x width x height must be at most 20,736 pixels .* 9 x 64 x 64 = 36,864"),
        ({"seed": -1}, "seed must be a whole number from 0 to 2,147,483,647"),
        ({"seed": 2**31}, "seed must be"),
        ({"seed": True}, "seed must be"),
        ({"guidance": 31}, "guidance must be a number from 0 to 30"),
        ({"guidance": HUGE}, "guidance must be"),
        ({"block_size": 2}, "block size must be a whole number from 4 to 1,024"),
        ({"block_size": "8"}, "block size must be"),
        ({"min_tokens": -1}, "min tokens must be"),
    ],
)
def test_what_is_out_of_range_is_named(changes, message):
    with pytest.raises(UserInputError, match=message):
        check_request(small(**changes), LIMITS)


@pytest.mark.parametrize("name", ["../../etc", ["tiny"], None, "", 5])
def test_a_model_that_is_not_offered(name):
    assert check_model("other", MODELS) == "other"
    with pytest.raises(UserInputError, match="model must be one of tiny, other, got "):
        check_model(name, MODELS)


def test_a_message_does_not_repeat_a_long_value():
    with pytest.raises(UserInputError) as raised:
        check_model("x" * 5000, MODELS)
    assert len(str(raised.value)) < 120


def test_whole_numbers_may_come_as_floats():
    config = check_request(small(steps=4.0, width=32.0, seed=7.0, min_tokens=None), LIMITS)
    assert (config.steps, config.width, config.seed, config.min_tokens) == (4, 32, (7,), None)
    assert all(type(value) is int for value in (config.steps, config.width, config.seed[0]))
    assert config.save_masks


def test_a_prompt_loses_what_cannot_be_seen():
    config = check_request(small(prompt="  a cat\n\tmoves\x07\u200b left ", negative_prompt=" "), LIMITS)
    assert config.prompt == ("a cat  moves left",)
    assert config.negative_prompt is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("0.5", "sparsities must be a list"),
        (None, "sparsities must be a list"),
        ([], "sparsities must hold 1 to 3 numbers, got 0"),
        ([0.1, 0.2, 0.3, 0.4], "sparsities must hold 1 to 3 numbers, got 4"),
        ([0.5, 2], "sparsity must be a number from 0 to 0.99, got 2"),
        ([0.5, "x"], "sparsity must be"),
    ],
)
def test_what_cannot_be_swept(values, message):
    with pytest.raises(UserInputError, match=message):
        check_sweep(small(), values, LIMITS)


def test_a_sweep_is_ascending_without_repeats():
    found = check_sweep(small(), [0.75, 0.25, 0.75], LIMITS)
    assert [request.sparsity for request in found] == [0.25, 0.75]
    found = check_sweep(small(method="llsa"), [4.0, 2, 4], LIMITS)
    assert [request.topk for request in found] == [2, 4]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([2.5], "top k must be a whole number from 1 to 128, got 2.5"),
        ([0], "top k must be a whole number"),
        ([129], "top k must be a whole number from 1 to 128, got 129"),
        ([], "numbers of top k must hold 1 to 3 numbers, got 0"),
        ("2", "numbers of top k must be a list of numbers"),
    ],
)
def test_what_llsa_cannot_sweep(values, message):
    with pytest.raises(UserInputError, match=message):
        check_sweep(small(method="llsa"), values, LIMITS)
    with pytest.raises(UserInputError, match="method must be one of"):
        check_sweep(small(method="dense"), [0.5], LIMITS)


def test_the_text_of_a_sweep():
    assert parse_sweep("25, 50%,", "ba-att") == [0.25, 0.5]
    assert parse_sweep("2, 4", "llsa") == [2, 4]
    with pytest.raises(UserInputError, match="sparsities must be numbers with commas such as 25, 50, got 'a'"):
        parse_sweep("a", "ba-att")
    with pytest.raises(UserInputError, match="numbers of top k must be numbers with commas such as 2, 4, got 5"):
        parse_sweep(5, "llsa")
    for text in ("1," * 200, "4%"):
        with pytest.raises(UserInputError, match="numbers of top k must be numbers with commas"):
            parse_sweep(text, "llsa")


def picture(**changes):
    return small(**{"width": 20, "height": 13, "prompt": None, "frames": None, "negative_prompt": None} | changes)


def test_pictures_have_a_class_and_any_size():
    config = check_request(picture(class_name="Objects"), LIMITS, CLASSES)
    assert (config.prompt, config.width, config.height) == (("Objects",), 20, 13)
    assert (config.frames, config.negative_prompt, config.fps) == (None, None, None)
    assert check_request(picture(), LIMITS, CLASSES).prompt == CLASSES[:1]
    free = check_request(picture(method="llsa", topk=None, block_size=None), LIMITS, CLASSES)
    assert (free.topk, free.block_size) == (None, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"class_name": "../x"}, "class must be one of Animals & Nature, Objects, got '../x'"),
        ({"class_name": "objects"}, "class must be one of"),
        ({"class_name": 1}, "class must be one of"),
        ({"class_name": ["Objects"]}, "class must be one of"),
        ({"width": 7}, "width must be a whole number from 8 to 64, got 7"),
        ({"height": 65}, "height must be a whole number from 8 to 64"),
        ({"height": 12.5}, "height must be a whole number"),
        ({"width": HUGE}, "width must be"),
        (
            {"width": 40, "height": 40},
            "width x height must be at most 1,024 pixels .* got 40 x 40 = 1,600",
        ),
        ({"steps": 11}, "steps must be a whole number from 1 to 10"),
        ({"block_size": 2}, "block size must be a whole number from 4"),
    ],
)
def test_what_is_out_of_range_for_pictures(changes, message):
    with pytest.raises(UserInputError, match=message):
        check_request(picture(**changes), LIMITS, CLASSES)


def test_llsa_takes_top_k_and_nothing_of_ba_att():
    config = check_request(small(method="llsa", topk=3.0), LIMITS)
    assert (config.method, config.topk, config.block_size) == ("llsa", 3, 8)
    assert (config.sparsity, config.warmup, config.preset, config.min_tokens) == (None, None, None, None)
    with pytest.raises(UserInputError, match="top k must be a whole number from 1 to 128, got 0"):
        check_request(small(method="llsa", topk=0), LIMITS)


def test_a_cpu_has_a_smaller_bound():
    assert Limits.for_device("cpu").pixels < Limits.for_device("cuda").pixels
    assert Limits.for_device("cpu").picture < Limits.for_device("cuda").picture == 512 * 512
