"""Encode and decode a clip in one pass instead of the autoencoder's frame-by-frame cache.

`AutoencoderKLWan` walks over a clip in chunks of four frames and carries the last frames of every causal convolution along.
Causal padding of the whole clip gives the same numbers in one call, so it can be trained and compiled. Two places differ
from plain causal convolutions: the first frame passes each temporal resampling unchanged, and the upsampling
convolution does not see it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan


def encode_clip(vae: AutoencoderKLWan, video: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Posterior of a clip.

    Args:
        video: (B, 3, 1 + 4k, H, W), values in [-1, 1].

    Returns:
        Mean and log variance, each (B, C, 1 + k, H / 8, W / 8).
    """
    from diffusers.models.autoencoders.autoencoder_kl_wan import patchify

    encoder = vae.encoder
    x = encoder.conv_in(patchify(video, vae.config.patch_size))
    for layer in encoder.down_blocks:
        x = _apply(layer, x)
    x = encoder.mid_block(x)
    x = encoder.conv_out(encoder.nonlinearity(encoder.norm_out(x)))
    mean, log_variance = vae.quant_conv(x).chunk(2, dim=1)
    return mean, log_variance.clamp(-30.0, 20.0)


def decode_clip(vae: AutoencoderKLWan, latents: torch.Tensor) -> torch.Tensor:
    """Clip of a latent; not clamped, unlike `vae.decode`.

    Args:
        latents: (B, C, 1 + k, h, w), before normalisation by the latent statistics.

    Returns:
        (B, 3, 1 + 4k, 8h, 8w), about [-1, 1].
    """
    from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify

    decoder = vae.decoder
    x = decoder.mid_block(decoder.conv_in(vae.post_quant_conv(latents)))
    for block in decoder.up_blocks:
        for layer in [*block.resnets, *(block.upsamplers or [])]:
            x = _apply(layer, x)
    x = decoder.conv_out(decoder.nonlinearity(decoder.norm_out(x)))
    return unpatchify(x, vae.config.patch_size)


def _apply(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    mode = getattr(layer, "mode", None)
    if mode is None:
        return layer(x)
    if mode == "upsample3d":
        x = _upsample_time(layer, x)
    batch, channels, frames, height, width = x.shape
    flat = x.transpose(1, 2).reshape(batch * frames, channels, height, width)
    if mode.startswith("upsample"):
        # the stock layer goes through float32 for a pure copy of values
        flat = layer.resample[1](F.interpolate(flat, scale_factor=2.0, mode="nearest-exact"))
    else:
        flat = layer.resample(flat)
    x = flat.reshape(batch, frames, *flat.shape[1:]).transpose(1, 2)
    if mode == "downsample3d" and frames > 1:
        x = torch.cat([x[:, :, :1], layer.time_conv(x)], dim=2)
    return x


def _upsample_time(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    batch, channels, frames, height, width = x.shape
    if frames == 1:
        return x
    later = layer.time_conv(x[:, :, 1:])
    later = later.reshape(batch, 2, channels, frames - 1, height, width)
    later = torch.stack((later[:, 0], later[:, 1]), dim=3).reshape(batch, channels, 2 * (frames - 1), height, width)
    return torch.cat([x[:, :, :1], later], dim=2)
