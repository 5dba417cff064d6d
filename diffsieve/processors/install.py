"""Put sparse attention into a pipeline or transformer, and take it out again."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import UserInputError
from .ba_att import BAAttProcessor
from .calibration import LayerOrders, check_orders, read_orders
from .clock import StepClock
from .config import BAAttConfig
from .controller import PARALLEL_MESSAGE, Layer, SparseController
from .families import Family, find_family, self_attention_layers, supported_models
from .mailbox import ContextMailbox

logger = logging.getLogger(__name__)

TRANSFORMERS = ("transformer", "transformer_2")
# Components that a foreign processor given to `pipe.set_attn_processor` is passed on to.
_DENOISERS = (*TRANSFORMERS, "unet")
_ATTRIBUTE = "_diffsieve_controller"


@dataclass(frozen=True)
class _Site:
    """A self-attention layer before anything is installed."""

    name: str  # "blocks.3"
    group: str  # "blocks"
    number: int  # 3
    last: bool
    attn: Any


@dataclass(frozen=True)
class _Plan:
    """One transformer that passed all checks."""

    name: str
    transformer: nn.Module
    family: Family
    sites: list[_Site]
    dense: set[str]
    orders: LayerOrders | None


def apply_sparse_attention(pipeline_or_transformer: Any, config: BAAttConfig | BAAttProcessor | None = None) -> None:
    """Replace the self-attention processors of a pipeline or transformer by block-sparse ones.

    A pipeline is the better argument: its scheduler tells the step, and both transformers of Wan 2.2 share one clock.
    Everything is checked before anything is changed. Applying again replaces the settings. Cross-attention, weights and
    the pipeline's config stay untouched.

    Args:
        pipeline_or_transformer: A diffusers pipeline, or one of its transformers (compiled or not).
        config: Settings, or a `BAAttProcessor` that carries them; default `BAAttConfig()`.

    Raises:
        UserInputError: no transformer, no adapter for its family, a model under parallelism, or settings that do not
            fit the model.
    """
    if isinstance(config, BAAttProcessor):
        config = config.config
    elif config is None:
        config = BAAttConfig()
    elif not isinstance(config, BAAttConfig):
        raise UserInputError(f"config must be a BAAttConfig or BAAttProcessor, got {type(config).__name__}")
    plans = [_plan(name, module, config) for name, module in transformers_of(pipeline_or_transformer)]
    remove_sparse_attention(pipeline_or_transformer)
    clock = StepClock(None if isinstance(pipeline_or_transformer, nn.Module) else pipeline_or_transformer)
    for plan in plans:
        _install(plan, config, clock)


def remove_sparse_attention(pipeline_or_transformer: Any) -> None:
    """Give every layer the very processor object that it had before. Does nothing where nothing is applied.

    Raises:
        UserInputError: the argument is no pipeline with a transformer and no transformer.
    """
    for _, transformer in transformers_of(pipeline_or_transformer):
        controller = transformer.__dict__.pop(_ATTRIBUTE, None)
        if controller is not None:
            controller.remove()


@contextmanager
def sparse_attention(
    pipeline_or_transformer: Any, config: BAAttConfig | BAAttProcessor | None = None
) -> Iterator[None]:
    """Sparse attention inside a `with` block; afterwards everything is as before it."""
    before = [controller.config for controller in controllers_of(pipeline_or_transformer)]
    apply_sparse_attention(pipeline_or_transformer, config)
    try:
        yield
    finally:
        if before:
            apply_sparse_attention(pipeline_or_transformer, before[0])
        else:
            remove_sparse_attention(pipeline_or_transformer)


def controllers_of(pipeline_or_transformer: Any) -> list[SparseController]:
    """Return the controllers of the transformers that have sparse attention applied."""
    found = (module.__dict__.get(_ATTRIBUTE) for _, module in transformers_of(pipeline_or_transformer))
    return [controller for controller in found if controller is not None]


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
            f"which has none; supported: {_supported()}"
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

    A `BAAttProcessor` is put into every self-attention layer, as by `apply_sparse_attention(pipe, processor)`. Any
    other processor, or dict of processors, ends sparse attention and goes to `set_attn_processor` of each denoiser.
    """
    if isinstance(processor, BAAttProcessor):
        apply_sparse_attention(self, processor)
        return
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


def _plan(name: str, transformer: nn.Module, config: BAAttConfig) -> _Plan:
    family = find_family(transformer)
    if family is None:
        raise UserInputError(
            f"{name} must belong to a supported family, got {type(transformer).__name__}; supported: {_supported()}"
        )
    if getattr(transformer, "_parallel_config", None) is not None:
        raise UserInputError(PARALLEL_MESSAGE)
    sites = _sites(transformer, family)
    dense = _select(sites, config.dense_layers, "dense_layers")
    _select(sites, config.record_masks, "record_masks")
    orders = None
    if config.orders is not None:
        heads = {site.name: int(site.attn.heads) for site in sites}
        orders = check_orders(read_orders(config.orders, name), heads, optional=dense)
    return _Plan(name, transformer, family, sites, dense, orders)


def _install(plan: _Plan, config: BAAttConfig, clock: StepClock) -> None:
    recorded = _select(plan.sites, config.record_masks, "record_masks")
    template = BAAttProcessor(config)
    layers = []
    for site in plan.sites:
        original = site.attn.processor
        if isinstance(original, BAAttProcessor):  # set on the transformer directly: it never could run
            original = site.attn._default_processor_cls()
        ends = site.number == 0 or site.last
        second_order = config.cov_layers == "all" or (config.cov_layers == "ends" and ends)
        processor = template.bind(
            original,
            plan.family,
            heads=int(site.attn.heads),
            orders=None if plan.orders is None else plan.orders.get(site.name, (0,) * int(site.attn.heads)),
            second_order=second_order,
            record=site.name in recorded,
        )
        site.attn.set_processor(processor)
        layers.append(Layer(site.name, site.attn, original, processor, site.name in plan.dense))
    mailbox = ContextMailbox(plan.transformer, plan.transformer.get_submodule(plan.sites[0].group), clock)
    controller = SparseController(plan.name, plan.transformer, plan.family, layers, config, clock, mailbox, plan.orders)
    plan.transformer.__dict__[_ATTRIBUTE] = controller


def _sites(transformer: nn.Module, family: Family) -> list[_Site]:
    found = []
    for path, attn in self_attention_layers(transformer, family):
        match = re.match(r"(.+)\.(\d+)\.", path)
        assert match is not None, path
        found.append((match.group(1), int(match.group(2)), attn))
    last = {group: number for group, number, _ in found}
    return [_Site(f"{group}.{number}", group, number, number == last[group], attn) for group, number, attn in found]


def _select(sites: list[_Site], numbers: tuple[int, ...], field: str) -> set[str]:
    """Return the names of the layers with these numbers in any list of blocks; negative numbers count from the end."""
    sizes: dict[str, int] = {}
    for site in sites:
        sizes[site.group] = max(sizes.get(site.group, 0), site.number + 1)
    selected = set()
    for number in numbers:
        hits = {site.name for site in sites if site.number == (number if number >= 0 else sizes[site.group] + number)}
        if not hits:
            raise UserInputError(f"{field} must name layers of the model ({max(sizes.values())} layers), got {number}")
        selected |= hits
    return selected


def _unwrapped(module: nn.Module) -> nn.Module:
    return getattr(module, "_orig_mod", module)


def _supported() -> str:
    return ", ".join(f"{row['transformers']} ({row['pipelines']})" for row in supported_models())
