"""Take over the trained weights of an earlier run or of an exported pipeline as the beginning of a run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...errors import UserInputError
from .captions import build_tokenizer
from .checkpoint import copy_file, copy_weights, has_weights, save_weights, write_json
from .export import TRAINING_FILE
from .history import SETTINGS_FILE, START_FILE, run_legs
from .sprites import Sprites
from .vae_stage import STATISTICS_FILE

NETWORKS_FOLDER = "start"


@dataclass(frozen=True)
class Start:
    """What a folder to start from holds.

    Args:
        vae: Folder of autoencoder weights, if any; None when the pipeline format holds them.
        networks: Folder of transformer and text encoder weights, likewise.
        pipeline: Folder in diffusers format, if it is one.
        history: Earlier legs, oldest first.
    """

    vae: Path | None
    networks: Path | None
    pipeline: Path | None
    history: list[dict[str, Any]]


def find_start(folder: Path) -> Start:
    """Recognise a pipeline folder, the folder of a run, or the folder of one of its stages.

    Raises:
        UserInputError: When it is none of them.
    """
    if (folder / "model_index.json").is_file():
        path = folder / TRAINING_FILE
        legs = json.loads(path.read_text(encoding="utf-8"))["legs"] if path.is_file() else []
        return Start(None, None, folder, legs)
    if has_weights(folder):
        is_vae = (folder / STATISTICS_FILE).is_file()
        return Start(folder if is_vae else None, None if is_vae else folder, None, [])
    vae = next((folder / name for name in ("decoder", "vae") if has_weights(folder / name)), None)
    networks = next((folder / name for name in ("dit", NETWORKS_FOLDER) if has_weights(folder / name)), None)
    if vae is None and networks is None:
        raise UserInputError(
            f"start_from must be a pipeline folder (model_index.json), the folder of a run or of a stage, got {folder}"
        )
    return Start(vae, networks, None, run_legs(folder) if (folder / SETTINGS_FILE).is_file() else [])


def take_over(start_from: Path, out: Path, sprites: Sprites) -> None:
    """Copy the weights of `start_from` to `out/vae` and `out/start`, in the format of finished stages.

    `out/start.json` is written last; where it exists, everything is there.

    Raises:
        UserInputError: When the folder holds nothing to start from, or a pipeline has another vocabulary.
    """
    start = find_start(start_from)
    if start.pipeline is not None:
        _convert_pipeline(start.pipeline, out, sprites)
    if start.vae is not None:
        copy_file(start.vae / STATISTICS_FILE, out / "vae" / STATISTICS_FILE)
        copy_weights(start.vae, out / "vae")
    if start.networks is not None:
        copy_weights(start.networks, out / NETWORKS_FOLDER)
    write_json(out / START_FILE, {"legs": start.history})


def _convert_pipeline(folder: Path, out: Path, sprites: Sprites) -> None:
    from diffusers import AutoencoderKLWan, WanTransformer3DModel
    from transformers import AutoTokenizer, UMT5EncoderModel

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer", local_files_only=True)
        vae = AutoencoderKLWan.from_pretrained(folder, subfolder="vae", local_files_only=True)
        transformer = WanTransformer3DModel.from_pretrained(folder, subfolder="transformer", local_files_only=True)
        text_encoder = UMT5EncoderModel.from_pretrained(folder / "text_encoder", local_files_only=True)
    except (OSError, ValueError) as error:
        message = " ".join(str(error).split())
        raise UserInputError(
            f"start_from must hold a pipeline as mini-wan is exported, got {folder}: {message}"
        ) from error
    if tokenizer.get_vocab() != build_tokenizer(sprites.names).get_vocab():
        raise UserInputError(f"sprites must be those that {folder} was trained on, got other subject names")
    statistics = {name: list(getattr(vae.config, name)) for name in ("latents_mean", "latents_std")}
    write_json(out / "vae" / STATISTICS_FILE, statistics)
    save_weights(out / "vae", {f"vae.{key}": value.float() for key, value in vae.state_dict().items()}, 0)
    networks = {"transformer": transformer, "text_encoder": text_encoder}
    tensors = {
        # copies: the text encoder has one table under two names
        f"{name}.{key}": value.to(torch.bfloat16, copy=True)
        for name, module in networks.items()
        for key, value in module.state_dict().items()
    }
    save_weights(out / NETWORKS_FOLDER, tensors, 0)
