"""BA-Att: training-free block-sparse attention from block moments (arXiv 2605.19726), with our corrections.

One file per step: `ordering`, `statistics`, `scores`, `selection`; `attention` is the whole call, `calibration` picks
an order per head and `budget_calibration` its number of blocks, `reference` defines what all of it means.
"""

from .attention import BAAttInfo, ba_attention
from .budget_calibration import calibrate_budgets
from .budgets import LEVELS, blocks_of_level, budgets_of_levels, choose_budgets, measured_blocks
from .calibration import calibrate_orders, choose_orders
from .custom import CustomSelection
from .ordering import CANDIDATE_ORDERS, TokenOrders, default_window, gather_tokens, token_orders, undo_order
from .scores import SCORES, block_scores, halfk_scores, residual_scores
from .selection import block_mask, kept_blocks, kept_video_blocks, select_blocks, select_blocks_top_p
from .statistics import BlockStatistics, block_statistics

__all__ = [
    "CANDIDATE_ORDERS",
    "LEVELS",
    "SCORES",
    "BAAttInfo",
    "BlockStatistics",
    "CustomSelection",
    "TokenOrders",
    "ba_attention",
    "block_mask",
    "block_scores",
    "block_statistics",
    "blocks_of_level",
    "budgets_of_levels",
    "calibrate_budgets",
    "calibrate_orders",
    "choose_budgets",
    "choose_orders",
    "default_window",
    "gather_tokens",
    "halfk_scores",
    "kept_blocks",
    "kept_video_blocks",
    "measured_blocks",
    "residual_scores",
    "select_blocks",
    "select_blocks_top_p",
    "token_orders",
    "undo_order",
]
