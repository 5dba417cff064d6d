"""BAAttProcessor: what diffusers calls inside a self-attention layer.

Compiled code reads two bools (`_sparse`, `_calibrating`) that the controller sets before each forward, plus values that
are the same in all layers and steps: a generation compiles at most three graphs.
"""

from typing import Any

import torch
import torch.nn.functional as F

from ..errors import UserInputError
from ..kernels.ba_att import (
    CANDIDATE_ORDERS,
    BAAttInfo,
    CustomSelection,
    ba_attention,
    calibrate_budgets,
    calibrate_orders,
    choose_orders,
)
from ..kernels.block_sparse import choose_backend, dense_attention
from .calibration import FALLBACK_ORDER
from .config import BAAttConfig
from .families import Family, Grid
from .timing import StageTimer

# Columns of the counters of a layer, int64, added up over the calls of one step.
COUNTERS = (
    "kept_pairs",
    "total_pairs",
    "kept_token_pairs",
    "total_token_pairs",
    "sparse_calls",
    "dense_calls",
    "broken_calls",  # sparse calls whose output holds NaN or infinity
    "listed_calls",  # dense calls that our own kernel did, with all blocks listed
)


class BAAttProcessor:
    """Attention processor that runs self-attention block-sparse after a dense warm-up.

    Give one to `pipe.set_attn_processor(...)` or `apply_sparse_attention(...)`: every self-attention layer then gets
    its own copy, bound to the layer's original processor, which keeps doing the dense calls. Cross-attention keeps its
    processors.

    Args:
        config: Settings; default `BAAttConfig()`.
        **options: Fields of `BAAttConfig`, instead of a config.

    Raises:
        UserInputError: a wrong setting, or both a config and options.
    """

    def __init__(self, config: BAAttConfig | None = None, **options: Any) -> None:
        if config is not None and not isinstance(config, BAAttConfig):
            raise UserInputError(f"config must be a BAAttConfig, got {type(config).__name__}")
        if config is not None and options:
            raise UserInputError(f"give a config or options, not both (got a config and {', '.join(options)})")
        self.config = BAAttConfig.from_dict(options) if config is None else config
        self._original: Any = None
        self._family: Family | None = None
        self._sparse = False
        self._calibrating = False
        # Name of the backend of dense calls where ours is the faster one, None where the original processor does them.
        self._dense_backend: str | None = None
        # Whether the calibration may do the dense call itself, as PyTorch's attention, and measure against its result.
        self._may_replace = False
        self._record = False
        self._grid: Grid = (0, 0, 0)
        # From the model's own token order to raster order and back, None where they are the same.
        self._to_raster: torch.Tensor | None = None
        self._from_raster: torch.Tensor | None = None
        self._selection: dict[str, Any] = {}
        self._attention: dict[str, Any] = {}
        # Updated in place: no wait for the device, and no new graph under torch.compile.
        self._counters = torch.zeros(len(COUNTERS), dtype=torch.int64)
        self._dense_counts = torch.zeros(len(COUNTERS), dtype=torch.int64)
        self._order_errors = torch.zeros(0)
        self._budget_errors = torch.zeros(0)
        # On the CPU on every device: the kernels read them without a wait (see `token_orders`).
        self._orders: torch.Tensor | None = None
        self._budgets: torch.Tensor | None = None
        self._timer: StageTimer | None = None
        self._mask: BAAttInfo | None = None
        self._backend: str | None = None
        self._backend_reason: str | None = None
        self._custom: CustomSelection | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.config!r})"

    @property
    def shared_budgets(self) -> torch.Tensor | None:
        """Blocks (H,) that the heads keep; None where all keep the same number, or a selection of its own decides."""
        return None if self._custom is not None else self._budgets

    # diffusers writes these two on whatever processor it finds. Dense calls go to the original, so it must have them.
    @property
    def _attention_backend(self) -> Any:
        return getattr(self._original, "_attention_backend", None)

    @_attention_backend.setter
    def _attention_backend(self, backend: Any) -> None:
        if self._original is not None:
            self._original._attention_backend = backend

    @property
    def _parallel_config(self) -> Any:
        return getattr(self._original, "_parallel_config", None)

    @_parallel_config.setter
    def _parallel_config(self, config: Any) -> None:
        if self._original is not None:
            self._original._parallel_config = config

    @torch.inference_mode(False)  # tensors made inside inference mode could not be updated outside it later
    def bind(
        self,
        original: Any,
        family: Family,
        *,
        heads: int,
        orders: tuple[int, ...] | None,
        share_blocks: bool,
        second_order: bool,
        record: bool,
    ) -> "BAAttProcessor":
        """Return a copy for one layer.

        Args:
            original: The processor that runs the dense calls: the one that the layer has now, if that is dense.
            family: Adapter of the model.
            heads: Heads of the layer.
            orders: Order ids of the heads where the config brings a table.
            share_blocks: Whether heads may keep different numbers of blocks.
            second_order: Whether this layer's block scores use the second-order term.
            record: Whether to keep the layer's last block mask.
        """
        config = self.config
        bound = type(self)(config)
        bound._original, bound._family, bound._record = original, family, record
        if config.calibrates:
            orders = (CANDIDATE_ORDERS.index(FALLBACK_ORDER),) * heads
            bound._order_errors = torch.zeros(heads, len(CANDIDATE_ORDERS) + 1)
        if orders is not None:
            bound._orders = torch.tensor(orders, device="cpu")
        if share_blocks:
            bound._budgets = torch.ones(heads, dtype=torch.int64, device="cpu")  # the controller knows how many
            if config.calibrates_budgets:
                bound._budget_errors = torch.zeros(heads, 3)
        bound._selection, bound._attention = kernel_arguments(
            config, second_order=second_order, text_tokens=family.text_tokens
        )
        return bound

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Attend; hidden states (B, L, C) in and out, in the dtype of the input."""
        if self._family is None:
            raise UserInputError(
                "BAAttProcessor cannot be set on a transformer directly: it needs to know the layer, the step and the "
                "token grid. Write pipe.set_attn_processor(BAAttProcessor()), or apply_sparse_attention(transformer)"
            )
        # A mask excludes single pairs, which whole blocks cannot.
        if self._sparse and attention_mask is None and encoder_hidden_states is None:
            return self._attend_sparse(self._family, attn, hidden_states, rotary_emb)
        plain = attention_mask is None and encoder_hidden_states is None
        own = self._dense_backend is not None or (self._calibrating and self._may_replace)
        if own and plain and not torch.is_grad_enabled():
            output = self._attend_dense(self._family, attn, hidden_states, rotary_emb)
        else:
            output = self._original(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)
            if self._calibrating and attention_mask is None:
                with torch.no_grad():
                    self._calibrate(*self._family.project(attn, hidden_states, rotary_emb))
        self._counters.add_(self._dense_counts)
        return output

    def _attend_sparse(self, family: Family, attn: Any, hidden_states: torch.Tensor, rotary_emb: Any) -> torch.Tensor:
        query, key, value = self._in_raster(*family.project(attn, hidden_states, rotary_emb))
        timer = None if self._timer is None or torch.compiler.is_compiling() else self._timer.stage
        attended, info = ba_attention(
            query,
            key,
            value,
            grid_thw=self._grid,
            orders=self.config.order if self._orders is None else self._orders,
            return_info=True,
            timer=timer,
            custom=self._custom,
            budgets=self.shared_budgets,
            **self._selection,
            **self._attention,
        )
        pairs = [info.kept_pairs, info.total_pairs, info.kept_token_pairs, info.total_token_pairs]
        one, none = torch.ones_like(info.kept_pairs), torch.zeros_like(info.kept_pairs)
        # One reduction instead of a look at each value: a sum is not finite if a term is not.
        broken = ~attended.detach().sum(dtype=torch.float32).isfinite()
        self._counters.add_(torch.stack([*pairs, one, none, broken.long(), none]).to(self._counters.device))
        if self._record:
            self._mask = info
        config = self.config
        choice = choose_backend(query, key, block_size=config.block_size, backend=config.backend)
        self._backend, self._backend_reason = choice.name, choice.reason
        attended = attended.transpose(1, 2)
        if self._from_raster is not None:
            attended = attended.index_select(1, self._from_raster)
        return family.output(attn, attended)

    def _attend_dense(self, family: Family, attn: Any, hidden_states: torch.Tensor, rotary_emb: Any) -> torch.Tensor:
        projected = family.project(attn, hidden_states, rotary_emb)
        query, key, value = (x.transpose(1, 2) for x in projected)
        if self._dense_backend is None:
            attended = F.scaled_dot_product_attention(query, key, value)
        else:
            fall_back = self.config.backend == "auto"
            attended, listed = dense_attention(query, key, value, backend=self._dense_backend, fall_back=fall_back)
            self._counters.add_(F.pad(listed.view(1), (len(COUNTERS) - 1, 0)).to(self._counters.device))
        attended = attended.transpose(1, 2)
        if self._calibrating:
            self._calibrate(*projected, None if family.num_text else attended)
        return family.output(attn, attended)

    def _in_raster(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Return tensors of the model, each (B, L, H, D), as (B, H, L, D) in raster order."""
        if self._to_raster is not None:
            tensors = tuple(x.index_select(1, self._to_raster) for x in tensors)
        return [x.transpose(1, 2) for x in tensors]

    def _calibrate(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dense: torch.Tensor | None = None
    ) -> None:
        """Measure orders and budgets; all (B, L, H, D), `dense` the attention of this call where it is known."""
        config = self.config
        tensors = self._in_raster(query, key, value)
        how: dict[str, Any] = {
            "dense": None if dense is None else self._in_raster(dense)[0],
            "grid_thw": self._grid,
            "compensate": config.compensate,
            "backend": config.backend,
            **self._selection,
        }
        orders: Any = config.order
        # The last columns count the calls, so that the mean over the branches of guidance needs no other state.
        if config.calibrates:
            errors = calibrate_orders(*tensors, **how)
            self._order_errors.add_(F.pad(errors, (0, 1), value=1.0).to(self._order_errors.device))
            orders = choose_orders(errors)
        if config.calibrates_budgets and self.shared_budgets is not None:
            errors = calibrate_budgets(*tensors, orders=orders, **how)
            self._budget_errors.add_(F.pad(errors, (0, 1), value=1.0).to(self._budget_errors.device))


def kernel_arguments(
    config: BAAttConfig, *, second_order: bool, text_tokens: tuple[int, int] = (0, 0)
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of `ba_attention` that a config stands for: those of the selection, and the others.

    Args:
        config: Settings.
        second_order: Whether the layer uses the second-order term (`BAAttConfig.second_order_in`).
        text_tokens: (prefix, suffix) counts of text tokens in the sequence.
    """
    prefix, suffix = text_tokens
    selection = {
        "density": config.kept,
        "block_size": config.block_size,
        "beta": config.second_order_weight,
        "center_keys": config.center_keys,
        "log_count": config.log_count,
        "descending": config.descending,
        "window": config.window,
        "second_order": second_order,
        "score": config.score,
        "text_prefix": prefix,
        "text_suffix": suffix,
    }
    attention = {
        "top_p": config.top_p,
        "min_density": config.min_density,
        "compensate": config.compensate,
        "backend": config.backend,
    }
    return selection, attention
