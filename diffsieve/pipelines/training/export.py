"""Write the finished model as a diffusers folder in bfloat16, with its model card."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...folders import replace_folder
from ..defaults import DEFAULTS_FILE, MINI_WAN_DEFAULTS
from .checkpoint import write_atomically, write_json
from .sprites import load_subjects

if TYPE_CHECKING:
    from diffusers import WanPipeline

MAX_BYTES = 40_000_000
TRAINING_FILE = "training.json"
CARD_FILE = "README.md"
_TITLES = {"vae": "autoencoder", "decoder": "decoder alone", "dit": "transformer and text encoder"}


def export_pipeline(pipe: WanPipeline, out: Path) -> int:
    """Save the pipeline's parts in bfloat16 under `out`, replacing what was there; `describe` adds the model card.

    The pipeline's modules are converted in place.

    Returns:
        Bytes of the folder.

    Raises:
        DiffsieveError: When the folder would be larger than 40 MB; nothing is replaced then.
    """
    for module in (pipe.vae, pipe.transformer, pipe.text_encoder):
        module.to(device="cpu", dtype=torch.bfloat16)

    def write(folder: Path) -> None:
        pipe.save_pretrained(folder, safe_serialization=True)
        _name_tokenizer(folder)
        write_json(folder / DEFAULTS_FILE, asdict(MINI_WAN_DEFAULTS))

    return replace_folder(out, write, max_bytes=MAX_BYTES)


def _name_tokenizer(folder: Path) -> None:
    # transformers 5 writes the new name of the class; the old one is known to every version
    path = folder / "model_index.json"
    index: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    index["tokenizer"] = ["transformers", "PreTrainedTokenizerFast"]
    write_json(path, index)


def describe(folder: Path, training: dict[str, Any]) -> None:
    """Write what is known about a model to its folder: `training.json`, and the `model_card` made from it."""
    write_json(folder / TRAINING_FILE, training)
    card = model_card(training)
    write_atomically(folder / CARD_FILE, lambda path: path.write_text(card, encoding="utf-8"))


def model_card(training: dict[str, Any]) -> str:
    """README.md of the model folder.

    Args:
        training: "quality" from `evaluate_pipeline`, "vae_quality" from `evaluate_vae`, and "legs", oldest first: each
            with "stage", "steps", "seconds", "processes" and "sizes", a list of (frames, height, width).
    """
    figures, vae_figures, legs = training["quality"], training["vae_quality"], training["legs"]
    settings = figures["settings"]
    size = settings["size"]
    rows = "\n".join(
        f"| {_TITLES[leg['stage']]} | {_size_list([leg])} | {leg['steps']} | {leg['seconds']} | {leg['processes']} |"
        for leg in legs
    )
    seen = _size_list([leg for leg in legs if leg["stage"] == "dit"])
    return f"""---
license: apache-2.0
pipeline_tag: text-to-video
library_name: diffusers
tags: [wan, procedural, emoji, sparse-attention]
---
# mini-wan

A small text-to-video model of the Wan architecture, for tests and studies of attention on a CPU. It draws one
emoji-like object that moves over a coloured background, and nothing else.

```python
from diffusers import WanPipeline

pipe = WanPipeline.from_pretrained("diffsieve/pipelines/mini_wan")
frames = pipe(
    "a cat moves to the right over a blue background",
    num_frames={size["frames"]}, height={size["height"]}, width={size["width"]},
    num_inference_steps={settings["steps"]}, guidance_scale={settings["guidance_scale"]},
    max_sequence_length={settings["max_sequence_length"]},
).frames[0]
```

Prompts follow one grammar: "a SUBJECT MOTION over a COLOUR background". Motions: moves to the right, moves to the
left, moves up, moves down, moves in a circle, grows, shrinks, bounces. Colours: red, yellow, green, blue, purple,
pink, cyan, gray. The subjects are the {len(load_subjects())} names in the groups of
`diffsieve/pipelines/training/subjects.json`, such as fox, rocket and strawberry.

## Quality
Measured on {figures["prompts"]} prompts whose combination of subject, motion and colour was held out of training
({settings["steps"]} steps, guidance {settings["guidance_scale"]}, {figures["scheduler"]}, {figures["dtype"]}):

| subject right | motion right | background colour right |
|---|---|---|
| {figures["subject"]:.1%} | {figures["motion"]:.1%} | {figures["colour"]:.1%} |

The judge takes the nearest of all sprites; on rendered clips it is right about the subject in
{vae_figures["original_subject"]:.1%}, on clips that went through the autoencoder in
{vae_figures["reconstruction_subject"]:.1%} (PSNR {vae_figures["psnr_db"]:.1f} dB, inside the sprite
{vae_figures["psnr_sprite_db"]:.1f} dB).

## Training
Trained from scratch by the code of `diffsieve train mini-wan` on clips that are rendered during training, in these
legs:

| part | clips: frames x height x width | steps | seconds | processes |
|---|---|---|---|---|
{rows}

## Data and licence
The clips are made from pictures of Microsoft's Fluent Emoji (3D), which Microsoft publishes under the MIT licence,
taken from the npm package `@lobehub/fluent-emoji-3d` 1.1.0 (MIT). The pictures themselves are not part of this folder.
The weights are licensed under Apache-2.0, like diffsieve.

## Limits
Words outside its vocabulary are unknown to it; other clip sizes than those the transformer saw ({seen}) give worse
pictures. It is no model of natural video, and its figures say nothing about large models.
"""


def _size_list(legs: list[dict[str, Any]]) -> str:
    sizes = dict.fromkeys(tuple(size) for leg in legs for size in leg["sizes"])
    return ", ".join(" x ".join(str(edge) for edge in size) for size in sizes)
