"""What BA-Att changes in a transformer: a processor per layer, a controller, a mailbox."""

from collections.abc import Callable

from torch import nn

from .ba_att import BAAttProcessor
from .calibration import check_levels, check_orders, read_levels, read_orders
from .clock import StepClock
from .config import BAAttConfig
from .controller import Layer, SparseController
from .mailbox import ContextMailbox
from .sites import find_sites, select_layers


def plan_ba_att(name: str, transformer: nn.Module, config: BAAttConfig) -> Callable[[StepClock], SparseController]:
    """Check everything, change nothing.

    Args:
        name: Of the transformer in its pipeline.
        config: Settings, held against the layers of the model.

    Returns:
        The installation, to be called once nothing is installed any more.

    Raises:
        UserInputError: the model is not supported, or the settings do not fit it.
    """
    family, sites = find_sites(name, transformer)
    dense = select_layers(sites, config.dense_layers, "dense_layers")
    recorded = select_layers(sites, config.record_masks, "record_masks")
    orders = levels = None
    heads = {site.name: int(site.attn.heads) for site in sites}
    if config.orders is not None:
        orders = check_orders(read_orders(config.orders, name), heads, optional=dense)
        if config.shares_blocks and (table := read_levels(config.orders, name)) is not None:
            levels = check_levels(table, heads, optional=dense)
    share_blocks = config.calibrates_budgets or levels is not None

    def install(clock: StepClock) -> SparseController:
        template = BAAttProcessor(config)
        layers = []
        for site in sites:
            original = site.attn.processor
            processor = template.bind(
                original if family.full_attention is None else family.full_attention(),
                family,
                heads=heads[site.name],
                orders=None if orders is None else orders.get(site.name, (0,) * heads[site.name]),
                share_blocks=share_blocks and heads[site.name] > 1,
                second_order=config.second_order_in(end=site.number == 0 or site.last),
                record=site.name in recorded,
            )
            site.attn.set_processor(processor)
            layers.append(Layer(site.name, site.attn, original, processor, site.name in dense))
        mailbox = ContextMailbox(transformer, transformer.get_submodule(sites[0].group), clock)
        return SparseController(name, transformer, family, layers, config, clock, mailbox, orders, levels)

    return install
