"""Triton kernels of `norm_silu`; legend there. Import this module only where Triton exists."""

import triton
import triton.language as tl


@triton.jit
def norm_silu_fwd_kernel(  # type: ignore[no-untyped-def]
    X, GAMMA, OUT, rows, clip_rows, pad_rows, eps, C: tl.constexpr, BLOCK_R: tl.constexpr
):  # fmt: skip
    o_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_c = tl.arange(0, C)
    m_r = o_r < rows
    b_x = tl.load(X + o_r[:, None] * C + o_c[None, :], mask=m_r[:, None], other=0.0).to(tl.float32)  # [BR, C]
    b_gamma = tl.load(GAMMA + o_c).to(tl.float32)  # [C]
    b_scale = 1.0 / tl.sqrt(tl.sum(b_x * b_x, axis=1) / C + eps)
    b_y = b_x * b_scale[:, None] * b_gamma[None, :]
    b_out = b_y * (1.0 / (1.0 + tl.exp(-b_y)))
    # every clip starts with its frames of padding
    o_out = o_r + (o_r // clip_rows + 1) * pad_rows
    tl.store(OUT + o_out[:, None] * C + o_c[None, :], b_out.to(OUT.dtype.element_ty), mask=m_r[:, None])


@triton.jit
def norm_silu_bwd_kernel(  # type: ignore[no-untyped-def]
    X, GAMMA, GRAD, GRAD_X, GRAD_GAMMA, rows, clip_rows, pad_rows, eps, C: tl.constexpr, BLOCK_R: tl.constexpr
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0)
    o_c = tl.arange(0, C)
    b_gamma = tl.load(GAMMA + o_c).to(tl.float32)  # [C]
    b_grad_gamma = tl.zeros([C], dtype=tl.float32)
    for turn in range(tl.cdiv(rows, BLOCK_R * programs)):
        o_r = (pid + turn * programs) * BLOCK_R + tl.arange(0, BLOCK_R)
        m_r = o_r < rows
        o_x = o_r[:, None] * C + o_c[None, :]
        b_x = tl.load(X + o_x, mask=m_r[:, None], other=0.0).to(tl.float32)  # [BR, C]
        o_grad = o_r + (o_r // clip_rows + 1) * pad_rows
        b_grad = tl.load(GRAD + o_grad[:, None] * C + o_c[None, :], mask=m_r[:, None], other=0.0).to(tl.float32)
        b_scale = 1.0 / tl.sqrt(tl.sum(b_x * b_x, axis=1) / C + eps)
        b_hat = b_x * b_scale[:, None]
        b_y = b_hat * b_gamma[None, :]
        b_sigmoid = 1.0 / (1.0 + tl.exp(-b_y))
        b_grad_y = b_grad * b_sigmoid * (1.0 + b_y * (1.0 - b_sigmoid))
        b_grad_gamma += tl.sum(b_grad_y * b_hat, axis=0)
        b_grad_hat = b_grad_y * b_gamma[None, :]
        b_mean = tl.sum(b_grad_hat * b_hat, axis=1) / C
        b_grad_x = b_scale[:, None] * (b_grad_hat - b_hat * b_mean[:, None])
        tl.store(GRAD_X + o_x, b_grad_x.to(GRAD_X.dtype.element_ty), mask=m_r[:, None])
    tl.store(GRAD_GAMMA + pid * C + o_c, b_grad_gamma)
