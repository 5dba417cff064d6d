"""Synthetic attention heads with known structure, to study orders and scores without a trained model.

A head is built from what is seen in video transformers: attention that falls with distance along each axis, content
that clusters, a bias common to all keys, tokens of different norm, and sinks. All of it is a fixed function of the
specification, the grid and the seed. 128 channels, 3-D rotary embedding over 44 / 42 / 42 channels for (frames, height,
width), theta 1e4.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from .ordering import Grid, TokenOrders, gather_tokens
from .statistics import split_blocks

__all__ = ["SYNTHETIC_HEADS", "SyntheticHead", "attention_by_block", "kept_mass", "synthetic_head"]

_DIM, _CONTENT_DIM, _AXIS_CHANNELS = 128, 24, (44, 42, 42)
_TOP_SHARE = 0.13
_SAMPLED_QUERIES = 384


@dataclass(frozen=True)
class SyntheticHead:
    """What a head attends to.

    Args:
        position: strength of attention to near tokens along frames, height, width.
        content: strength of attention to similar content.
        key_bias: size of the bias common to all keys.
        smooth_norm: spread (standard deviation of the log) of token norms, the part smooth over the grid.
        rough_norm: spread of the token norms from token to token; heavy-tailed from 0.2 on.
        noise: size of independent noise in queries and keys.
        top_share: attention mass that the top 13 % of the keys of a query hold, in (0, 1).
        sink: "none"; "big": 24 random keys attract all queries; "small": the same with a small norm; "frame": frame 0.
        sink_mass: attention mass of the sinks, in [0, 1).
    """

    position: tuple[float, float, float]
    content: float
    key_bias: float = 1.0
    smooth_norm: float = 0.15
    rough_norm: float = 0.05
    noise: float = 0.35
    top_share: float = 0.93
    sink: Literal["none", "big", "small", "frame"] = "none"
    sink_mass: float = 0.0


SYNTHETIC_HEADS = {
    "local3d": SyntheticHead((1.0, 1.3, 1.3), 0.6),
    "spatial": SyntheticHead((1.6, 0.7, 0.7), 0.6),
    "temporal": SyntheticHead((0.1, 1.7, 1.7), 0.5),
    "semantic": SyntheticHead((0.2, 0.3, 0.3), 1.6, smooth_norm=0.20, rough_norm=0.08, top_share=0.85),
    "diffuse": SyntheticHead((0.3, 0.4, 0.4), 0.8, smooth_norm=0.20, rough_norm=0.08, noise=0.6, top_share=0.55),
    "heavynorm": SyntheticHead((0.5, 0.6, 0.6), 1.0, 1.5, 0.30, 0.35, 0.4, 0.85),
    "sinkbig": SyntheticHead((0.6, 0.8, 0.8), 0.8, rough_norm=0.08, top_share=0.88, sink="big", sink_mass=0.35),
    "sinksmall": SyntheticHead((0.6, 0.8, 0.8), 0.8, rough_norm=0.08, top_share=0.88, sink="small", sink_mass=0.35),
    "firstframe": SyntheticHead((0.5, 0.8, 0.8), 0.8, rough_norm=0.08, top_share=0.88, sink="frame", sink_mass=0.30),
    "noisy_early": SyntheticHead((0.7, 0.9, 0.9), 0.6, smooth_norm=0.10, rough_norm=0.10, noise=1.0, top_share=0.75),
}


def synthetic_head(
    head: str | SyntheticHead, grid_thw: Grid, *, flat: bool = False, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make one head.

    Args:
        head: a name of `SYNTHETIC_HEADS` or a specification.
        grid_thw: (frames, height, width), L tokens in all.
        flat: give all tokens nearly the same norm (both spreads 0).
        seed: start of the random generator; a named head adds its position in the table.

    Returns:
        query, key (rotated) and value, (1, 1, L, 128) fp32 on the CPU each.
    """
    if isinstance(head, str):
        seed = 1000 * seed + list(SYNTHETIC_HEADS).index(head)
        head = SYNTHETIC_HEADS[head]
    if flat:
        head = replace(head, smooth_norm=0.0, rough_norm=0.0)
    rng = torch.Generator(device="cpu").manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng, device="cpu")

    frequency, axis = _pairs()
    angles = _angles(grid_thw, frequency, axis)
    length = angles.shape[0]

    query, key = (pairs.repeat(length, 1) for pairs in _biases(head, frequency, axis, rng))
    content = 0.55 * _fields(_CONTENT_DIM, 3.0, grid_thw, rng)
    segment = _fields(14, 3.2, grid_thw, rng).argmax(dim=1)
    content = content + 0.75 * normal(14, _CONTENT_DIM)[segment]
    content = content / content.std()
    weight = torch.where(frequency < 0.05, 1.0, 0.35).repeat_interleave(2) * (0.5 * normal(_DIM)).exp() * head.content
    to_key = normal(_CONTENT_DIM, _DIM) / _CONTENT_DIM**0.5
    to_query = 0.75 * to_key + 0.66 * normal(_CONTENT_DIM, _DIM) / _CONTENT_DIM**0.5
    query = query + content @ (to_query * weight) + 0.6 * head.noise * normal(length, _DIM)
    key = key + content @ (to_key * weight) + 0.6 * head.noise * normal(length, _DIM)
    query = query * _token_norms(head, grid_thw, rng)[:, None]
    key = key * _token_norms(head, grid_thw, rng)[:, None]
    value = content @ normal(_CONTENT_DIM, _DIM) / _CONTENT_DIM**0.5 + 0.5 * normal(length, _DIM)

    sample = torch.randperm(length, generator=rng)[:_SAMPLED_QUERIES]
    rotated_query = _rotate(query, angles)
    logits = rotated_query[sample] @ _rotate(key, angles).T / _DIM**0.5
    top = max(1, round(_TOP_SHARE * length))

    def share_of_top(factor: float) -> float:
        return torch.softmax(logits * factor, dim=-1).topk(top, dim=-1).values.sum(dim=-1).mean().item()

    factor = _bisect(share_of_top, head.top_share, 0.02, 40.0) ** 0.5
    query, key = query * factor, key * factor
    if head.sink != "none":
        key = _add_sinks(head, query, key, frequency, angles, grid_thw, sample, rng)
    rotated = [_rotate(query, angles), _rotate(key, angles), value]
    return rotated[0][None, None], rotated[1][None, None], rotated[2][None, None]


def attention_by_block(query: torch.Tensor, key: torch.Tensor, order: TokenOrders, block_size: int) -> torch.Tensor:
    """Compute exactly how much attention each query block pays to each key block.

    Args:
        query: (B, H, L, D).
        key: (B, H, L, D).
        order: permutations of `token_orders`.
        block_size: tokens per block.

    Returns:
        (B, H, Nq, Nk): sum over the block's queries; the whole sums to L per batch item and head.
    """
    scaled = gather_tokens(query, order.query) * query.shape[-1] ** -0.5
    ordered_key = gather_tokens(key, order.key)
    rows = []
    for block in scaled.split(block_size, dim=2):
        mass = torch.softmax(block @ ordered_key.transpose(-1, -2), dim=-1).sum(dim=2)  # (B, H, L)
        whole, tail = split_blocks(mass[..., None], block_size)
        sums = [whole.sum(dim=(-1, -2))]
        if tail.shape[2]:
            sums.append(tail.sum(dim=(-1, -2))[..., None])
        rows.append(torch.cat(sums, dim=-1))
    return torch.stack(rows, dim=2)


def kept_mass(mass: torch.Tensor, block_index: torch.Tensor) -> float:
    """Return the recall: the share of `attention_by_block` inside the kept blocks (B, H, Nq, K), in [0, 1]."""
    return (mass.gather(-1, block_index.long()).sum() / mass.sum()).item()


def _pairs() -> tuple[torch.Tensor, torch.Tensor]:
    """Angular frequency per token step and axis (0, 1, 2) of each of the 64 channel pairs."""
    frequency = [1e4 ** (-2.0 * pair / size) for size in _AXIS_CHANNELS for pair in range(size // 2)]
    axis = [number for number, size in enumerate(_AXIS_CHANNELS) for _ in range(size // 2)]
    return torch.tensor(frequency), torch.tensor(axis)


def _angles(grid_thw: Grid, frequency: torch.Tensor, axis: torch.Tensor) -> torch.Tensor:
    coordinates = torch.meshgrid(*(torch.arange(size, dtype=torch.float32) for size in grid_thw), indexing="ij")
    position = torch.stack([coordinate.flatten() for coordinate in coordinates], dim=1)  # (L, 3)
    return position[:, axis] * frequency


def _rotate(tokens: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    even, odd = tokens[:, 0::2], tokens[:, 1::2]
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(1)


def _fields(count: int, alpha: float, grid_thw: Grid, rng: torch.Generator) -> torch.Tensor:
    """Random fields with power spectrum ~ |k|^-alpha, mean 0 and standard deviation 1 each, (L, count)."""
    doubled = [2 * size for size in grid_thw]  # cropped later, so that opposite borders do not match
    noise = torch.randn((count, *doubled), generator=rng, device="cpu")
    axes = torch.meshgrid(*(torch.fft.fftfreq(size) * size for size in doubled), indexing="ij")
    wave = torch.stack(axes).norm(dim=0)
    field = torch.fft.ifftn(torch.fft.fftn(noise, dim=(1, 2, 3)) * (wave + 1.5) ** (-alpha / 2), dim=(1, 2, 3)).real
    field = field[:, : grid_thw[0], : grid_thw[1], : grid_thw[2]].flatten(1)
    return ((field - field.mean(dim=1, keepdim=True)) / field.std(dim=1, keepdim=True)).T


def _biases(
    head: SyntheticHead, frequency: torch.Tensor, axis: torch.Tensor, rng: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Constant parts of queries and keys before rotation, (128,) each: locality in fast pairs, bias in slow ones."""
    pairs = frequency.shape[0]
    spread, key_spread, query_spread = (torch.randn(pairs, generator=rng) for _ in range(3))
    phase, key_phase, query_phase = (2 * torch.pi * torch.rand(pairs, generator=rng) for _ in range(3))
    offset = torch.randn(3, generator=rng) * torch.tensor([0.5, 1.0, 1.0])
    local = (frequency > 0.02) & (frequency < 2)
    slow = frequency < 0.02
    near = torch.tensor(head.position)[axis] * (0.6 * spread).exp() * local
    query = torch.polar(near, phase) + torch.polar(0.7 * (0.8 * query_spread).exp() * slow, query_phase)
    key = torch.polar(near, phase + frequency * offset[axis])
    key = key + torch.polar(head.key_bias * key_spread.exp() * slow, key_phase)
    return torch.view_as_real(query).flatten(), torch.view_as_real(key).flatten()


def _token_norms(head: SyntheticHead, grid_thw: Grid, rng: torch.Generator) -> torch.Tensor:
    smooth = _fields(1, 3.0, grid_thw, rng)[:, 0]
    length = smooth.shape[0]
    rough = torch.randn(length, generator=rng)
    if head.rough_norm >= 0.2:  # Student's t with 4 degrees of freedom
        chi2 = torch.randn(4, length, generator=rng).square().mean(dim=0)
        rough = (0.8 * rough / chi2.sqrt()).clamp(-6, 6)
    return (head.smooth_norm * smooth + head.rough_norm * rough).exp()


def _add_sinks(
    head: SyntheticHead,
    query: torch.Tensor,
    key: torch.Tensor,
    frequency: torch.Tensor,
    angles: torch.Tensor,
    grid_thw: Grid,
    sample: torch.Tensor,
    rng: torch.Generator,
) -> torch.Tensor:
    if head.sink == "frame":
        sinks = torch.arange(grid_thw[1] * grid_thw[2])
    else:
        sinks = torch.randperm(key.shape[0], generator=rng)[:24]
    if head.sink == "small":
        key = key.index_copy(0, sinks, 0.35 * key[sinks])
    common = query.mean(dim=0) * (frequency < 0.02).repeat_interleave(2)
    direction = common / common.norm()
    sampled = _rotate(query[sample], angles[sample]) / _DIM**0.5
    logits = sampled @ _rotate(key, angles).T
    gain = sampled @ _rotate(direction.repeat(len(sinks), 1), angles[sinks]).T

    def mass(strength: float) -> float:
        moved = logits.index_add(1, sinks, strength * gain)
        return torch.softmax(moved, dim=-1)[:, sinks].sum(dim=-1).mean().item()

    return key.index_add(0, sinks, _bisect(mass, head.sink_mass, 0.0, 400.0) * direction.repeat(len(sinks), 1))


def _bisect(rising: Callable[[float], float], target: float, low: float, high: float) -> float:
    for _ in range(30):
        middle = (low + high) / 2
        if rising(middle) < target:
            low = middle
        else:
            high = middle
    return (low + high) / 2
