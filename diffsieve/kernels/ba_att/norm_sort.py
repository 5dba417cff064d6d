"""Norms of tokens, and stable sorts by them inside windows.

Shapes: B batch, H heads, L tokens, D channels.
"""

import torch

from .statistics import heads_at_once

__all__ = ["mean_key", "sort_keys", "sort_windows", "token_norms"]

_LARGEST = 0x7FFFFFFF


def sort_windows(norm: torch.Tensor, window: int, descending: bool) -> torch.Tensor:
    """Sort tokens by their norm inside consecutive windows.

    A GPU sorts windows of up to 4,096 tokens without leaving its chip.

    Args:
        norm: (B, H, L), none negative.
        window: tokens per window; the last one may be short.
        descending: largest first.

    Returns:
        int64 (B, H, L), the argsort. Norms are compared in fp32 and equal ones keep their order; NaN is the largest.
    """
    length = norm.shape[-1]
    keys = sort_keys(norm, descending)
    if window >= length:
        return torch.sort(keys, dim=-1, stable=True).indices
    # What fills up the last window is the largest key there is; among equals the earlier stays first.
    missing = -length % window
    keys = torch.nn.functional.pad(keys, (0, missing), value=_LARGEST).unflatten(-1, (-1, window))
    first = torch.arange(0, length + missing, window, device=norm.device)
    return (torch.sort(keys, dim=-1, stable=True).indices + first[:, None]).flatten(-2)[..., :length]


def sort_keys(norm: torch.Tensor, descending: bool) -> torch.Tensor:
    """Return int32 keys to be sorted upwards, of norms (...) that are not negative.

    The bits of a non-negative float ascend with its value, those of NaN lie above infinity.
    """
    bits = norm.float().view(torch.int32).bitwise_and(_LARGEST)
    return _LARGEST - bits if descending else bits


def token_norms(tokens: torch.Tensor, centre: torch.Tensor | None = None) -> torch.Tensor:
    """Return the distance of each token (B, H, L, D) from `centre` (B, H, 1, D): (B, H, L) fp32 (fp64 for fp64)."""
    dtype = torch.promote_types(tokens.dtype, torch.float32)
    if centre is None:
        return torch.linalg.vector_norm(tokens, dim=-1, dtype=dtype)
    at_once = heads_at_once(tokens)
    chunks = zip(tokens.split(at_once, dim=1), centre.split(at_once, dim=1), strict=True)
    return torch.cat([torch.linalg.vector_norm(x - c, dim=-1, dtype=dtype) for x, c in chunks], dim=1)


def mean_key(key: torch.Tensor) -> torch.Tensor:
    """Return the mean (B, H, 1, D) of keys (B, H, L, D), fp32 (fp64 for fp64)."""
    return key.mean(dim=2, keepdim=True, dtype=torch.promote_types(key.dtype, torch.float32))
