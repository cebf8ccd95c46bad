"""Which tokens of a row each rank holds, if several ranks share the row: a pure function of the document lengths.

Every rank holds the same number of tokens and nearly the same number of attended pairs. Most documents stay whole on
one rank, so that their attention needs no communication. Only the longest are split, each over all ranks. A split
document is cut into 2 * ranks chunks, and each rank holds a chunk i and the chunk 2 * ranks - 1 - i: early queries see
few keys and late ones many, so each such pair of chunks has the same number of pairs (as in Llama 3, arXiv:2407.21783,
3.3.2). Pieces start at multiples of 16 tokens of their document where possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import attrgetter

import numpy as np

from flash_train.attention.parallel.row_division import CUT, Piece, RowDivision, Shares, count_pairs, in_order

BALANCED = 1.01  #: largest over mean number of pairs below which no further document is split


@dataclass(frozen=True)
class RowPlan:
    """The pieces of a row that each rank holds.

    Attributes:
        lengths: tokens of each document; the documents lie one after the other in the row.
        seq_len: tokens of the row. Those past the last document are padding, which attends to nothing.
        pieces: for each rank, its pieces in the order in which it stores them: parts of documents, whole documents, and
            padding, as pieces of the document ``len(lengths)``. See ``in_order``.
        window: a query sees its own token and this many before it; None: all before it.
    """

    lengths: tuple[int, ...]
    seq_len: int
    pieces: tuple[tuple[Piece, ...], ...]
    window: int | None = None

    @property
    def ranks(self) -> int:
        return len(self.pieces)

    def attending(self, rank: int) -> tuple[Piece, ...]:
        """Return the rank's pieces without padding."""
        return tuple(piece for piece in self.pieces[rank] if piece.document < len(self.lengths))

    def parts(self, rank: int) -> tuple[Piece, ...]:
        """Return the rank's pieces of documents that it shares with other ranks."""
        return tuple(piece for piece in self.attending(rank) if len(piece) < self.lengths[piece.document])

    def whole(self, rank: int) -> tuple[Piece, ...]:
        """Return the documents that the rank holds whole."""
        return tuple(piece for piece in self.attending(rank) if len(piece) == self.lengths[piece.document])

    @cached_property
    def is_local(self) -> bool:
        """Whether no rank shares a document with another, so that nothing travels."""
        return not any(map(self.parts, range(self.ranks)))

    def calls_for_whole(self, rank: int) -> tuple[tuple[Piece, ...], ...]:
        """Return the rank's whole documents in two parts with about half of the pairs each.

        With one document, or if the row ``is_local``, there is one part. Without documents there is an empty part if
        the rank has padding, and none otherwise.
        """
        whole, has_padding = self.whole(rank), len(self.attending(rank)) < len(self.pieces[rank])
        if len(whole) < 2 or self.is_local:
            return (whole,) if whole or has_padding else ()
        pairs = np.cumsum([count_pairs(piece, self.window) for piece in whole])
        middle = 1 + int(np.abs(pairs[:-1] - pairs[-1] / 2).argmin())
        return whole[:middle], whole[middle:]

    def first_key(self, piece: Piece) -> int:
        """Return the first position of the document whose key the piece needs, a multiple of 16."""
        return 0 if self.window is None else max(0, piece.start - self.window) // CUT * CUT

    def fetched(self, rank: int) -> int:
        """Count the keys that the rank's queries see and other ranks hold; one that several pieces see counts once."""
        total = 0
        for _, pieces in groupby(sorted(self.attending(rank)), attrgetter("document")):
            end = 0
            for piece in pieces:  # in the order of the document
                total += piece.stop - max(end, self.first_key(piece)) - len(piece)
                end = piece.stop
        return total

    @cached_property
    def most_fetched(self) -> int:
        """The keys that the rank with the most of them fetches."""
        return max(self.fetched(rank) for rank in range(self.ranks))

    def positions(self, rank: int) -> np.ndarray:
        """Return the positions in the row of the rank's tokens, int64 (seq_len / ranks,)."""
        return self._positions[rank]

    @cached_property
    def _positions(self) -> list[np.ndarray]:
        begins = self.begins
        return [
            np.concatenate(
                [np.arange(begins[p.document] + p.start, begins[p.document] + p.stop) for p in pieces]
                or [np.empty(0, np.int64)]
            )
            for pieces in self.pieces
        ]

    @cached_property
    def begins(self) -> tuple[int, ...]:
        """The row's position of each document's first token, and of the padding's."""
        return tuple(np.cumsum([0, *self.lengths]).tolist())

    @cached_property
    def pairs(self) -> tuple[int, ...]:
        """The (query, key) pairs that attend, for each rank and one head."""
        return tuple(sum(count_pairs(p, self.window) for p in self.attending(rank)) for rank in range(self.ranks))

    @property
    def imbalance(self) -> float:
        """The largest number of pairs of a rank over the mean; 1.0 is perfect balance."""
        mean = sum(self.pairs) / self.ranks
        return max(self.pairs) / mean if mean else 1.0

    @property
    def is_aligned(self) -> bool:
        """Whether every piece starts at a multiple of 16 tokens of its document."""
        return all(p.start % CUT == 0 for rank in range(self.ranks) for p in self.attending(rank))


def plan_row(lengths: Sequence[int], seq_len: int, ranks: int, window: int | None = None) -> RowPlan:
    """Divide a row among ranks.

    The plan is aligned (``RowPlan.is_aligned``) if the search finds such a plan. A document's tail, its last
    ``length % 16`` tokens, cannot be cut then. So each rank needs tails and padding that fit into ``seq_len / ranks``
    tokens and have the same remainder modulo 16. Suppose that all tails together fit into one rank. Then the search
    finds an aligned plan if ``seq_len / ranks`` is a multiple of 16, or if the padding has ``15 * (ranks - 1)`` tokens
    or more. With two ranks it finds one whenever there is one. With more it can miss one that exists, because the ranks
    choose their tails one after the other. If it finds none, documents are cut at any token.

    Args:
        lengths: tokens of the row's documents, each 1 or more, in order.
        seq_len: tokens of the row, a multiple of ``ranks``; what the documents leave is padding.
        ranks: number of ranks that share the row.
        window: a query sees this many tokens before it; None: all.

    Raises:
        ValueError: lengths that do not fit the row, a negative window, or a row that the ranks do not divide.
    """
    if ranks < 1 or seq_len % ranks:
        raise ValueError(f"seq_len={seq_len}: must be a multiple of the {ranks} ranks that share a row")
    if window is not None and window < 0:
        raise ValueError(f"window={window}: must be 0 or more, or None")
    lengths = tuple(int(length) for length in lengths)
    if not lengths or min(lengths) < 1 or sum(lengths) > seq_len:
        raise ValueError(
            f"lengths={list(lengths)}: must be one document or more, each of 1 token or more, and together at most "
            f"{seq_len} tokens"
        )
    shares = _divide(RowDivision(lengths, seq_len, ranks, window))
    return RowPlan(lengths, seq_len, tuple(in_order(own, lengths) for own in shares.pieces), window)


def _divide(row: RowDivision) -> Shares:
    """Return balanced shares with few split documents, or else the best of several shares."""
    tried: list[Shares] = []

    def attempt(split: int) -> Shares | None:
        """Return the shares with this many split documents if they are balanced."""
        tried.append(row.share_out(split))
        if tried[-1].imbalance > BALANCED:
            return None
        shares = row.equalise(tried[-1])
        return shares if shares.imbalance <= BALANCED else None

    # At first, split only the documents that have more pairs than a rank may have.
    split, too_few = sum(row.ranks * pairs > BALANCED * sum(row.pairs) for pairs in row.pairs), None
    while (found := attempt(split)) is None:
        if split == len(row.lengths):
            best = sorted(tried, key=lambda shares: shares.imbalance)[:3]
            return min(map(row.equalise, best), key=lambda shares: shares.imbalance)
        too_few, split = split, min(max(1, 2 * split), len(row.lengths))
    while too_few is not None and split - too_few > max(1, split // 4):
        middle = (too_few + split) // 2
        if (better := attempt(middle)) is None:
            too_few = middle
        else:
            found, split = better, middle
    return found
