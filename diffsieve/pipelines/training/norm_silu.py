"""RMS norm, SiLU and causal padding of a residual block in one pass over the memory, for training on a GPU.

The stock layers make about ten passes in float32, which cost more time than the convolutions between them. A compiler
can fuse them too, but takes half a minute for each clip size.

Legend: B clips, C channels, T frames, R = B T H W rows of C neighbouring values, P frames of padding.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

_EPS = 1e-12
_BLOCK_ROWS = 64
_BACKWARD_PROGRAMS = 132 * 8


def norm_silu_pad_reference(x: torch.Tensor, gamma: torch.Tensor, pad_frames: int) -> torch.Tensor:
    """`silu(gamma x / rms(x))` with `pad_frames` frames of zeros before it.

    Args:
        x: (B, C, T, H, W).
        gamma: (C,).
        pad_frames: P, at least 0.

    Returns:
        (B, C, P + T, H, W) in the dtype of `x`; computed in float32, rms over the channels.
    """
    wide = x.float()
    scale = (wide.square().mean(dim=1, keepdim=True) + _EPS).rsqrt()
    out = F.silu(wide * scale * gamma.float().view(1, -1, 1, 1, 1)).to(x.dtype)
    return F.pad(out, (0, 0, 0, 0, pad_frames, 0))


def norm_silu_pad(x: torch.Tensor, gamma: torch.Tensor, pad_frames: int) -> torch.Tensor:
    """As the reference, fused. Needs `x` on a GPU (or the Triton interpreter) and C a power of 2.

    The result lies in memory with the channels innermost.
    """
    return _NormSiluPad.apply(x, gamma, pad_frames)


class _NormSiluPad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gamma: torch.Tensor, pad_frames: int) -> torch.Tensor:
        from .norm_silu_kernels import norm_silu_fwd_kernel

        x = x.contiguous(memory_format=torch.channels_last_3d)
        batch, channels, frames, height, width = x.shape
        out = x.new_empty((batch, frames + pad_frames, height, width, channels)).permute(0, 4, 1, 2, 3)
        out[:, :, :pad_frames].zero_()
        rows, clip_rows = batch * frames * height * width, frames * height * width
        grid = ((rows + _BLOCK_ROWS - 1) // _BLOCK_ROWS,)
        norm_silu_fwd_kernel[grid](
            x, gamma, out, rows, clip_rows, pad_frames * height * width, _EPS, C=channels, BLOCK_R=_BLOCK_ROWS
        )
        ctx.save_for_backward(x, gamma)
        ctx.pad_frames = pad_frames
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        from .norm_silu_kernels import norm_silu_bwd_kernel

        x, gamma = ctx.saved_tensors
        grad = grad.contiguous(memory_format=torch.channels_last_3d)
        batch, channels, frames, height, width = x.shape
        rows, clip_rows = batch * frames * height * width, frames * height * width
        programs = min(_BACKWARD_PROGRAMS, (rows + _BLOCK_ROWS - 1) // _BLOCK_ROWS)
        grad_x = torch.empty_like(x, memory_format=torch.channels_last_3d)
        grad_gamma = torch.empty(programs, channels, device=x.device, dtype=torch.float32)
        norm_silu_bwd_kernel[(programs,)](
            x,
            gamma,
            grad,
            grad_x,
            grad_gamma,
            rows,
            clip_rows,
            ctx.pad_frames * height * width,
            _EPS,
            C=channels,
            BLOCK_R=_BLOCK_ROWS,
        )
        return grad_x, grad_gamma.sum(0).to(gamma.dtype).view_as(gamma), None
