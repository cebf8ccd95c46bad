import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash_train.data import ByteTokenizer, StdlibCorpus, pack
from flash_train.data.cache import tokenize
from flash_train.data.packing import padding_pieces
from flash_train.data.split import split

LENGTHS = st.lists(st.integers(1, 200), min_size=1, max_size=60)


@pytest.fixture(scope="module")
def stdlib_lengths(tmp_path_factory) -> np.ndarray:
    train, _ = split(tokenize(StdlibCorpus(), ByteTokenizer(), tmp_path_factory.mktemp("cache")), 0.05)
    return train.lengths


@given(LENGTHS, st.integers(2, 80), st.sampled_from(["best_fit", "concat"]))
def test_every_token_is_in_exactly_one_place(lengths, seq_len, packing):
    index = pack(np.array(lengths), seq_len, packing)
    seen = [np.zeros(length, dtype=int) for length in lengths]
    for row in range(len(index)):
        segments = index.row(row)
        assert segments and sum(length for _, _, length in segments) <= seq_len
        for document, start, length in segments:
            assert length > 0
            seen[document][start : start + length] += 1
    assert all((count == 1).all() for count in seen)


@given(LENGTHS, st.integers(2, 80))
def test_best_fit_cuts_only_what_does_not_fit(lengths, seq_len):
    index = pack(np.array(lengths), seq_len, "best_fit")
    for document, start, length in (segment for row in range(len(index)) for segment in index.row(row)):
        assert start % seq_len == 0
        assert length == min(seq_len, lengths[document] - start)


@given(LENGTHS, st.integers(2, 80))
def test_best_fit_chooses_as_the_plain_algorithm_does(lengths, seq_len):
    rooms: list[int] = []
    for piece in sorted((length % seq_len for length in lengths if length % seq_len), reverse=True):
        fitting = [room for room in rooms if room >= piece]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append((min(fitting) if fitting else seq_len) - piece)
    index = pack(np.array(lengths), seq_len, "best_fit")
    filled = np.add.reduceat(index.lengths, index.row_offsets[:-1])
    full_pieces = [0] * sum(length // seq_len for length in lengths)
    assert sorted((seq_len - filled).tolist()) == sorted(rooms + full_pieces)


@given(LENGTHS, st.integers(2, 80))
def test_concat_is_the_documents_in_order_and_fills_every_row_but_the_last(lengths, seq_len):
    index = pack(np.array(lengths), seq_len, "concat")
    assert np.all(np.diff(index.documents) >= 0)
    filled = np.add.reduceat(index.lengths, index.row_offsets[:-1])
    assert np.all(filled[:-1] == seq_len) and len(index) == -(-sum(lengths) // seq_len)


@given(LENGTHS, st.integers(2, 80))
def test_capacity_counts_the_tail(lengths, seq_len):
    index = pack(np.array(lengths), seq_len, "best_fit")
    entries = [len(row) + (sum(piece[2] for piece in row) < seq_len) for row in map(index.row, range(len(index)))]
    assert index.capacity % 8 == 0 and index.capacity - 8 < max(entries) <= index.capacity


def test_a_long_tail_is_several_entries():
    """One entry would cost the square of its length: the validation of a row of a million took minutes for padding."""
    index = pack(np.array([3000, 100_000]), 200_000)
    assert index.capacity == 8 * -(-(2 + -(-97_000 // 4096)) // 8)
    assert index.squared_lengths.tolist() == [3000**2 + 100_000**2 + 23 * 4096**2 + (97_000 - 23 * 4096) ** 2]


@given(st.integers(0, 100_000), st.integers(1, 40))
def test_pieces_of_padding_are_the_padding(tail, most):
    pieces = padding_pieces(tail, most)
    assert sum(pieces) == tail and len(pieces) <= most and min(pieces, default=1) > 0
    assert max(pieces, default=0) <= max(4096, -(-tail // most))


@pytest.mark.parametrize("seq_len", [64, 100, 1000, 2048, 4096, 10_000, 16_384, 50_000, 65_536, 120_401, 131_072])
def test_standard_library_packs_with_99_percent(stdlib_lengths, seq_len):
    index = pack(stdlib_lengths, seq_len)
    least_rows = -(-int(stdlib_lengths.sum()) // seq_len)
    # In a library so small that the last row alone leaves more than 1 % empty, the number of rows must be minimal.
    assert index.efficiency >= min(0.99, stdlib_lengths.sum() / (least_rows * seq_len))


def test_half_a_million_documents_pack_in_seconds():
    lengths = np.random.default_rng(0).lognormal(7, 1.3, size=500_000).astype(np.int64) + 2
    began = time.perf_counter()
    index = pack(lengths, 16_384)
    assert time.perf_counter() - began < 60  # quadratic time would take hours
    assert index.efficiency > 0.99


def test_unknown_packing_is_refused():
    with pytest.raises(ValueError, match="data.packing='worst_fit': must be one of best_fit, concat"):
        pack(np.array([3]), 8, "worst_fit")


@given(LENGTHS, st.integers(2, 80), st.sampled_from(["best_fit", "concat"]))
def test_squared_lengths_are_those_of_a_rows_entries(lengths, seq_len, packing):
    index = pack(np.array(lengths), seq_len, packing)
    for row, squares in enumerate(index.squared_lengths.tolist()):
        entries = [length for _, _, length in index.row(row)]
        entries = [seq_len] if packing == "concat" else [*entries, seq_len - sum(entries)]
        assert squares == sum(length**2 for length in entries)
