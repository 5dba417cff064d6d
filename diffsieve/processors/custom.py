"""Puts an order or selection from outside into the layers of an applied BA-Att, in place of its own."""

from collections.abc import Callable
from typing import Any

from ..errors import UserInputError
from ..kernels.ba_att import CustomSelection
from .install import controllers_of


def use_custom_selection(pipeline_or_transformer: Any, make: Callable[[str], CustomSelection | None]) -> None:
    """Let every sparse layer use what `make` gives for it, until sparse attention is applied anew or removed.

    Warm-up, budget, gathers, attention and counts stay those of BA-Att: methods can be compared at equal density.
    Meant for eager runs.

    Args:
        pipeline_or_transformer: with `apply_sparse_attention` applied; its order must not be "auto" where `make` gives
            an order.
        make: told the layer, such as "transformer.blocks.3"; `None` keeps BA-Att's own steps.

    Raises:
        UserInputError: BA-Att is not applied, or it calibrates orders that would not be used.
    """
    controllers = controllers_of(pipeline_or_transformer)
    if not controllers:
        raise UserInputError("a custom selection needs BA-Att: call apply_sparse_attention(pipe, config) first")
    chosen = []
    for controller in controllers:
        for layer in controller.layers:
            custom = make(f"{controller.name}.{layer.name}")
            if custom is not None and custom.order is not None and controller.config.calibrates:
                raise UserInputError('order must not be "auto" beside a custom order, which would replace it')
            chosen.append((layer.processor, custom))
    for processor, custom in chosen:
        processor._custom = custom
