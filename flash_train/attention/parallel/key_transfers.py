"""Plans the transfers of method `gather`: which keys a rank sends, receives and reads. Pure in the row's plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flash_train.attention.parallel.row_plan import RowPlan


@dataclass(frozen=True)
class KeyTransfers:
    """One rank's transfers of keys and values, for the documents that it shares. All arrays are int64.

    Rows are numbered as the rank stores them; the first ``tokens`` are the ones of shared documents.

    Attributes:
        send: for each rank, this rank's rows that the other one reads, by position in the row; empty for itself.
        receive: for each rank, the number of rows that this rank gets from it.
        keys: the rows that the attention call reads as its keys. Numbers below ``tokens`` are the rank's own rows; the
            received rows follow in the order of the ranks.
        cu_seqlens_q, cu_seqlens_k: boundaries of the call's entries. Each piece of a shared document is an entry; a
            rank without such pieces has one empty entry.
        origins: (entries, 3): the document, the first query and the first key of each entry.
        tokens: number of this rank's rows of shared documents.
        largest: the number of rows that the rank with the most of them receives.
    """

    send: tuple[np.ndarray, ...]
    receive: tuple[int, ...]
    keys: np.ndarray
    cu_seqlens_q: np.ndarray
    cu_seqlens_k: np.ndarray
    origins: np.ndarray
    tokens: int
    largest: int

    @property
    def sent_rows(self) -> int:
        return sum(map(len, self.send))

    @property
    def key_lists(self) -> np.ndarray:
        """For each received row, the keys of the call that are this row, as lists of ``sum_rows``."""
        received = np.flatnonzero(self.keys >= self.tokens)
        return lists_by_target(self.keys[received] - self.tokens, received, sum(self.receive))

    @property
    def gradient_lists(self) -> np.ndarray:
        """For each of this rank's rows of shared documents, its gradients, as lists of ``sum_rows``.

        The source is the gradients of the call's keys, followed by those that come back for the sent rows. So a list
        has the rank's own gradients first; the other ranks' gradients follow in the order of the ranks.
        """
        own = np.flatnonzero(self.keys < self.tokens)
        targets = np.concatenate([self.keys[own], *self.send])
        return lists_by_target(targets, np.concatenate([own, len(self.keys) + np.arange(self.sent_rows)]), self.tokens)


def lists_by_target(targets: np.ndarray, sources: np.ndarray, count: int) -> np.ndarray:
    """Collect the sources of each target.

    Args:
        targets, sources: int64 (pairs,); a target is below ``count``.

    Returns:
        int64 (slots, count): column i holds the sources of target i in the order in which they are given, then -1.
    """
    order = np.argsort(targets, kind="stable")
    targets, sources = targets[order], sources[order]
    slots = np.arange(len(targets)) - np.searchsorted(targets, targets)
    lists = np.full((int(slots.max(initial=0)) + 1, count), -1, np.int64)
    lists[slots, targets] = sources
    return lists


def plan_transfers(plan: RowPlan, rank: int) -> KeyTransfers:
    """Return the transfers of one rank for a row."""
    owner, local = np.empty(plan.seq_len, np.int64), np.empty(plan.seq_len, np.int64)
    for other in range(plan.ranks):
        owner[plan.positions(other)], local[plan.positions(other)] = other, np.arange(plan.seq_len // plan.ranks)
    needed = [_needed(plan, other, owner) for other in range(plan.ranks)]

    pieces = plan.parts(rank)
    tokens = sum(map(len, pieces))
    received = needed[rank][np.argsort(owner[needed[rank]], kind="stable")]
    row_of = local.copy()  # position in the row -> row of the call's keys; of use for own and received ones only
    row_of[received] = tokens + np.arange(len(received))
    keys = [row_of[plan.begins[p.document] + np.arange(plan.first_key(p), p.stop)] for p in pieces]
    return KeyTransfers(
        send=tuple(local[rows[owner[rows] == rank]] for rows in needed),
        receive=tuple(int((owner[received] == other).sum()) for other in range(plan.ranks)),
        keys=np.concatenate(keys or [np.empty(0, np.int64)]),
        cu_seqlens_q=np.cumsum([0, *map(len, pieces)] if pieces else [0, 0]),
        cu_seqlens_k=np.cumsum([0, *map(len, keys)] if pieces else [0, 0]),
        origins=np.array([(p.document, p.start, plan.first_key(p)) for p in pieces] or [(0, 0, 0)], np.int64),
        tokens=tokens,
        largest=max(map(len, needed)),
    )


def _needed(plan: RowPlan, rank: int, owner: np.ndarray) -> np.ndarray:
    """Return the positions of the row that a rank's queries see and that other ranks hold, ascending."""
    seen = np.zeros(plan.seq_len, bool)
    for piece in plan.attending(rank):
        begin = plan.begins[piece.document]
        seen[begin + plan.first_key(piece) : begin + piece.stop] = True
    return np.flatnonzero(seen & (owner != rank))
