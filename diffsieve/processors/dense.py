"""Which dense calls of a transformer our own kernel does, in the place of the model's processors."""

from collections.abc import Iterable
from typing import Any

import torch

from ..kernels.block_sparse import dense_backend
from .config import BAAttConfig
from .families import Family


def backend_of_dense_calls(
    transformer: Any, hidden_states: torch.Tensor, tokens: int, config: BAAttConfig
) -> str | None:
    """Return the backend of the dense calls of a forward, None where the model's own processors are to do them.

    Ours takes them where it is measured to be faster than PyTorch's attention, and no gradient is wanted. Whether
    somebody chose another backend for all of diffusers is asked before (`chosen_backends`).

    Args:
        transformer: The model; its config gives the head dimension.
        hidden_states: Input of the forward: its device and dtype.
        tokens: Length of the sequence.
        config: Its `backend` other than "auto" is not replaced.
    """
    dim = getattr(transformer.config, "attention_head_dim", None)
    if hidden_states.device.type != "cuda" or dim is None or torch.is_grad_enabled():
        return None
    probe = torch.empty((1, 1, 1, dim), dtype=hidden_states.dtype, device=hidden_states.device)
    return dense_backend(probe, tokens, backend=config.backend)


def may_replace(family: Family, attn: Any, processor: Any) -> bool:
    """Whether the dense calls of a layer's processor are plain attention, and nobody chose a backend for it."""
    own = family.full_attention is not None or type(processor) is getattr(attn, "_default_processor_cls", None)
    return own and getattr(processor, "_attention_backend", None) is None


def chosen_backends(processors: Iterable[Any]) -> tuple[Any, ...]:
    """Return the attention backends that were chosen in diffusers: of the whole, then of each processor.

    That of the whole is "native", PyTorch's choice, where nobody chose another, and None where diffusers does not say.
    A processor without one of its own has None.
    """
    from diffusers.models import attention_dispatch

    registry = getattr(attention_dispatch, "_AttentionBackendRegistry", None)  # private: may move
    whole = None if registry is None else str(registry.get_active_backend()[0].value)
    return whole, *[getattr(processor, "_attention_backend", None) for processor in processors]
