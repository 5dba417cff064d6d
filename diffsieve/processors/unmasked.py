"""What self-attention processors have no answer to."""

import torch

from ..errors import UserInputError


def check_unmasked(encoder_hidden_states: torch.Tensor | None, attention_mask: torch.Tensor | None) -> None:
    """Refuse the inputs of cross-attention and of masked attention.

    Raises:
        UserInputError: one of them is given.
    """
    if attention_mask is None and encoder_hidden_states is None:
        return
    what = "attention_mask" if attention_mask is not None else "encoder_hidden_states"
    raise UserInputError(f"{what} must be None: this is unmasked self-attention")
