"""Full attention in a model that attends sparsely by itself: what its sparse attention is compared with."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import UserInputError
from .families import find_family
from .install import transformers_of
from .llsa_config import LLSAConfig
from .sites import find_sites
from .watch import CONTROLLER


@contextmanager
def full_attention(pipeline_or_transformer: Any) -> Iterator[None]:
    """Let every query see all tokens inside a `with` block; afterwards the model attends as before.

    Does nothing to a model whose own processors are dense, and to one without an adapter. Sparse attention may be
    applied and removed inside the block.

    Raises:
        UserInputError: sparse attention is applied already.
    """
    replaced: list[tuple[Any, Any, Any]] = []
    for name, transformer in transformers_of(pipeline_or_transformer):
        family = find_family(transformer)
        if family is None or family.full_attention is None:
            continue
        if CONTROLLER in transformer.__dict__:
            raise UserInputError(f"{name} must not have sparse attention: call remove_sparse_attention(pipe) first")
        make = family.full_attention
        replaced += [(site.attn, site.attn.processor, make()) for site in find_sites(name, transformer)[1]]
    try:
        for attn, _, processor in replaced:
            attn.set_processor(processor)
        yield
    finally:
        for attn, before, _ in replaced:
            attn.set_processor(before)


def trained_llsa(pipeline_or_transformer: Any) -> LLSAConfig | None:
    """Return the settings of LLSA that a model attends by itself with, None for a model that does not.

    Args:
        pipeline_or_transformer: A pipeline, or one of its transformers; the first that has such settings counts.
    """
    for _, transformer in transformers_of(pipeline_or_transformer):
        family = find_family(transformer)
        fields = family.trained(transformer) if family is not None and family.trained is not None else None
        if fields is not None:
            return LLSAConfig.from_dict(fields)
    return None
