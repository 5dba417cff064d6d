"""A tiny pixel-space DiT with random weights, all of them used: a new model predicts 0."""

import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from diffsieve.pipelines.pixel_dit import PixelDiTPipeline, PixelDiTTransformer2DModel

CLASSES = ["Animals & Nature", "Food & Drink", "Objects"]


def transformer(**options):
    torch.manual_seed(0)
    sizes = {
        "sample_size": 16,
        "num_layers": 2,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_classes": len(CLASSES),
        "block_size": 8,
        "topk": 2,
    }
    model = PixelDiTTransformer2DModel(**(sizes | options)).eval()
    for name, parameter in model.named_parameters():
        if "modulation" in name or "proj_out" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def pipeline(**options):
    model = transformer(**options)
    names = CLASSES if model.config.num_classes else None
    pipe = PixelDiTPipeline(model, FlowMatchEulerDiscreteScheduler(), class_names=names)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate(pipe, labels="objects", **options):
    """Pictures (B, 3, H, W) in [0, 1]."""
    given = {"num_inference_steps": 2, "output_type": "pt", "generator": torch.Generator().manual_seed(0)}
    return pipe(labels, **(given | options)).images
