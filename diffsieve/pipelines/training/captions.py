"""Captions of the training clips and a tokenizer made for exactly their words.

One grammar: "a {subject} {motion} over a {colour} background", for example "a cat moves to the right over a blue
background". The words of two motions differ beyond their order ("moves to the right", never "from left to right"),
because a small text encoder reads a caption almost as a bag of words.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...errors import UserInputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MOTION_PHRASES = {
    "right": "moves to the right",
    "left": "moves to the left",
    "up": "moves up",
    "down": "moves down",
    "circle": "moves in a circle",
    "grows": "grows",
    "shrinks": "shrinks",
    "bounces": "bounces",
}
MOTIONS = tuple(MOTION_PHRASES)

COLOURS = ("red", "yellow", "green", "blue", "purple", "pink", "cyan", "gray")

PAD_TOKEN, END_TOKEN, UNKNOWN_TOKEN = "<pad>", "</s>", "<unk>"
MAX_VOCABULARY = 300


def caption_of(subject: str, motion: str, colour: str) -> str:
    """The caption of one (subject, motion, colour) triple."""
    if motion not in MOTION_PHRASES:
        raise UserInputError(f"motion must be one of {', '.join(MOTIONS)}, got {motion!r}")
    if colour not in COLOURS:
        raise UserInputError(f"colour must be one of {', '.join(COLOURS)}, got {colour!r}")
    article = "an" if subject[:1] in "aeiou" and not subject.startswith("u") else "a"
    return f"{article} {subject} {MOTION_PHRASES[motion]} over a {colour} background"


def vocabulary(subjects: Sequence[str]) -> list[str]:
    """All tokens, in the order of their ids: padding (id 0), end, unknown, then every word of every caption.

    Raises:
        UserInputError: If there are more than `MAX_VOCABULARY` tokens.
    """
    words = [PAD_TOKEN, END_TOKEN, UNKNOWN_TOKEN, "a", "an", "over", "background"]
    for phrase in (*MOTION_PHRASES.values(), *COLOURS, *subjects):
        words.extend(phrase.lower().split())
    tokens = list(dict.fromkeys(words))
    if len(tokens) > MAX_VOCABULARY:
        raise UserInputError(f"subjects must give at most {MAX_VOCABULARY} tokens, got {len(tokens)}")
    return tokens


def build_tokenizer(subjects: Sequence[str], model_max_length: int = 512) -> "PreTrainedTokenizerFast":
    """A word tokenizer for the captions: lower case, split at spaces and punctuation, `</s>` at the end.

    Words outside the vocabulary become the unknown token, so any text encodes. `save_pretrained` writes it in the
    usual format.

    Args:
        subjects: Caption names of the subjects.
        model_max_length: Longest input in tokens, `</s>` included.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    ids = {token: i for i, token in enumerate(vocabulary(subjects))}
    # Typed as Any: the stubs of tokenizers declare these attributes read-only.
    tokenizer: Any = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN_TOKEN))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END_TOKEN}", special_tokens=[(END_TOKEN, ids[END_TOKEN])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        eos_token=END_TOKEN,
        unk_token=UNKNOWN_TOKEN,
        model_max_length=model_max_length,
        padding_side="right",
    )
