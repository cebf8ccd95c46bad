"""Packed rows as tensors, and rows as batches."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from flash_train.data.packing import PackedIndex, padding_pieces
from flash_train.data.split import Part

IGNORE_INDEX = -100  # the label of a position without one; PyTorch's cross-entropy leaves it out
PADDING_ROW = -1  # the index of a row that is all padding

Row = dict[str, Any]
Batch = dict[str, Any]


class PackedRows(Dataset):
    """Map-style rows of exactly `seq_len` tokens, read from the token cache.

    A row is a dict:
        tokens      int64 (seq_len,)       `pad` in the unused tail
        labels      int64 (seq_len,)       the next token of the same document, also across pieces; -100 if there is
                                           none. With packing "concat" the whole part is one stream, like one document
        positions   int64 (seq_len,)       position within the entry
        cu_seqlens  int32 (capacity + 1,)  where entries begin and end; the last value is repeated up to `capacity`
        lengths     tuple[int, ...]        lengths of the entries, then of the pieces of the unused tail

    Index -1 (PADDING_ROW) is a row of padding without labels; it fills the last batch of a finite epoch.
    """

    def __init__(self, part: Part, index: PackedIndex, pad: int, capacity: int) -> None:
        self.part, self.index, self.pad, self.capacity = part, index, pad, capacity

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, row: int) -> Row:
        segments = [] if row == PADDING_ROW else self.index.row(row)
        tokens = np.full(self.index.seq_len, self.pad, dtype=np.int64)
        labels = np.full(self.index.seq_len, IGNORE_INDEX, dtype=np.int64)
        end = 0
        for document, start, length in segments:
            begin, end = end, end + length
            # One token more than the segment: the label of its last position is in the document's next piece.
            n_read = min(length + 1, int(self.part.lengths[document]) - start)
            ids = self.part.tokens(document, start, n_read)
            tokens[begin:end] = ids[:length]
            labels[begin : begin + n_read - 1] = ids[1:]
        if self.index.one_stream and segments:
            self._label_document_ends(row, tokens, labels, segments)
        lengths = [self.index.seq_len] if self.index.one_stream else [length for _, _, length in segments]
        lengths += padding_pieces(self.index.seq_len - sum(lengths), self.capacity - len(lengths))
        return as_row(tokens, labels, lengths, self.capacity)

    def squared_lengths(self, rows: list[int]) -> np.ndarray:
        """Return the sum of the squares of each row's entry lengths: int64 (rows,)."""
        return self.index.squared_lengths[rows]

    def _label_document_ends(
        self, row: int, tokens: np.ndarray, labels: np.ndarray, segments: list[tuple[int, int, int]]
    ) -> None:
        """Label the last token of each document with the first token of the next document, in one stream."""
        ends = np.cumsum([length for _, _, length in segments])
        labels[ends[:-1] - 1] = tokens[ends[:-1]]
        if row + 1 < len(self.index):
            document, start, _ = self.index.row(row + 1)[0]
            labels[ends[-1] - 1] = self.part.tokens(document, start, 1)[0]


class PlacedRows(Dataset):
    """The same rows, each with ``place``, an int: its place in the order of training.

    Args:
        rows: a map-style data set of rows.
    """

    def __init__(self, rows: Dataset) -> None:
        self.rows = rows

    def __getitem__(self, placed: tuple[int, Any]) -> Row:
        place, row = placed
        return {**self.rows[row], "place": place}


def as_row(tokens: np.ndarray, labels: np.ndarray, lengths: Sequence[int], capacity: int) -> Row:
    """Make a row in the format of `PackedRows` from tokens, labels (int64, (seq_len,)) and its entries' lengths."""
    positions = np.concatenate([np.arange(length) for length in lengths])
    return {
        "tokens": torch.from_numpy(tokens),
        "labels": torch.from_numpy(labels),
        "positions": torch.from_numpy(positions),
        "cu_seqlens": _boundaries(lengths, capacity),
        "lengths": tuple(lengths),
    }


def collate(rows: Sequence[Row]) -> Batch:
    """Make a batch from rows; its packed stream is the concatenated rows.

    tokens, labels, positions: int64 (batch_size, seq_len); cu_seqlens: int32 (batch_size * capacity + 1,) from 0 to
    batch_size * seq_len, the last value repeated; lengths: the entries' lengths in order, Python ints. Rows of
    `PlacedRows` also have places: of the rows in the order of training, Python ints.
    """
    capacity = len(rows[0]["cu_seqlens"]) - 1
    lengths = tuple(length for row in rows for length in row["lengths"])
    stacked = {name: torch.stack([row[name] for row in rows]) for name in ("tokens", "labels", "positions")}
    batch = {**stacked, "cu_seqlens": _boundaries(lengths, len(rows) * capacity), "lengths": lengths}
    return {**batch, "places": tuple(row["place"] for row in rows)} if "place" in rows[0] else batch


def _boundaries(lengths: Sequence[int], capacity: int) -> torch.Tensor:
    """Return 0, then the cumulative lengths, with the last one repeated: int32 (capacity + 1,)."""
    boundaries = np.full(capacity + 1, sum(lengths), dtype=np.int32)
    boundaries[0] = 0
    boundaries[1 : len(lengths) + 1] = np.cumsum(lengths)
    return torch.from_numpy(boundaries)
