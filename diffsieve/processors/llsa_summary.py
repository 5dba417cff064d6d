"""What LLSA does in a model: levels and keys per query of the latest forward."""

from dataclasses import asdict, dataclass
from typing import Any

from ..kernels.llsa import resolve_levels
from ..kernels.llsa.levels import kept_per_level, level_lengths
from .llsa_config import LLSAConfig
from .llsa_controller import LLSAController


@dataclass(frozen=True)
class LLSASummary:
    """LLSA as the latest forward ran it.

    Attributes:
        tokens: Tokens of the sequence, None before the first forward.
        levels: Pooled levels, 0 where the sequence is shorter than a block and runs dense.
        tokens_per_level: From the raw tokens to the coarsest level.
        keys_per_query: Most keys that a query attends to: raw ones and pooled ones of all levels.
        density: keys_per_query / tokens.
        layers: Names of the layers that run LLSA.
        dense_layers: Names of the layers in which every query attends to all tokens.
        block_size: Tokens pooled into one.
        topk: Tokens kept per level.
        order: Token order.
        enrich, disjoint: The form of the attention.
        backend: Kernel of the latest forward, None before it or inside compiled code.
    """

    tokens: int | None
    levels: int | None
    tokens_per_level: tuple[int, ...]
    keys_per_query: int | None
    density: float | None
    layers: tuple[str, ...]
    dense_layers: tuple[str, ...]
    block_size: int
    topk: int | tuple[int, ...]
    order: str
    enrich: bool
    disjoint: bool
    backend: str | None

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    def __str__(self) -> str:
        return format_llsa_summary(self)


def llsa_summary(controllers: list[LLSAController]) -> LLSASummary:
    """Describe the transformers of one pipeline; sizes are those of the first that ran."""
    config = controllers[0].config
    tokens = next((c.tokens for c in controllers if c.tokens is not None), None)
    lengths = [] if tokens is None else _lengths(tokens, config)
    keys = None if tokens is None else keys_per_query(tokens, config)
    backends = [layer.processor._backend for c in controllers for layer in c.layers if layer.processor._backend]
    return LLSASummary(
        tokens=tokens,
        levels=None if tokens is None else len(lengths) - 1,
        tokens_per_level=tuple(lengths),
        keys_per_query=keys,
        density=None if tokens is None or keys is None else keys / tokens,
        layers=tuple(f"{c.name}.{layer.name}" for c in controllers for layer in c.layers),
        dense_layers=tuple(f"{c.name}.{layer.name}" for c in controllers for layer in c.dense),
        block_size=config.block_size,
        topk=config.topk,
        order=config.order,
        enrich=config.enrich,
        disjoint=config.disjoint,
        backend=next(iter(backends), None),
    )


def keys_per_query(tokens: int, config: LLSAConfig) -> int:
    """Return how many keys, raw and pooled, a query attends to at most.

    Of each level but the coarsest the children of what the level above keeps, of the coarsest all.
    """
    lengths = _lengths(tokens, config)
    if len(lengths) == 1:
        return tokens
    kept = kept_per_level(config.topk, lengths, config.block_size)
    per_level = [min(count * config.block_size, length) for count, length in zip(kept, lengths, strict=False)]
    return sum(per_level) + lengths[-1] if config.enrich else per_level[0]


def format_llsa_summary(summary: LLSASummary) -> str:
    """Return the summary as text for a terminal."""
    lines = [f"LLSA in {len(summary.layers)} layers ({len(summary.dense_layers)} dense)"]
    if summary.tokens is None:
        lines.append("  nothing has run yet")
    else:
        sizes = " > ".join(f"{n:,}" for n in summary.tokens_per_level)
        lines += [
            f"  tokens by level       {sizes} ({summary.levels} pooled levels, blocks of {summary.block_size})",
            f"  keys per query        {summary.keys_per_query:,} of {summary.tokens:,} ({summary.density:.1%})",
        ]
    lines.append(f"  kernel, order         {summary.backend or 'not recorded'}, {summary.order}")
    return "\n".join(lines)


def _lengths(tokens: int, config: LLSAConfig) -> list[int]:
    if tokens < config.block_size:
        return [tokens]
    return level_lengths(tokens, config.block_size, resolve_levels(config.levels, tokens, config.block_size))
