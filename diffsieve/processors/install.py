"""Put sparse attention into a pipeline or transformer, and take it out again."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..errors import UserInputError
from .ba_att import BAAttProcessor
from .ba_att_plan import plan_ba_att
from .clock import StepClock
from .config import BAAttConfig
from .controller import SparseController
from .llsa import LLSAProcessor
from .llsa_config import LLSAConfig
from .llsa_controller import LLSAController, plan_llsa
from .sites import reset_misplaced, supported_text
from .watch import CONTROLLER

TRANSFORMERS = ("transformer", "transformer_2")
# Components that a foreign processor given to `pipe.set_attn_processor` is passed on to.
_DENOISERS = (*TRANSFORMERS, "unet")

Settings = BAAttConfig | BAAttProcessor | LLSAConfig | LLSAProcessor
Controller = SparseController | LLSAController


def apply_sparse_attention(pipeline_or_transformer: Any, config: Settings | None = None) -> None:
    """Replace the self-attention processors of a pipeline or transformer by sparse ones.

    A pipeline is the better argument: its scheduler tells the step, and both transformers of Wan 2.2 share one clock.
    Everything is checked before anything is changed. Applying again replaces the settings. Cross-attention, weights and
    the pipeline's config stay untouched.

    Args:
        pipeline_or_transformer: A diffusers pipeline, or one of its transformers (compiled or not).
        config: Settings, or a processor that carries them; default `BAAttConfig()`. An `LLSAConfig` is for models
            trained with LLSA, or to train them.

    Raises:
        UserInputError: no transformer, no adapter for its family, a model under parallelism, or settings that do not
            fit the model.
    """
    if isinstance(config, BAAttProcessor | LLSAProcessor):
        config = config.config
    elif config is None:
        config = BAAttConfig()
    elif not isinstance(config, BAAttConfig | LLSAConfig):
        raise UserInputError(
            f"config must be a BAAttConfig, BAAttProcessor, LLSAConfig or LLSAProcessor, got {type(config).__name__}"
        )
    installs: list[tuple[nn.Module, Callable[[StepClock], Controller]]] = []
    for name, transformer in transformers_of(pipeline_or_transformer):
        if isinstance(config, LLSAConfig):
            known = isinstance(transformer.__dict__.get(CONTROLLER), LLSAController)
            installs.append((transformer, plan_llsa(name, transformer, config, warn=not known)))
        else:
            installs.append((transformer, plan_ba_att(name, transformer, config)))
    remove_sparse_attention(pipeline_or_transformer)
    clock = StepClock(None if isinstance(pipeline_or_transformer, nn.Module) else pipeline_or_transformer)
    for transformer, install in installs:
        reset_misplaced(transformer, (BAAttProcessor, LLSAProcessor))
        transformer.__dict__[CONTROLLER] = install(clock)


def remove_sparse_attention(pipeline_or_transformer: Any) -> None:
    """Give every layer the very processor object that it had before. Does nothing where nothing is applied.

    Raises:
        UserInputError: the argument is no pipeline with a transformer and no transformer.
    """
    for _, transformer in transformers_of(pipeline_or_transformer):
        controller = transformer.__dict__.pop(CONTROLLER, None)
        if controller is not None:
            controller.remove()


@contextmanager
def sparse_attention(pipeline_or_transformer: Any, config: Settings | None = None) -> Iterator[None]:
    """Sparse attention inside a `with` block; afterwards everything is as before it."""
    before = [controller.config for controller in _all_controllers(pipeline_or_transformer)]
    apply_sparse_attention(pipeline_or_transformer, config)
    try:
        yield
    finally:
        if before:
            apply_sparse_attention(pipeline_or_transformer, before[0])
        else:
            remove_sparse_attention(pipeline_or_transformer)


def controllers_of(pipeline_or_transformer: Any) -> list[SparseController]:
    """Return the controllers of the transformers that have BA-Att applied."""
    return [c for c in _all_controllers(pipeline_or_transformer) if isinstance(c, SparseController)]


def llsa_controllers_of(pipeline_or_transformer: Any) -> list[LLSAController]:
    """Return the controllers of the transformers that have LLSA applied."""
    return [c for c in _all_controllers(pipeline_or_transformer) if isinstance(c, LLSAController)]


def transformers_of(pipeline_or_transformer: Any) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of the transformers, with wrappers of torch.compile taken off.

    Raises:
        UserInputError: there is none.
    """
    if isinstance(pipeline_or_transformer, nn.Module):
        return [("transformer", _unwrapped(pipeline_or_transformer))]
    components = ((name, getattr(pipeline_or_transformer, name, None)) for name in TRANSFORMERS)
    found = [(name, _unwrapped(module)) for name, module in components if isinstance(module, nn.Module)]
    if not found:
        raise UserInputError(
            f"expected a pipeline with a transformer or a transformer, got {type(pipeline_or_transformer).__name__}, "
            f"which has none; supported: {supported_text()}"
        )
    return found


def add_pipeline_methods() -> None:
    """Add `set_attn_processor` and `sparsity_summary` to the pipeline base classes of diffusers, once.

    The one change that diffsieve makes to classes of diffusers. A method that diffusers defines itself stays.
    """
    from diffusers import DiffusionPipeline, ModularPipeline

    for base in (DiffusionPipeline, ModularPipeline):
        for method in (set_attn_processor, _sparsity_summary):
            name = method.__name__.lstrip("_")
            if not hasattr(base, name):
                setattr(base, name, method)


def set_attn_processor(self: Any, processor: Any) -> None:
    """Set the attention processor of the pipeline's denoisers.

    A `BAAttProcessor` or `LLSAProcessor` is put into every self-attention layer, as by
    `apply_sparse_attention(pipe, processor)`. Any other processor, or dict of processors, ends sparse attention and
    goes to `set_attn_processor` of each denoiser.
    """
    if isinstance(processor, BAAttProcessor | LLSAProcessor):
        apply_sparse_attention(self, processor)
        return
    if not isinstance(processor, dict) and (isinstance(processor, type) or not callable(processor)):
        raise UserInputError(f"processor must be an attention processor or a dict of them, got {processor!r}")
    denoisers: list[Any] = [getattr(self, name, None) for name in _DENOISERS]
    denoisers = [module for module in denoisers if hasattr(module, "set_attn_processor")]
    if not denoisers:
        raise UserInputError(f"{type(self).__name__} has no component with set_attn_processor")
    if any(isinstance(getattr(self, name, None), nn.Module) for name in TRANSFORMERS):
        remove_sparse_attention(self)
    for module in denoisers:
        # Models empty the dict that they are given.
        module.set_attn_processor(dict(processor) if isinstance(processor, dict) else processor)


def _sparsity_summary(self: Any) -> Any:
    """Return what sparse attention did in the latest generation; see `diffsieve.sparsity_summary`."""
    from .summary import sparsity_summary

    return sparsity_summary(self)


def _all_controllers(pipeline_or_transformer: Any) -> list[Controller]:
    found = (module.__dict__.get(CONTROLLER) for _, module in transformers_of(pipeline_or_transformer))
    return [controller for controller in found if controller is not None]


def _unwrapped(module: nn.Module) -> nn.Module:
    return getattr(module, "_orig_mod", module)
