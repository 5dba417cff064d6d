"""Which dense calls of a transformer our own kernel does, in the place of the model's processors."""

from typing import Any

import torch

from ..kernels.block_sparse import dense_backend
from .config import BAAttConfig
from .families import Family


def backend_of_dense_calls(
    transformer: Any, hidden_states: torch.Tensor, tokens: int, config: BAAttConfig
) -> str | None:
    """Return the backend of the dense calls of a forward, None where the model's own processors are to do them.

    Ours takes them where it is measured to be faster than PyTorch's attention, nobody chose another backend for all of
    diffusers, and no gradient is wanted.

    Args:
        transformer: The model; its config gives the head dimension.
        hidden_states: Input of the forward: its device and dtype.
        tokens: Length of the sequence.
        config: Its `backend` other than "auto" is not replaced.
    """
    dim = getattr(transformer.config, "attention_head_dim", None)
    if hidden_states.device.type != "cuda" or dim is None or torch.is_grad_enabled() or _another_is_chosen():
        return None
    probe = torch.empty((1, 1, 1, dim), dtype=hidden_states.dtype, device=hidden_states.device)
    return dense_backend(probe, tokens, backend=config.backend)


def may_replace(family: Family, attn: Any, processor: Any) -> bool:
    """Whether the dense calls of a layer's processor are plain attention, and nobody chose a backend for diffusers."""
    own = family.full_attention is not None or type(processor) is getattr(attn, "_default_processor_cls", None)
    return own and getattr(processor, "_attention_backend", None) is None and not _another_is_chosen()


def _another_is_chosen() -> bool:
    """Whether diffusers as a whole was told to use another backend than PyTorch's choice."""
    from diffusers.models import attention_dispatch

    registry = getattr(attention_dispatch, "_AttentionBackendRegistry", None)  # private: may move
    if registry is None:
        return True
    return str(registry.get_active_backend()[0].value) != "native"
