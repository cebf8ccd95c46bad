"""Which document goes where: rows of exactly `seq_len` tokens, nothing thrown away, nothing repeated.

``best_fit``  best-fit decreasing: a document that fits stays whole; a longer one is cut into pieces of `seq_len` and a
              remainder; each remainder goes to the fullest row that still has room for it. O(n log n).
``concat``    the documents after one another, cut every `seq_len` tokens: one causal stream per row.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

PackingName = Literal["best_fit", "concat"]
PACKINGS: tuple[str, ...] = get_args(PackingName)


@dataclass(frozen=True)
class PackedIndex:
    """Row → segments of documents, as flat arrays.

    Row ``r`` holds the segments ``row_offsets[r]:row_offsets[r + 1]``; segment ``s`` is the tokens
    ``starts[s] : starts[s] + lengths[s]`` of document ``documents[s]``. All int64. `one_stream` says that a row is one
    entry for attention, positions and labels, whatever documents it is made of.
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
        """The segments of a row: (document, start, length) each."""
        segments = slice(self.row_offsets[row], self.row_offsets[row + 1])
        columns = (self.documents[segments], self.starts[segments], self.lengths[segments])
        return list(zip(*(column.tolist() for column in columns), strict=True))

    @property
    def efficiency(self) -> float:
        """Share of the positions of all rows that hold a token of a document."""
        return float(self.lengths.sum() / (len(self) * self.seq_len))

    @property
    def capacity(self) -> int:
        """Most entries in any row, the padding tail counted as one, rounded up to a multiple of 8."""
        if self.one_stream:
            return 8
        tail = np.add.reduceat(self.lengths, self.row_offsets[:-1]) < self.seq_len
        return -(-int((np.diff(self.row_offsets) + tail).max()) // 8) * 8


def pack(lengths: np.ndarray, seq_len: int, packing: PackingName = "best_fit") -> PackedIndex:
    """Packs documents of `lengths` tokens (each ≥ 1) into rows of `seq_len`. ValueError for an unknown `packing`."""
    check_packing(packing)
    lengths = np.asarray(lengths, dtype=np.int64)
    return best_fit(lengths, seq_len) if packing == "best_fit" else concat(lengths, seq_len)


def check_packing(packing: str) -> None:
    """Raises ValueError unless `packing` is the name of one."""
    if packing not in PACKINGS:
        raise ValueError(f"data.packing={packing!r}: allowed are {', '.join(PACKINGS)}")


def best_fit(lengths: np.ndarray, seq_len: int) -> PackedIndex:
    """Best-fit decreasing over the documents' pieces."""
    full, rest = lengths // seq_len, lengths % seq_len
    n_full = int(full.sum())
    with_rest = np.flatnonzero(rest)
    with_rest = with_rest[np.argsort(-rest[with_rest], kind="stable")]

    first_full = np.repeat(np.cumsum(full) - full, full)  # of the piece's document, among the full pieces
    documents = np.concatenate([np.repeat(np.arange(len(lengths)), full), with_rest])
    starts = np.concatenate([(np.arange(n_full) - first_full) * seq_len, full[with_rest] * seq_len])
    pieces = np.concatenate([np.full(n_full, seq_len), rest[with_rest]])
    rows = np.concatenate([np.arange(n_full), n_full + _assign(rest[with_rest].tolist(), seq_len)])

    order = np.argsort(rows, kind="stable")
    row_offsets = np.concatenate([[0], np.cumsum(np.bincount(rows))])
    return PackedIndex(seq_len, False, documents[order], starts[order], pieces[order], row_offsets)


def concat(lengths: np.ndarray, seq_len: int) -> PackedIndex:
    """The documents as one stream, cut every `seq_len` tokens."""
    ends = np.cumsum(lengths)
    total = int(lengths.sum())
    cuts = np.unique(np.concatenate([[0], ends, np.arange(0, total, seq_len)]))
    begins = cuts[:-1]
    documents = np.searchsorted(ends, begins, side="right")
    starts = begins - (ends - lengths)[documents]
    row_offsets = np.searchsorted(begins, np.arange(0, total + seq_len, seq_len))
    return PackedIndex(seq_len, True, documents, starts, np.diff(cuts), row_offsets)


def _assign(pieces: list[int], seq_len: int) -> np.ndarray:
    """The row of each piece; `pieces` are sorted, longest first, and shorter than `seq_len`."""
    rows = np.empty(len(pieces), dtype=np.int64)
    rooms = _Rooms(seq_len)
    n_rows = 0
    for i, piece in enumerate(pieces):
        found = rooms.take(piece)
        if found is None:
            found = (seq_len, n_rows)
            n_rows += 1
        room, rows[i] = found
        rooms.put(room - piece, rows[i])
    return rows


class _Rooms:
    """Rows by the room left in them. Finds the least sufficient room in O(1) word operations.

    The occupied rooms are bits of words of about √seq_len bits, and the words that have any are bits of one summary
    word: two "lowest set bit at or above" questions answer a search, however many rows are open.
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
        """Removes and returns (room, row) with the least room ≥ `least`; None if there is none."""
        word = least >> self.shift
        low = _lowest_bit(self.words[word], least & ((1 << self.shift) - 1))
        if low is None:
            word = _lowest_bit(self.summary, word + 1)
            if word is None:
                return None
            low = _lowest_bit(self.words[word], 0)
        room = (word << self.shift) | low
        rows = self.rows[room]
        row = rows.pop()
        if not rows:
            self.words[word] ^= 1 << low
            if not self.words[word]:
                self.summary ^= 1 << word
        return room, row


def _lowest_bit(bits: int, at_least: int) -> int | None:
    """Position of the lowest set bit at or above `at_least`; None if there is none."""
    bits >>= at_least
    return (bits & -bits).bit_length() - 1 + at_least if bits else None
