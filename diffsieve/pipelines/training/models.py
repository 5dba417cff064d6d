"""Builders of the mini-wan parts: stock diffusers and transformers classes at small sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .config import FRAMES_PER_LATENT, PIXELS_PER_LATENT, ModelConfig

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanTransformer3DModel
    from transformers import UMT5EncoderModel

VAE_PATCH = 2


def build_vae(config: ModelConfig) -> AutoencoderKLWan:
    """Autoencoder with 4 times temporal and 8 times spatial compression, half of the latter by a pixel patch of 2.

    The patch makes it four times cheaper than convolutions at full resolution.
    """
    from diffusers import AutoencoderKLWan

    channels = 3 * VAE_PATCH**2
    return AutoencoderKLWan(
        base_dim=config.vae_base_dim,
        z_dim=config.latent_channels,
        dim_mult=list(config.vae_dim_mult),
        num_res_blocks=config.vae_res_blocks,
        temperal_downsample=[True, True],
        in_channels=channels,
        out_channels=channels,
        patch_size=VAE_PATCH,
        scale_factor_temporal=FRAMES_PER_LATENT,
        scale_factor_spatial=PIXELS_PER_LATENT,
        latents_mean=[0.0] * config.latent_channels,
        latents_std=[1.0] * config.latent_channels,
    )


def build_transformer(config: ModelConfig) -> WanTransformer3DModel:
    """Transformer with one token per latent position."""
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        patch_size=(1, 1, 1),
        num_attention_heads=config.heads,
        attention_head_dim=config.head_dim,
        in_channels=config.latent_channels,
        out_channels=config.latent_channels,
        text_dim=config.text_dim,
        ffn_dim=config.ffn_dim,
        num_layers=config.layers,
        cross_attn_norm=True,
        rope_max_seq_len=config.rope_max_seq_len,
    )


def build_text_encoder(config: ModelConfig, vocabulary_size: int) -> UMT5EncoderModel:
    """Text encoder; no dropout, so that a training step depends on its seed alone."""
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(
        UMT5Config(
            vocab_size=vocabulary_size,
            d_model=config.text_dim,
            d_kv=config.text_head_dim,
            d_ff=config.text_ffn_dim,
            num_layers=config.text_layers,
            num_heads=config.text_heads,
            dropout_rate=0.0,
            pad_token_id=0,
            eos_token_id=1,
        )
    )


def build_scheduler(config: ModelConfig) -> UniPCMultistepScheduler:
    """Second-order flow scheduler as in the published Wan pipelines: few steps suffice."""
    from diffusers import UniPCMultistepScheduler

    return UniPCMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=config.flow_shift,
        num_train_timesteps=1000,
        solver_order=2,
    )


def embed_text(
    text_encoder: UMT5EncoderModel, token_ids: torch.Tensor, attention_mask: torch.Tensor, length: int
) -> torch.Tensor:
    """Caption embeddings with zeros past each caption's end, as `WanPipeline` makes them.

    The pipeline pads the ids first and blanks the embeddings of the padding afterwards. Padded keys are masked inside
    the encoder, so encoding at a short length and padding the result is the same and cheaper.

    Args:
        token_ids: (B, S) int64.
        attention_mask: (B, S), 1 for words.
        length: Padded length, at least S.

    Returns:
        (B, length, text_dim).
    """
    embeddings = text_encoder(token_ids, attention_mask).last_hidden_state
    embeddings = embeddings * attention_mask.unsqueeze(-1).to(embeddings.dtype)
    return torch.nn.functional.pad(embeddings, (0, 0, 0, length - embeddings.shape[1]))


def latent_statistics(vae: AutoencoderKLWan, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and spread of the latents from the autoencoder's configuration, each (1, C, 1, 1, 1), placed as `like`."""
    mean = torch.tensor(vae.config.latents_mean, device=like.device, dtype=like.dtype)
    std = torch.tensor(vae.config.latents_std, device=like.device, dtype=like.dtype)
    return mean.view(1, -1, 1, 1, 1), std.view(1, -1, 1, 1, 1)
