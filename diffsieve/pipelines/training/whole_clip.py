"""Encode and decode a clip in one pass instead of the autoencoder's frame-by-frame cache.

`AutoencoderKLWan` walks over a clip in chunks of four frames and carries the last frames of every causal convolution
along. Causal padding of the whole clip gives the same numbers in one call, so it can be trained and compiled. Two
places differ from plain causal convolutions: the first frame passes each temporal resampling unchanged, and the
upsampling convolution does not see it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from .norm_silu import norm_silu_pad

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan


def encode_clip(
    vae: AutoencoderKLWan, video: torch.Tensor, *, fused: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Posterior of a clip.

    Args:
        video: (B, 3, 1 + 4k, H, W), values in [-1, 1].
        fused: Use the Triton kernels of `norm_silu` in the residual blocks; for a GPU.

    Returns:
        Mean and log variance, each (B, C, 1 + k, H / 8, W / 8).
    """
    from diffusers.models.autoencoders.autoencoder_kl_wan import patchify

    encoder = vae.encoder
    x = encoder.conv_in(patchify(video, vae.config.patch_size))
    for layer in [*encoder.down_blocks, *_mid_layers(encoder)]:
        x = _apply(layer, x, fused)
    x = _norm_conv(encoder.norm_out, encoder.conv_out, x, fused)
    mean, log_variance = vae.quant_conv(x).chunk(2, dim=1)
    return mean, log_variance.clamp(-30.0, 20.0)


def decode_clip(vae: AutoencoderKLWan, latents: torch.Tensor, *, fused: bool = False) -> torch.Tensor:
    """Clip of a latent; not clamped, unlike `vae.decode`.

    Args:
        latents: (B, C, 1 + k, h, w), before normalisation by the latent statistics.
        fused: As in `encode_clip`.

    Returns:
        (B, 3, 1 + 4k, 8h, 8w), about [-1, 1].
    """
    from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify

    decoder = vae.decoder
    x = decoder.conv_in(vae.post_quant_conv(latents))
    layers = [layer for block in decoder.up_blocks for layer in [*block.resnets, *(block.upsamplers or [])]]
    for layer in [*_mid_layers(decoder), *layers]:
        x = _apply(layer, x, fused)
    x = _norm_conv(decoder.norm_out, decoder.conv_out, x, fused)
    return unpatchify(x, vae.config.patch_size)


def _mid_layers(coder: nn.Module) -> list[nn.Module]:
    middle: Any = coder.mid_block
    first, *rest = middle.resnets
    return [first, *(layer for pair in zip(middle.attentions, rest, strict=True) for layer in pair)]


def _norm_conv(norm: Any, conv: Any, x: torch.Tensor, fused: bool) -> torch.Tensor:
    """Norm, SiLU and a causal convolution over 3 x 3 x 3."""
    if fused:
        return F.conv3d(norm_silu_pad(x, norm.gamma, 2), conv.weight, conv.bias, padding=(0, 1, 1))
    return conv(F.silu(norm(x)))


def _apply(layer: Any, x: torch.Tensor, fused: bool) -> torch.Tensor:
    if fused and hasattr(layer, "conv_shortcut"):
        shortcut = layer.conv_shortcut(x)
        return shortcut + _norm_conv(layer.norm2, layer.conv2, _norm_conv(layer.norm1, layer.conv1, x, fused), fused)
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


def _upsample_time(layer: Any, x: torch.Tensor) -> torch.Tensor:
    batch, channels, frames, height, width = x.shape
    if frames == 1:
        return x
    later = layer.time_conv(x[:, :, 1:])
    later = later.reshape(batch, 2, channels, frames - 1, height, width)
    later = torch.stack((later[:, 0], later[:, 1]), dim=3).reshape(batch, channels, 2 * (frames - 1), height, width)
    return torch.cat([x[:, :, :1], later], dim=2)
