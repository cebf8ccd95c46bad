"""Which method takes less time for a row: a pure function of the plan and the sizes, so all ranks choose the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flash_train.attention.parallel.head_groups import head_groups
from flash_train.attention.parallel.row_plan import RowPlan

Method = Literal["auto", "gather", "ulysses"]

#: Measured on H100s. A slower link or GPU changes both methods' times alike, unless the link is the limit.
LINK = 250e9  # bytes per second that a rank receives over NVLink
RATE = 500e12  # FLOP per second of attention, forward and backward


@dataclass(frozen=True)
class Sizes:
    """Sizes of an attention: heads, elements of a head, and bytes of an element."""

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    element_bytes: int


@dataclass(frozen=True)
class Cost:
    """What a method costs in one layer, forward and backward, on the rank that it costs most.

    Attributes:
        received: bytes that the rank receives.
        exchange: seconds of its exchanges that no computation hides.
        attention: seconds of its attention.
    """

    received: int
    exchange: float
    attention: float

    @property
    def seconds(self) -> float:
        return self.exchange + self.attention


def choose_method(plan: RowPlan, sizes: Sizes) -> Method:
    """Return the method of the smaller cost; ``gather`` if both cost the same."""
    found = costs(plan, sizes)
    return min(found, key=lambda method: found[method].seconds)


def costs(plan: RowPlan, sizes: Sizes) -> dict[Method, Cost]:
    """Predict the cost of each method that the sizes allow.

    The exchange of one group of heads runs while another group is computed, so the first exchange always takes time,
    and the others do if they take longer than the attention.
    """
    found: dict[Method, Cost] = {"gather": _cost(_gathered(plan, sizes), plan.imbalance, plan, sizes)}
    if can_divide_heads(sizes.heads, sizes.kv_heads, plan.ranks):
        found["ulysses"] = _cost(_exchanged(plan, sizes), 1.0, plan, sizes)
    return found


def can_divide_heads(heads: int, kv_heads: int, ranks: int) -> bool:
    """Whether every rank can compute some of the heads: ranks divide heads, and divide kv_heads or are a multiple."""
    return kv_heads > 0 and heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


def _gathered(plan: RowPlan, sizes: Sizes) -> tuple[int, int]:
    """Return the bytes of `gather`, and its groups: keys and values twice, and their gradients."""
    once = plan.most_fetched * sizes.kv_heads * (sizes.head_dim + sizes.v_head_dim) * sizes.element_bytes
    return 3 * once, len(head_groups(sizes.heads, sizes.kv_heads, once))


def _exchanged(plan: RowPlan, sizes: Sizes) -> tuple[int, int]:
    """Return the bytes of `ulysses`, and its groups.

    q, k, v and the output travel in the forward; q, k, v, the output and its gradient, and then the gradients of q, k
    and v in the backward.
    """
    ranks, kv_heads = plan.ranks, max(sizes.kv_heads, plan.ranks)
    tokens = plan.seq_len // ranks * (ranks - 1) // ranks
    keys = kv_heads * (sizes.head_dim + sizes.v_head_dim)
    columns = 3 * (sizes.heads * (sizes.head_dim + sizes.v_head_dim) + keys)
    transfer = tokens * (sizes.heads * sizes.head_dim + keys) * sizes.element_bytes  # of q, k and v in the forward
    groups = head_groups(sizes.heads // ranks, kv_heads // ranks, transfer)
    return tokens * columns * sizes.element_bytes, len(groups)


def _cost(exchange: tuple[int, int], imbalance: float, plan: RowPlan, sizes: Sizes) -> Cost:
    received, groups = exchange
    pairs = imbalance * sum(plan.pairs) / plan.ranks
    # two products of each pair in the forward, five in the backward
    flops = pairs * sizes.heads * (2 * (sizes.head_dim + sizes.v_head_dim) + 6 * sizes.head_dim + 4 * sizes.v_head_dim)
    moved, computed = received / LINK, flops / RATE
    first = moved / groups
    return Cost(received, first + max(0.0, moved - first - computed), computed)
