"""The stage that trains the transformer."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ....errors import UserInputError
from ...pixel_dit import PixelDiTTransformer2DModel
from ..accelerating import fast_attention
from ..checkpoint import AveragedWeights, load_weights, module_tensors, save_weights, write_json
from ..loop import Leg, StageResult, many_shapes, run_stage
from ..muon import split_parameters
from .config import PixelModelConfig, PixelTrainConfig
from .images import ImageSet
from .loss import flow_loss, sample_times
from .sampling import build_pipeline, contact_sheet, generate
from .stream import ImageStream, augmented

if TYPE_CHECKING:
    from accelerate import Accelerator

DATA_FILE = "data.json"


def build_transformer(config: PixelModelConfig, side: int, num_classes: int) -> PixelDiTTransformer2DModel:
    """The transformer of some settings, with new weights."""
    return PixelDiTTransformer2DModel(
        sample_size=side,
        num_layers=config.layers,
        num_attention_heads=config.heads,
        attention_head_dim=config.head_dim,
        mlp_ratio=config.mlp_ratio,
        num_classes=num_classes,
        attention_method=config.attention_method,
        token_order=config.token_order,
        block_size=config.block_size,
        topk=config.topk,
        levels=config.levels,
        enrich=config.enrich,
        disjoint=config.disjoint,
        rope_extent=config.rope_extent,
    )


def train_transformer(
    config: PixelTrainConfig,
    images: ImageSet,
    folder: Path,
    accelerator: Accelerator,
    leg: Leg,
    *,
    start_from: Mapping[str, torch.Tensor] | None = None,
) -> StageResult:
    """Train the transformer; the folder gets the state and the averaged weights.

    Args:
        config: of the run.
        images: at the side of the largest phase.
        folder: of this stage.
        accelerator: gives device, precision and processes.
        leg: deadline, resume, reports.
        start_from: weights to begin with, where no complete state exists.

    Raises:
        UserInputError: weights of another architecture, or a resumed run with other pictures.
    """
    stage, device = config.dit, accelerator.device
    _check_data(folder, images, resume=leg.resume, main=accelerator.is_main_process)
    torch.manual_seed(config.seed)
    transformer = build_transformer(config.model, stage.side, len(images.classes)).to(device)
    if start_from is not None:
        take_weights(transformer, start_from)
    # a second network for the averages, never compiled
    average = copy.deepcopy(transformer).requires_grad_(False).eval()
    if stage.gradient_checkpointing:
        transformer.enable_gradient_checkpointing()
    if stage.compile:
        transformer.compile_repeated_blocks(dynamic=False)
    hidden: list[torch.nn.Parameter] = []
    if stage.optimizer == "muon":
        modulation = [module for name, module in transformer.named_modules() if name.endswith("modulation")]
        hidden, _ = split_parameters([transformer.blocks], modulation)
    chosen = {id(parameter) for parameter in hidden}
    other = [parameter for parameter in transformer.parameters() if id(parameter) not in chosen]
    stream = ImageStream(images, config.seed, device, accelerator.process_index, accelerator.num_processes)

    def compute_loss(step: int, progress: float) -> tuple[dict[str, torch.Tensor], int]:
        phase = stage.phase(progress)
        pixels, labels = stream.batch(step, phase)
        generator = stream.generator(step)
        pixels = augmented(pixels, stage, generator)
        given: torch.Tensor | None = None
        if images.classes:
            dropped = torch.rand(len(labels), generator=generator, device=device) < stage.class_dropout
            given = torch.where(dropped, len(images.classes), labels)
        times = sample_times(len(labels), stage, generator)
        with accelerator.autocast(), fast_attention(device):
            loss = flow_loss(transformer, pixels, given, times, generator)
        return {"loss": loss}, len(labels)

    def describe(progress: float, rate: float) -> dict[str, float]:
        phase = stage.phase(progress)
        return {"side": phase.side, "batch_size": phase.batch_size, "tokens_per_second": rate * phase.side**2}

    def save_average(ema: AveragedWeights, step: int) -> None:
        ema.copy_to("transformer", average)
        tensors = module_tensors({"transformer": average})
        save_weights(folder, {key: value.to(torch.bfloat16) for key, value in tensors.items()}, step)

    def sample(ema: AveragedWeights, progress: float, path: Path) -> None:
        ema.copy_to("transformer", average)
        pipe = build_pipeline(average, images.classes, config.sampling)
        with accelerator.autocast():
            pictures, labels = generate(pipe, config.sampling, side=stage.phase(progress).side)
        path.parent.mkdir(parents=True, exist_ok=True)
        contact_sheet(pictures, labels, images.classes).save(path, format="PNG")

    with many_shapes():
        return run_stage(
            folder.name,
            folder,
            stage,
            accelerator,
            {"transformer": transformer},
            (hidden, other),
            compute_loss,
            leg,
            save_average=save_average,
            sample=sample,
            describe=describe,
        )


def take_weights(transformer: PixelDiTTransformer2DModel, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load weights, of any picture size and attention method, into a transformer of the same shape.

    Raises:
        UserInputError: the weights belong to another architecture; nothing is changed then.
    """
    own = transformer.state_dict()
    for name in sorted({*own, *tensors}):
        expected, got = (tuple(x[name].shape) if name in x else "none" for x in (own, tensors))
        if expected != got:
            raise UserInputError(
                f"start_from must fit the settings of the model and the classes of the data, but {name} has the shape "
                f"{got} instead of {expected}"
            )
    transformer.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})


def load_transformer(config: PixelTrainConfig, folder: Path, num_classes: int) -> PixelDiTTransformer2DModel:
    """The averaged transformer of a stage folder, in float32 on the CPU."""
    transformer = build_transformer(config.model, config.dit.side, num_classes)
    tensors = load_weights(folder)
    take_weights(transformer, {key.removeprefix("transformer."): value for key, value in tensors.items()})
    return transformer.eval()


def _check_data(folder: Path, images: ImageSet, *, resume: bool, main: bool) -> None:
    """Write down what a run is trained on; a resumed run must go on with the same."""
    path = folder / DATA_FILE
    values = {"digest": images.digest, "pictures": len(images), "classes": list(images.classes)}
    if resume and path.is_file():
        saved = json.loads(path.read_text(encoding="utf-8"))
        if saved != values:
            raise UserInputError(
                f"data must be the pictures that the run in {folder} began with ({saved['pictures']} of them), got "
                f"{len(images)} or others"
            )
    elif main:
        write_json(path, values)
