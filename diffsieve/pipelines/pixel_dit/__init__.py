"""Pixel-space DiT: the transformer and its pipeline.

The path of this module stands in every saved pipeline (model_index.json): it is a file format and never changes.
Importing it imports diffusers. Loading a pipeline looks for the base class of a part by its name in this module.
"""

from diffusers.models.modeling_utils import ModelMixin

from .pipeline import PixelDiTPipeline, noise_scale
from .transformer import PixelDiTTransformer2DModel

__all__ = ["ModelMixin", "PixelDiTPipeline", "PixelDiTTransformer2DModel", "noise_scale"]

for _class in (PixelDiTPipeline, PixelDiTTransformer2DModel):
    _class.__module__ = __name__
