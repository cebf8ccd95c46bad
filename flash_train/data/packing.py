"""Packing strategies: how documents fill rows of exactly `seq_len` tokens. No token is dropped or repeated.

``best_fit``  best-fit decreasing: a document that fits stays whole; a longer one is cut into pieces of `seq_len` and a
              remainder; each remainder goes to the fullest row that still has room for it. O(n log n).
``concat``    the documents are concatenated and cut every `seq_len` tokens: one causal stream per row.

(`flash_train.attention.Packing` is something else: the boundaries of sequences inside a packed batch.)
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np

from flash_train.checks import check_name

PackingStrategy = Literal["best_fit", "concat"]
PACKING_STRATEGIES: tuple[str, ...] = get_args(PackingStrategy)
PADDING_PIECE = 4096  # tokens: attention in so short an entry costs little next to the other layers


@dataclass(frozen=True)
class PackedIndex:
    """Row → segments of documents, as flat arrays.

    Row ``r`` holds the segments ``row_offsets[r]:row_offsets[r + 1]``; segment ``s`` is the tokens
    ``starts[s] : starts[s] + lengths[s]`` of document ``documents[s]``. All int64. With `one_stream`, a row is a single
    entry for attention, positions and labels, even if it holds several documents.
    """

    seq_len: int
    one_stream: bool
    documents: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    row_offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.row_offsets) - 1

    def row(self, row: int) -> list[tuple[int, int, int]]:
        """Return the segments of a row, as (document, start, length)."""
        segments = slice(self.row_offsets[row], self.row_offsets[row + 1])
        columns = (self.documents[segments], self.starts[segments], self.lengths[segments])
        return list(zip(*(column.tolist() for column in columns), strict=True))

    @property
    def efficiency(self) -> float:
        """Share of all positions that hold a token of a document."""
        return float(self.lengths.sum() / (len(self) * self.seq_len))

    @cached_property
    def squared_lengths(self) -> np.ndarray:
        """Sum of the squares of each row's entry lengths, with the pieces of its padding: int64 (rows,).

        Causal attention computes about half as many query-key pairs.
        """
        if self.one_stream:
            return np.full(len(self), self.seq_len**2)
        pieces, rest = np.divmod(self._tails, PADDING_PIECE)
        return np.add.reduceat(self.lengths**2, self.row_offsets[:-1]) + pieces * PADDING_PIECE**2 + rest**2

    @property
    def capacity(self) -> int:
        """The largest number of entries in a row, pieces of padding included, rounded up to a multiple of 8."""
        if self.one_stream:
            return 8
        pieces = -(-self._tails // PADDING_PIECE)
        return -(-int((np.diff(self.row_offsets) + pieces).max()) // 8) * 8

    @property
    def _tails(self) -> np.ndarray:
        """Tokens of padding at the end of each row: int64 (rows,)."""
        return self.seq_len - np.add.reduceat(self.lengths, self.row_offsets[:-1])


def padding_pieces(tail: int, most: int) -> list[int]:
    """Divide the padding of a row into entries, because attention within one entry costs the square of its length.

    Args:
        tail: tokens of padding.
        most: how many pieces there may be, at least 1 if there is padding.

    Returns:
        The lengths of pieces of PADDING_PIECE tokens each, or longer ones if these would be too many.
    """
    if tail == 0:
        return []
    size = max(PADDING_PIECE, -(-tail // most))
    return [min(size, tail - begin) for begin in range(0, tail, size)]


def pack(lengths: np.ndarray, seq_len: int, packing: PackingStrategy = "best_fit") -> PackedIndex:
    """Pack documents of `lengths` tokens (each ≥ 1) into rows of `seq_len` by the strategy `packing`.

    Raises ValueError for an unknown strategy.
    """
    check_packing_strategy(packing)
    lengths = np.asarray(lengths, dtype=np.int64)
    return best_fit(lengths, seq_len) if packing == "best_fit" else concat(lengths, seq_len)


def check_packing_strategy(packing: str) -> None:
    """Raise ValueError unless `packing` is the name of a strategy."""
    check_name("data.packing", packing, PACKING_STRATEGIES)


def best_fit(lengths: np.ndarray, seq_len: int) -> PackedIndex:
    """Pack the documents' pieces by best-fit decreasing."""
    full, remainder = lengths // seq_len, lengths % seq_len
    n_full = int(full.sum())
    partial = np.flatnonzero(remainder)  # documents with a remainder, longest remainder first
    partial = partial[np.argsort(-remainder[partial], kind="stable")]

    first_full = np.repeat(np.cumsum(full) - full, full)  # for each full piece, the index of its document's first one
    documents = np.concatenate([np.repeat(np.arange(len(lengths)), full), partial])
    starts = np.concatenate([(np.arange(n_full) - first_full) * seq_len, full[partial] * seq_len])
    pieces = np.concatenate([np.full(n_full, seq_len), remainder[partial]])
    rows = np.concatenate([np.arange(n_full), n_full + _assign_rows(remainder[partial].tolist(), seq_len)])

    order = np.argsort(rows, kind="stable")
    row_offsets = np.concatenate([[0], np.cumsum(np.bincount(rows))])
    return PackedIndex(seq_len, False, documents[order], starts[order], pieces[order], row_offsets)


def concat(lengths: np.ndarray, seq_len: int) -> PackedIndex:
    """Concatenate the documents and cut them every `seq_len` tokens."""
    ends = np.cumsum(lengths)
    total = int(lengths.sum())
    cuts = np.unique(np.concatenate([[0], ends, np.arange(0, total, seq_len)]))
    begins = cuts[:-1]
    documents = np.searchsorted(ends, begins, side="right")
    starts = begins - (ends - lengths)[documents]
    row_offsets = np.searchsorted(begins, np.arange(0, total + seq_len, seq_len))
    return PackedIndex(seq_len, True, documents, starts, np.diff(cuts), row_offsets)


def _assign_rows(pieces: list[int], seq_len: int) -> np.ndarray:
    """Return the row of each piece; `pieces` are sorted, longest first, and shorter than `seq_len`."""
    rows = np.empty(len(pieces), dtype=np.int64)
    open_rows = _OpenRows(seq_len)
    n_rows = 0
    for i, piece in enumerate(pieces):
        found = open_rows.take(piece)
        if found is None:
            found = (seq_len, n_rows)
            n_rows += 1
        room, rows[i] = found
        open_rows.put(room - piece, rows[i])
    return rows


class _OpenRows:
    """Rows that are not full, by their free tokens (`room`). `take` finds the fullest sufficient one in O(1).

    This is a two-level bitmap whose words have about √seq_len bits. Bit r says whether a row with r free tokens is
    open; a summary word has a bit per non-empty word. A search finds the lowest set bit at or above an index, once per
    level.
    """

    def __init__(self, seq_len: int) -> None:
        self.shift = (seq_len.bit_length() + 1) // 2
        self.words = [0] * ((seq_len >> self.shift) + 1)
        self.summary = 0
        self.rows: dict[int, list[int]] = {}

    def put(self, room: int, row: int) -> None:
        if room > 0:
            self.rows.setdefault(room, []).append(row)
            word = room >> self.shift
            self.words[word] |= 1 << (room & ((1 << self.shift) - 1))
            self.summary |= 1 << word

    def take(self, least: int) -> tuple[int, int] | None:
        """Remove and return the (room, row) with the smallest room ≥ `least`; None if there is none."""
        word = least >> self.shift
        low = _lowest_bit(self.words[word], least & ((1 << self.shift) - 1))
        if low is None:
            following = _lowest_bit(self.summary, word + 1)
            if following is None:
                return None
            word, low = following, _lowest_bit(self.words[following], 0)
            assert low is not None  # the summary has words that are not empty
        room = (word << self.shift) | low
        rows = self.rows[room]
        row = rows.pop()
        if not rows:
            self.words[word] ^= 1 << low
            if not self.words[word]:
                self.summary ^= 1 << word
        return room, row


def _lowest_bit(bits: int, at_least: int) -> int | None:
    """Return the position of the lowest set bit at or above `at_least`; None if there is none."""
    bits >>= at_least
    return (bits & -bits).bit_length() - 1 + at_least if bits else None
