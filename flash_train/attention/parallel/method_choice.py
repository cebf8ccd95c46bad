"""Which method takes less time for a row: a pure function of the plan and the sizes, so all ranks choose the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from flash_train.attention.parallel.head_groups import HeadGroup, head_groups
from flash_train.attention.parallel.row_plan import RowPlan, count_pairs

#: how devices that share a row divide attention; "auto" takes the faster one
Method = Literal["auto", "gather", "ulysses"]

#: Measured on H100s. A slower link or GPU changes both methods' times alike, unless the link is the limit.
LINK = 250e9  # bytes per second that a rank receives over NVLink
RATE = 500e12  # FLOP per second of attention, forward and backward
BUSY = 1 / 8  # of a GPU's processors run NCCL's kernel during an exchange


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
        exchange: seconds that its exchanges add, because nothing hides them or they occupy processors.
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

    The exchange of one group of heads overlaps the attention of another group. Only the rank's whole documents can hide
    the first group's exchange and the return of the last group's results. All other exchanges slow the attention down,
    because NCCL occupies processors; if they take longer than the attention, the rest of their time is not hidden.
    """
    least_whole = min(sum(count_pairs(p, plan.window) for p in plan.whole(rank)) for rank in range(plan.ranks))
    found: dict[Method, Cost] = {"gather": _cost(_gathered(plan, sizes), plan.imbalance, plan, sizes, least_whole)}
    if can_divide_heads(sizes.heads, sizes.kv_heads, plan.ranks):
        found["ulysses"] = _cost(_exchanged(plan, sizes), 1.0, plan, sizes, 0)
    return found


def can_divide_heads(heads: int, kv_heads: int, ranks: int) -> bool:
    """Whether every rank can compute some of the heads: ranks divide heads, and divide kv_heads or are a multiple."""
    return kv_heads > 0 and heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


class _Exchange(NamedTuple):
    """Bytes that a rank receives, and how many of them travel while nothing is computed."""

    received: float
    exposed: float


def _gathered(plan: RowPlan, sizes: Sizes) -> _Exchange:
    """Return the exchange of `gather`: keys and values twice, and their gradients."""
    kv_heads = sizes.kv_heads
    once = plan.most_fetched * kv_heads * (sizes.head_dim + sizes.v_head_dim) * sizes.element_bytes
    forward, backward = (head_groups(sizes.heads, kv_heads, once, sends_results=way) for way in (False, True))
    exposed = sum(_share(group, kv_heads) for group in (forward[0], backward[0], backward[-1]))
    return _Exchange(3 * once, exposed * once)


def _exchanged(plan: RowPlan, sizes: Sizes) -> _Exchange:
    """Return the exchange of `ulysses`.

    q, k, v and the output travel in the forward; q, k, v, the output and its gradient, and then the gradients of q, k
    and v in the backward.
    """
    ranks, kv_heads = plan.ranks, max(sizes.kv_heads, plan.ranks)
    row_bytes = plan.seq_len // ranks * (ranks - 1) // ranks * sizes.element_bytes
    keys = kv_heads * (sizes.head_dim + sizes.v_head_dim)
    q, out = sizes.heads * sizes.head_dim, sizes.heads * sizes.v_head_dim
    fetched, results = row_bytes * (2 * (q + keys) + 2 * out), row_bytes * (out + q + keys)
    forward = row_bytes * (q + keys)
    groups = head_groups(sizes.heads // ranks, kv_heads // ranks, forward, sends_results=True)
    first, last = (_share(group, kv_heads // ranks) for group in (groups[0], groups[-1]))
    return _Exchange(fetched + results, first * fetched + last * results)


def _share(group: HeadGroup, kv_heads: int) -> float:
    return (group.kv_heads.stop - group.kv_heads.start) / kv_heads


def _cost(exchange: _Exchange, imbalance: float, plan: RowPlan, sizes: Sizes, whole: int) -> Cost:
    """Return the cost for a rank with this many pairs of whole documents."""
    # two products of each pair in the forward, five in the backward
    flops = sizes.heads * (2 * (sizes.head_dim + sizes.v_head_dim) + 6 * sizes.head_dim + 4 * sizes.v_head_dim)
    computed = imbalance * sum(plan.pairs) / plan.ranks * flops / RATE
    exposed = max(0.0, exchange.exposed / LINK - whole * flops / RATE)
    others = exchange.received / LINK - exposed
    return Cost(int(exchange.received), exposed + max(BUSY * others, others - computed), computed)
