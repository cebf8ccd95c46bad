"""What one device holds, sends and receives of a row that several devices share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from flash_train.attention.parallel import RowPlan, plan_row


@dataclass(frozen=True)
class RowShare:
    """Counts of tokens, as far as attention on one device is concerned.

    Args:
        shared: tokens on the device that belong to shared documents.
        pieces: pieces of shared documents on the device, at least 1; each is an entry of their attention call.
        keys: keys that this call reads; a key that two pieces read counts twice.
        sent, received: tokens whose keys and values the device sends to others, and receives from them.
        calls: (tokens, entries) of each attention call for whole documents; the last call includes the padding.
        largest: the most tokens that any device receives.
    """

    shared: int
    pieces: int
    keys: int
    sent: int
    received: int
    calls: tuple[tuple[int, int], ...]
    largest: int


@cache
def plan_of(lengths: tuple[int, ...], row_tokens: int, ranks: int) -> RowPlan:
    return plan_row(lengths, row_tokens, ranks)


@cache
def largest_share(lengths: tuple[int, ...], row_tokens: int, ranks: int) -> RowShare:
    """Return the share of the device that needs the most memory, for documents of these lengths."""
    plan = plan_of(lengths, row_tokens, ranks)
    shares = [_share(plan, rank) for rank in range(ranks)]
    return max(shares, key=lambda share: share.keys + share.sent + share.received)


def _share(plan: RowPlan, rank: int) -> RowShare:
    """Count the rows of a device. A query sees all tokens before it."""
    own, sent = plan.parts(rank), 0
    for other in range(plan.ranks):
        ends: dict[int, int] = {}  # where the tokens end that the other device sees, by document
        for piece in plan.parts(other) if other != rank else ():
            ends[piece.document] = max(piece.stop, ends.get(piece.document, 0))
        sent += sum(max(0, min(piece.stop, ends.get(piece.document, 0)) - piece.start) for piece in own)
    shared = sum(map(len, own))
    calls = plan.calls_for_whole(rank)
    rows = [sum(map(len, pieces)) for pieces in calls]
    if calls:  # padding belongs to the last one
        rows[-1] = plan.seq_len // plan.ranks - shared - sum(rows[:-1])
    keys = sum(piece.stop for piece in own)
    entries = [max(1, len(pieces)) for pieces in calls]
    sizes = tuple(zip(rows, entries, strict=True))
    return RowShare(shared, max(1, len(own)), keys, sent, plan.fetched(rank), sizes, plan.most_fetched)
