"""Write the finished model as a pipeline folder in bfloat16, with its model card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from ....folders import replace_folder
from ...pixel_dit import PixelDiTPipeline
from ..checkpoint import write_atomically, write_json

TRAINING_FILE = "training.json"
CARD_FILE = "README.md"
MINI_BYTES = 25_000_000  # most that the embedded model may have


def export_pipeline(pipe: PixelDiTPipeline, out: Path, training: dict[str, Any]) -> int:
    """Save a pipeline in bfloat16 under `out`, with what is known about its training, replacing what was there.

    The transformer is converted in place.

    Returns:
        Bytes of the folder.
    """
    pipe.transformer.to(device="cpu", dtype=torch.bfloat16)

    def write(folder: Path) -> None:
        pipe.save_pretrained(folder, safe_serialization=True)
        write_json(folder / TRAINING_FILE, training)
        card = model_card(training)
        write_atomically(folder / CARD_FILE, lambda path: path.write_text(card, encoding="utf-8"))

    return replace_folder(out, write)


def training_legs(folder: Path) -> list[dict[str, Any]]:
    """The legs that the model in a pipeline folder went through, oldest first."""
    path = folder / TRAINING_FILE
    if not path.is_file():
        return []
    legs: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["legs"]
    return legs


def model_card(training: dict[str, Any]) -> str:
    """README.md of the model folder.

    Args:
        training: "parameters", "side", "classes", "pictures", "attention", "sampling", "data_note", and "legs", oldest
            first: each with "side", "steps", "seconds", "processes" and "images".
    """
    rows = "\n".join(
        f"| {leg['side']} x {leg['side']} | {leg['steps']} | {leg['images']} | {leg['seconds']} | {leg['processes']} |"
        for leg in training["legs"]
    )
    side, sampling = training["side"], training["sampling"]
    low, high = sampling["guidance_interval"]
    note = f"\n## Data\n{training['data_note']}\n" if training.get("data_note") else ""
    classes = ", ".join(training["classes"]) or "none"
    return f"""---
pipeline_tag: unconditional-image-generation
library_name: diffusers
tags: [pixel-space, sparse-attention, llsa]
---
# A pixel-space DiT

Draws pictures of {side} x {side} pixels without an autoencoder: one token a pixel, {training["attention"]} attention,
{training["parameters"] / 1e6:.1f} M parameters.

```python
from diffsieve import PixelDiTPipeline

pipe = PixelDiTPipeline.from_pretrained("path/to/this/folder")
image = pipe(0, num_inference_steps={sampling["steps"]}).images[0]
```

Classes: {classes}. Guidance {sampling["guidance_scale"]} at shares of noise from {low} to {high}, unless the call says
otherwise.

## Training
`diffsieve train pixel-dit` on {training["pictures"]} pictures, in these legs:

| pictures | steps | pictures seen | seconds | processes |
|---|---|---|---|---|
{rows}
{note}"""
