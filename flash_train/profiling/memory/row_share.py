"""What one device holds, sends and receives of a row that several devices share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from flash_train.attention.parallel import RowPlan, plan_row


@dataclass(frozen=True)
class RowShare:
    """Counts of rows, a row being one token's keys or values.

    Args:
        keys: that the device's attention call reads; a token that two of its pieces see counts twice.
        sent, received: that the device sends to others and receives from them.
        largest: the most that any device receives.
    """

    keys: int
    sent: int
    received: int
    largest: int


@cache
def plan_of(lengths: tuple[int, ...], row_tokens: int, ranks: int) -> RowPlan:
    return plan_row(lengths, row_tokens, ranks)


@cache
def largest_share(lengths: tuple[int, ...], row_tokens: int, ranks: int) -> RowShare:
    """Return the share of the device that needs the most memory, for documents of these lengths."""
    plan = plan_of(lengths, row_tokens, ranks)
    keys, sent, received = max((_share(plan, rank) for rank in range(ranks)), key=sum)
    return RowShare(keys, sent, received, plan.most_fetched)


def _share(plan: RowPlan, rank: int) -> tuple[int, int, int]:
    """Count the keys, the sent and the received rows of a device. A query sees all tokens before it."""
    own, sent = plan.attending(rank), 0
    for other in range(plan.ranks):
        ends: dict[int, int] = {}  # where the tokens end that the other device sees, by document
        for piece in plan.attending(other) if other != rank else ():
            ends[piece.document] = max(piece.stop, ends.get(piece.document, 0))
        sent += sum(max(0, min(piece.stop, ends.get(piece.document, 0)) - piece.start) for piece in own)
    return sum(piece.stop for piece in own), sent, plan.fetched(rank)
