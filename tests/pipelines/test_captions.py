import pytest

from diffsieve.errors import UserInputError
from diffsieve.pipelines.training.captions import (
    COLOURS,
    MAX_VOCABULARY,
    MOTIONS,
    build_tokenizer,
    caption_of,
    vocabulary,
)
from diffsieve.pipelines.training.sprites import load_subjects

SUBJECTS = ("cat", "apple", "ice cream", "unicorn")


@pytest.mark.parametrize(
    ("triple", "expected"),
    [
        (("cat", "right", "blue"), "a cat moves to the right over a blue background"),
        (("apple", "left", "red"), "an apple moves to the left over a red background"),
        (("ice cream", "up", "yellow"), "an ice cream moves up over a yellow background"),
        (("unicorn", "down", "green"), "a unicorn moves down over a green background"),
        (("cat", "circle", "purple"), "a cat moves in a circle over a purple background"),
        (("cat", "grows", "pink"), "a cat grows over a pink background"),
        (("cat", "shrinks", "cyan"), "a cat shrinks over a cyan background"),
        (("cat", "bounces", "gray"), "a cat bounces over a gray background"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else None,
)
def test_caption(triple, expected):
    assert caption_of(*triple) == expected


def test_captions_of_two_motions_differ_beyond_word_order():
    bags = {tuple(sorted(caption_of("cat", motion, "red").split())) for motion in MOTIONS}
    assert len(bags) == len(MOTIONS) == 8


def test_unknown_words_are_named():
    with pytest.raises(UserInputError, match=r"motion must be one of right, .*, got 'sideways'"):
        caption_of("cat", "sideways", "red")
    with pytest.raises(UserInputError, match=r"colour must be one of red, .*, got 'beige'"):
        caption_of("cat", "right", "beige")


def test_vocabulary_of_the_real_subjects_fits():
    words = vocabulary(list(load_subjects()))
    assert words[:3] == ["<pad>", "</s>", "<unk>"]
    assert len(set(words)) == len(words) <= MAX_VOCABULARY
    with pytest.raises(UserInputError, match=r"subjects must give at most 300 tokens, got 33\d"):
        vocabulary([f"thing{i}" for i in range(310)])


def test_every_caption_encodes_without_unknown_words():
    tokenizer = build_tokenizer(SUBJECTS)
    captions = [caption_of(s, m, c) for s in SUBJECTS for m in MOTIONS for c in COLOURS]
    ids = tokenizer(captions)["input_ids"]
    assert len({tuple(row) for row in ids}) == len(captions)
    for row, text in zip(ids, captions, strict=True):
        assert tokenizer.unk_token_id not in row
        assert row[-1] == tokenizer.eos_token_id == 1
        assert len(row) == len(text.split()) + 1


def test_any_text_encodes():
    tokenizer = build_tokenizer(SUBJECTS)
    known, end, unknown = tokenizer.convert_tokens_to_ids(["cat", "</s>", "<unk>"])
    assert tokenizer("CAT, Zürich!")["input_ids"] == [known, unknown, unknown, unknown, end]
    assert tokenizer("")["input_ids"] == [end]


def test_padding_and_truncation_as_a_pipeline_asks_for_them():
    tokenizer = build_tokenizer(SUBJECTS)
    encoded = tokenizer(
        ["a cat grows", "a cat moves to the right over a blue background"],
        padding="max_length",
        max_length=8,
        truncation=True,
        add_special_tokens=True,
        return_attention_mask=True,
        return_tensors="pt",
    )
    assert encoded["input_ids"].shape == (2, 8)
    assert encoded["attention_mask"].tolist() == [[1] * 4 + [0] * 4, [1] * 8]
    assert encoded["input_ids"][0, 4:].tolist() == [tokenizer.pad_token_id] * 4 == [0] * 4
    assert encoded["input_ids"][1, -1] == 1  # the end survives truncation


def test_the_tokenizer_survives_saving(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = build_tokenizer(SUBJECTS, model_max_length=77)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "An ICE CREAM bounces over a strange background"
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert (loaded.pad_token_id, loaded.eos_token_id, loaded.model_max_length) == (0, 1, 77)
