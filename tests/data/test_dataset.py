"""Compares rows and batches with the documents in them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_train.data import IGNORE_INDEX
from flash_train.data.dataset import PADDING_ROW, PackedRows, collate
from flash_train.data.packing import pack
from flash_train.data.split import Part

PAD = 258


class MemoryCache:
    """Stands in for a token cache, with tokens in memory."""

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens = tokens


def make_rows(lengths: list[int], seq_len: int, packing: str = "best_fit") -> PackedRows:
    """Documents whose tokens are all different: 1000 * document + position."""
    tokens = np.concatenate([1000 * i + np.arange(length) for i, length in enumerate(lengths)])
    begins = np.cumsum([0, *lengths[:-1]])
    index = pack(np.array(lengths), seq_len, packing)
    return PackedRows(Part(MemoryCache(tokens), begins, np.array(lengths), 0), index, PAD, index.capacity)


@settings(deadline=None)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=30), st.integers(2, 40))
def test_every_token_is_read_once_and_labelled_with_its_successor(lengths, seq_len):
    rows = make_rows(lengths, seq_len)
    seen = []
    for row in (rows[i] for i in range(len(rows))):
        assert row["tokens"].dtype == row["labels"].dtype == row["positions"].dtype == torch.int64
        assert row["tokens"].shape == row["labels"].shape == row["positions"].shape == (seq_len,)
        assert sum(row["lengths"]) == seq_len and min(row["lengths"]) > 0
        end = 0
        for length in row["lengths"]:
            entry = slice(end, end := end + length)
            tokens, labels = row["tokens"][entry].tolist(), row["labels"][entry].tolist()
            assert row["positions"][entry].tolist() == list(range(length))
            if tokens[0] == PAD and labels[0] == IGNORE_INDEX and set(tokens) == {PAD}:
                assert set(labels) == {IGNORE_INDEX} and end == seq_len
                continue
            seen += tokens
            for token, label in zip(tokens, labels, strict=True):
                document, position = divmod(token, 1000)
                assert label == (token + 1 if position + 1 < lengths[document] else IGNORE_INDEX)
    assert sorted(seen) == [1000 * i + j for i, length in enumerate(lengths) for j in range(length)]


@settings(deadline=None)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=30), st.integers(2, 40))
def test_concat_is_one_stream_and_one_entry_per_row(lengths, seq_len):
    rows = make_rows(lengths, seq_len, "concat")
    stream = [1000 * i + j for i, length in enumerate(lengths) for j in range(length)]
    padding = len(rows) * seq_len - len(stream)
    assert torch.cat([rows[i]["tokens"] for i in range(len(rows))]).tolist() == stream + [PAD] * padding
    labels = torch.cat([rows[i]["labels"] for i in range(len(rows))]).tolist()
    assert labels == stream[1:] + [IGNORE_INDEX] * (padding + 1)
    for i in range(len(rows)):
        assert rows[i]["lengths"] == (seq_len,) and rows[i]["positions"].tolist() == list(range(seq_len))
        assert rows[i]["cu_seqlens"].tolist() == [0] + [seq_len] * 8


@settings(deadline=None)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=30), st.integers(2, 40), st.integers(1, 4))
def test_batch_boundaries_are_cumulative_lengths(lengths, seq_len, batch_size):
    rows = make_rows(lengths, seq_len)
    batch = collate([rows[i % len(rows)] for i in range(batch_size)])
    boundaries, total = batch["cu_seqlens"], batch_size * seq_len
    assert boundaries.dtype == torch.int32 and boundaries.shape == (batch_size * rows.capacity + 1,)
    entries = len(batch["lengths"])
    assert boundaries[0] == 0 and boundaries[1 : entries + 1].tolist() == np.cumsum(batch["lengths"]).tolist()
    assert (boundaries[entries:] == total).all()
    assert all(type(length) is int for length in batch["lengths"])
    # An entry begins exactly where positions restart.
    starts = torch.nonzero(batch["positions"].flatten() == 0).flatten()
    assert starts.tolist() == boundaries[:entries].tolist()


@pytest.mark.parametrize("packing", ["best_fit", "concat"])
def test_a_padding_row_has_no_labels(packing):
    row = make_rows([5, 9], 8, packing)[PADDING_ROW]
    assert row["tokens"].tolist() == [PAD] * 8 and row["labels"].tolist() == [IGNORE_INDEX] * 8
    assert row["lengths"] == (8,) and row["cu_seqlens"].tolist() == [0] + [8] * 8


def test_padding_is_in_entries_of_its_own():
    rows = make_rows([3000, 9000], 30_000)
    lengths = (9000, 3000, 4096, 4096, 4096, 4096, 1616)
    assert rows[0]["lengths"] == lengths and rows[0]["cu_seqlens"].tolist() == [0, *np.cumsum(lengths), 30_000]
    assert rows[PADDING_ROW]["lengths"] == (4096,) * 7 + (1328,)  # as many as there is room for
