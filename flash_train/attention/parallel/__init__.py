"""Attention over a packed row whose tokens several ranks hold. It needs torch.distributed; nothing else imports it."""

from flash_train.attention.parallel.method_choice import Cost, Method, Sizes, can_divide_heads, choose_method, costs
from flash_train.attention.parallel.row_plan import Piece, RowPlan, plan_row
from flash_train.attention.parallel.shared_attention import shared_attention
from flash_train.attention.parallel.shared_row import SharedRow

__all__ = [
    "Cost",
    "Method",
    "Piece",
    "RowPlan",
    "SharedRow",
    "Sizes",
    "can_divide_heads",
    "choose_method",
    "costs",
    "plan_row",
    "shared_attention",
]
