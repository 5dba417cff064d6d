"""A training run that takes seconds on one CPU core: small networks, small clips, a schedule in steps."""

from pathlib import Path
from typing import Any

import numpy as np

from diffsieve.pipelines.training.config import TrainConfig

SIZE = {"frames": 5, "height": 32, "width": 32, "batch_size": 2}
LARGE = {"frames": 9, "height": 48, "width": 48, "batch_size": 2}


def tiny_settings(steps: int = 4, **parts: Any) -> TrainConfig:
    """Settings of every stage with `steps` steps; `parts` are merged into the stages of those names."""
    common = {"steps": steps, "log_every": 1, "phases": [SIZE]}
    values: dict[str, Any] = {
        "model": {
            "vae_base_dim": 8,
            "vae_dim_mult": [1, 1, 1],
            "vae_res_blocks": 1,
            "latent_channels": 4,
            "layers": 1,
            "heads": 2,
            "head_dim": 12,
            "ffn_dim": 32,
            "text_dim": 16,
            "text_layers": 1,
            "text_heads": 1,
            "text_head_dim": 16,
            "text_ffn_dim": 32,
        },
        "vae": {**common, "min_ceiling": 0.0},
        "decoder": common,
        "dit": {
            **common,
            "phases": [
                {**SIZE, "until": 0.5, "long_text_share": 0.5},
                {**SIZE, "until": 1.0, "long_text_share": 0.9, "extra": LARGE, "extra_every": 2},
            ],
            "compile": False,
            "text_length": 12,
            "long_text_length": 24,
            "reuse": 2,
            "reuse_lag": 1,
        },
        "evaluation": {"prompts": 2, "steps": 2, "max_sequence_length": 24, "size": {**SIZE, "frames": 9}},
    }
    for name, changes in parts.items():
        values[name] = {**values.get(name, {}), **changes} if isinstance(changes, dict) else changes
    return TrainConfig.from_dict(values)


def write_sprites(path: Path) -> Path:
    """The shapes of `tests.shapes` as a sprite file."""
    from tests.shapes import shape_sprites

    sprites = shape_sprites()
    rgba = (sprites.rgba * 255).round().numpy().astype(np.uint8)
    np.savez(path, rgba_dx=np.diff(rgba, axis=-1, prepend=np.uint8(0)), names=np.array(sprites.names))
    return path
