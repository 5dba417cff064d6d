"""Inputs and assertions that kernel tests and benchmarks share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .block_sparse.reference import block_sparse_attention_reference, expand_block_mask

SEED = 20_250_119

LAYOUTS = ("contiguous", "blhd", "fused_qkv", "padded")


@dataclass(frozen=True)
class AttentionCase:
    """One problem of block-sparse attention.

    Args:
        batch, heads, kv_heads: B, H, Hkv.
        len_q, len_k: tokens.
        dim: head dimension.
        block_size: tokens per block.
        density: share of key blocks that a row keeps at most, in (0, 1]; at least one block.
        variable: draw a count from 0 to K per row; otherwise all K entries count.
        layout: memory order: "contiguous" (B, H, L, D), "blhd" (B, L, H, D) memory, "fused_qkv" slices of one
            (B, L, 3, H, D) tensor (falls back to "blhd" memory where shapes of query and key differ), "padded"
            the first L rows of a longer tensor whose remaining rows are NaN.
        gain: factor of query, key and value, which have unit variance otherwise.
    """

    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    len_q: int = 128
    len_k: int = 128
    dim: int = 64
    block_size: int = 64
    density: float = 0.5
    variable: bool = False
    layout: str = "contiguous"
    gain: float = 1.0

    def __str__(self) -> str:
        heads = f"H{self.heads}" if self.heads == self.kv_heads else f"H{self.heads}of{self.kv_heads}"
        length = f"L{self.len_q}" if self.len_q == self.len_k else f"L{self.len_q}x{self.len_k}"
        parts = [f"B{self.batch}-{heads}-{length}-D{self.dim}-b{self.block_size}-d{self.density:g}"]
        parts += ["counts"] if self.variable else []
        parts += [self.layout] if self.layout != "contiguous" else []
        parts += [f"x{self.gain:g}"] if self.gain != 1 else []
        return "-".join(parts)


@dataclass(frozen=True)
class AttentionInputs:
    """Tensors of an `AttentionCase`, named as the arguments of `block_sparse_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    block_index: Tensor
    block_count: Tensor | None

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        return self.query, self.key, self.value, self.block_index, self.block_count

    def floats_to(self, dtype: torch.dtype) -> AttentionInputs:
        """The same problem with query, key and value in another dtype."""
        return AttentionInputs(
            self.query.to(dtype), self.key.to(dtype), self.value.to(dtype), self.block_index, self.block_count
        )


def make_inputs(
    case: AttentionCase, *, dtype: torch.dtype, device: str | torch.device = "cpu", seed: int = SEED
) -> AttentionInputs:
    """Random inputs of a case: the same values for the same seed, dtype and device."""
    generator = torch.Generator(device).manual_seed(seed)
    query = _random(case, case.heads, case.len_q, dtype, generator)
    key = _random(case, case.kv_heads, case.len_k, dtype, generator)
    value = _random(case, case.kv_heads, case.len_k, dtype, generator)
    if case.layout == "fused_qkv" and query.shape == key.shape:
        query, key, value = torch.stack([x.transpose(1, 2) for x in (query, key, value)], dim=2).unbind(2)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    elif case.layout in ("blhd", "fused_qkv"):
        query, key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value))
    elif case.layout == "padded":
        query, key, value = (_with_nan_beyond(x) for x in (query, key, value))
    index, count = random_blocks(
        case.batch, case.heads, -(-case.len_q // case.block_size), -(-case.len_k // case.block_size),
        density=case.density, variable=case.variable, generator=generator,
    )  # fmt: skip
    return AttentionInputs(query, key, value, index, count)


def random_blocks(
    batch: int, heads: int, n_q: int, n_k: int, *, density: float, variable: bool, generator: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    """Random ascending lists `(B, H, Nq, K)` int32 with `K = max(1, round(density * Nk))`, and counts or None.

    With `variable`, counts are uniform in 0..K, and entries past the count are out of range on purpose.
    """
    device = generator.device
    kept = max(1, int(density * n_k + 0.5))
    order = torch.rand(batch, heads, n_q, n_k, generator=generator, device=device).argsort(-1)
    index = order[..., :kept]
    if not variable:
        return index.sort(-1).values.int(), None
    count = torch.randint(0, kept + 1, (batch, heads, n_q), generator=generator, device=device, dtype=torch.int32)
    beyond = torch.arange(kept, device=device) >= count[..., None]
    index = torch.where(beyond, n_k + 1_000, index).sort(-1).values
    return index.int(), count


def exact_attention(inputs: AttentionInputs, *, block_size: int, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of the reference in fp64, of the inputs as they are rounded."""
    exact = inputs.floats_to(torch.float64)
    scale = inputs.query.shape[-1] ** -0.5 if scale is None else scale
    return block_sparse_attention_reference(*exact.tensors(), block_size=block_size, scale=scale)


def masked_sdpa(inputs: AttentionInputs, *, block_size: int, scale: float | None = None) -> Tensor:
    """The same problem through PyTorch's own dense attention with the mask written out, in the dtype of the inputs.

    Rows without any kept key are set to 0, as in the reference.
    """
    query, key, value, index, count = inputs.tensors()
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    mask = expand_block_mask(index, count, len_q=query.shape[2], len_k=key.shape[2], block_size=block_size)
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    return out.masked_fill(~mask.any(dim=-1, keepdim=True), 0.0)


def error_ratio(actual: Tensor, expected: Tensor) -> float:
    """RMS(actual - expected) / RMS(expected) in fp64; infinite when `actual` is not finite everywhere."""
    if not bool(actual.isfinite().all()):
        return float("inf")
    expected = expected.double()
    norm = expected.square().mean().sqrt().item()
    error = (actual.double() - expected).square().mean().sqrt().item()
    return error if norm == 0.0 else error / norm


def error_bound(rounded: Tensor, expected: Tensor) -> float:
    """Largest `error_ratio` that a kernel may have: twice that of a trusted low-precision result, plus rounding.

    Args:
        rounded: result of PyTorch's attention in the dtype under test; its dtype sets the rounding term.
        expected: exact result.

    Returns:
        `2 * error_ratio(rounded, expected) + eps / 4`, eps the spacing of the dtype at 1: rounding the exact result
        to that dtype alone costs about `eps / 4` (uniform error of at most half a unit in the last place).
    """
    return 2 * error_ratio(rounded, expected) + torch.finfo(rounded.dtype).eps / 4


def one_key_bound(dtype: torch.dtype) -> float:
    """Largest `error_ratio` of an output where one key takes all of the weight in nearly every row (`gain` 200).

    The value of one key is a number of `dtype`, and PyTorch's attention without a mask gives it back: what is left of
    `error_bound` is its rounding term. With a mask PyTorch is no measure there, it is off by up to 0.07 on a GPU. At
    least 5e-4, as logits near 10^5 are themselves off by some 0.02, in fp32, which weighs in on the few rows in which
    two keys come that near to each other.
    """
    return max(torch.finfo(dtype).eps / 4, 5e-4)


def sampled_errors(inputs: AttentionInputs, out: Tensor, block_size: int, samples: int = 24) -> dict[str, float]:
    """`error_ratio` and `error_bound` of an output on some query blocks, for problems too large for a written-out mask.

    Query blocks are drawn at random, and the last one is among them; heads take turns. The trusted result in the
    dtype of the inputs is PyTorch's attention over the gathered keys. The error is infinite unless all of `out` is
    finite.
    """
    query, key, value, index, count = inputs.tensors()
    heads, len_q, len_k = query.shape[1], query.shape[2], key.shape[2]
    generator = torch.Generator().manual_seed(SEED)
    blocks = torch.randint(0, index.shape[2], (samples,), generator=generator)
    blocks[-1] = index.shape[2] - 1
    parts: dict[str, list[Tensor]] = {"exact": [], "dense": [], "ours": []}
    for sample, block in enumerate(blocks.tolist()):
        head = sample % heads
        kept = index[0, head, block].long()
        if count is not None:
            kept = kept[: int(count[0, head, block])]
            if kept.numel() == 0:
                continue
        tokens = (kept[:, None] * block_size + torch.arange(block_size, device=kept.device)).flatten()
        tokens = tokens[tokens < len_k]
        rows = slice(block * block_size, min((block + 1) * block_size, len_q))
        q, k, v = query[:1, head, rows], key[:1, head, tokens], value[:1, head, tokens]
        logits = q.double() @ k.double().transpose(1, 2) * q.shape[-1] ** -0.5
        parts["exact"].append(logits.softmax(-1) @ v.double())
        parts["dense"].append(scaled_dot_product_attention(q[None], k[None], v[None])[0])
        parts["ours"].append(out[:1, head, rows])
    exact, dense, ours = (torch.cat(parts[name], dim=1) for name in ("exact", "dense", "ours"))
    finite = bool(out.isfinite().all())
    return {
        "error": error_ratio(ours, exact) if finite else float("inf"),
        "bound": error_bound(dense, exact),
    }


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside, `torch.empty` and its relatives return memory full of NaN (or the largest integer)."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def lse_error(actual: Tensor, expected: Tensor) -> float:
    """Largest absolute difference over finite rows; infinite unless both are -inf in exactly the same rows."""
    finite = expected.isfinite()
    if not torch.equal(actual.isfinite(), finite) or bool((actual[~finite] != float("-inf")).any()):
        return float("inf")
    return (actual.double() - expected.double())[finite].abs().max().item() if bool(finite.any()) else 0.0


def lse_bound(rounded: Tensor, expected: Tensor) -> float:
    """Largest `lse_error` that a kernel may have: twice that of the fp32 reference, plus 4 roundings of the value."""
    finite = expected[expected.isfinite()]
    largest = finite.abs().max().item() if finite.numel() else 0.0
    return 2 * lse_error(rounded, expected) + 4 * torch.finfo(torch.float32).eps * (1.0 + largest)


def _random(case: AttentionCase, heads: int, length: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    x = torch.randn(case.batch, heads, length, case.dim, generator=generator, device=generator.device)
    return (x * case.gain).to(dtype)


def _with_nan_beyond(x: Tensor, rows: int = 40) -> Tensor:
    batch, heads, length, dim = x.shape
    longer = x.new_full((batch, heads, length + rows, dim), float("nan"))
    longer[:, :, :length] = x
    return longer[:, :, :length]
