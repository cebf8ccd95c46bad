"""The plan of a row that several ranks share, and the transfers of keys that follow from it."""

from itertools import pairwise

import numpy as np
import pytest

from flash_train.attention import Window, attended_pairs
from flash_train.attention.parallel.key_transfers import plan_transfers
from flash_train.attention.parallel.row_division import CUT, Piece, count_pairs, zigzag
from flash_train.attention.parallel.row_plan import plan_row
from tests.support.attention.parallel.row_draws import DRAWS, UNUSUAL, draw, heavy_tailed
from tests.support.tiers import slow_after


@pytest.mark.parametrize("block", range(5))
def test_ranks_hold_every_position_once_and_all_pairs(block):
    for seed in (*DRAWS[block::5], *UNUSUAL[block::5]):
        lengths, seq_len, ranks, window = draw(seed)
        plan = plan_row(lengths, seq_len, ranks, window)
        case = (seed, lengths, seq_len, ranks, window)
        assert plan.ranks == ranks, case
        assert [len(plan.positions(rank)) for rank in range(ranks)] == [seq_len // ranks] * ranks, case
        together = np.concatenate([plan.positions(rank) for rank in range(ranks)])
        assert together.dtype == np.int64, case
        assert np.array_equal(np.sort(together), np.arange(seq_len)), case
        mask = None if window is None else Window(window, 0)
        assert sum(plan.pairs) == attended_pairs(lengths, mask), case
        mean = sum(plan.pairs) / ranks
        assert plan.imbalance == pytest.approx(max(plan.pairs) / mean), case


def test_ranks_store_parts_of_documents_then_whole_ones_then_padding():
    for seed in (*DRAWS, *UNUSUAL):
        lengths, seq_len, ranks, window = draw(seed)
        plan = plan_row(lengths, seq_len, ranks, window)
        for rank in range(ranks):
            pieces = plan.pieces[rank]
            assert all(len(piece) > 0 for piece in pieces), seed
            for before, after in pairwise(sorted(pieces)):  # apart: else they would be one piece
                assert before.document < after.document or before.stop < after.start, seed
            attending = plan.attending(rank)
            assert pieces[: len(attending)] == attending == plan.parts(rank) + plan.whole(rank), seed
            assert all(piece.document == len(lengths) for piece in pieces[len(attending) :]), seed
            for own in (plan.parts(rank), plan.whole(rank)):  # those that see most keys first
                assert [piece.stop for piece in own] == sorted((piece.stop for piece in own), reverse=True), seed
            assert all(piece == Piece(piece.document, 0, lengths[piece.document]) for piece in plan.whole(rank)), seed


def test_pairs_are_those_of_a_brute_force_count():
    for seed in (*DRAWS, *UNUSUAL):
        lengths, seq_len, ranks, window = draw(seed)
        if seq_len > 400:
            continue
        plan = plan_row(lengths, seq_len, ranks, window)
        document = np.repeat(np.arange(len(lengths) + 1), [*lengths, seq_len - sum(lengths)])
        row = np.arange(seq_len)
        attends = (document[:, None] == document) & (row[:, None] >= row) & (document < len(lengths))
        if window is not None:
            attends &= row[:, None] - row <= window
        counted = tuple(int(attends[plan.positions(rank)].sum()) for rank in range(ranks))
        assert plan.pairs == counted, seed
        for rank in range(ranks):
            for piece in plan.attending(rank):
                begin = plan.begins[piece.document]
                assert count_pairs(piece, window) == attends[begin + piece.start : begin + piece.stop].sum(), seed
                seen = np.flatnonzero(attends[begin + piece.start : begin + piece.stop].any(0)) - begin
                assert plan.first_key(piece) == seen[0] // CUT * CUT, seed


@pytest.mark.parametrize("window", slow_after(2, [None, 511, 1023]))
@pytest.mark.parametrize("ranks", slow_after(1, [2, 4, 8]))
def test_heavy_tailed_documents_are_balanced_and_aligned(ranks, window):
    for seed in range(100 if window is None else 30):
        lengths = heavy_tailed(seed)
        plan = plan_row(lengths, 131072, ranks, window)
        assert plan.imbalance <= 1.01, seed
        assert plan.is_aligned, seed
        positions = [plan.positions(rank) for rank in range(ranks)]
        assert [len(part) for part in positions] == [131072 // ranks] * ranks, seed
        assert np.array_equal(np.sort(np.concatenate(positions)), np.arange(131072)), seed
        starts = np.cumsum([0, *lengths[:-1]])
        for rank, part in enumerate(positions):  # the first position of each run of neighbours in one document
            document = np.searchsorted(starts, part, "right")
            first = (np.diff(part, prepend=-2) != 1) | (np.diff(document, prepend=-1) != 0)
            assert not ((part - starts[document - 1])[first] % 16).any(), (seed, rank)


@pytest.mark.parametrize(("seq_len", "ranks"), [(131070, 3), (131000, 2), (126000, 4), (130024, 8)])
def test_rows_are_aligned_though_the_ranks_do_not_have_a_multiple_of_16_tokens(seq_len, ranks):
    assert seq_len // ranks % CUT
    for seed in range(30):
        plan = plan_row(heavy_tailed(seed, seq_len), seq_len, ranks)
        assert plan.imbalance <= 1.01 and plan.is_aligned, seed


def test_padding_lets_any_row_be_aligned():
    for seed in range(30):
        for padding in (15, 15 * 7, 5000):
            plan = plan_row(heavy_tailed(seed, 32768), 32768 + padding + -padding % 8, 8)
            assert plan.is_aligned or padding < 15 * 7, (seed, padding)


def can_be_aligned(lengths, seq_len, ranks):
    """Try every way to give the ranks the ends of documents that cannot be cut at multiples of 16."""
    tokens, padding = seq_len // ranks, seq_len - sum(lengths)
    sums = {(0,) * ranks}  # tokens of the ends that each rank has, in ascending order
    for end in (length % 16 for length in lengths if length % 16):
        sums = {
            tuple(sorted((*own[:i], own[i] + end, *own[i + 1 :])))
            for own in sums
            for i in range(ranks)
            if own[i] + end <= tokens
        }
    return any(sum((tokens - end) % 16 for end in own) <= padding for own in sums)


def test_a_plan_is_aligned_only_if_that_is_possible_and_always_where_the_docstring_says_so():
    counts = {True: 0, False: 0}
    missed = []
    for seed in (*DRAWS, *UNUSUAL):
        lengths, seq_len, ranks, window = draw(seed)
        ends = sum(length % 16 for length in lengths)
        if ranks > 4 or len(lengths) > 40:
            continue
        possible, found = can_be_aligned(lengths, seq_len, ranks), plan_row(lengths, seq_len, ranks, window).is_aligned
        counts[possible] += 1
        assert possible or not found, seed
        tokens, padding = seq_len // ranks, seq_len - sum(lengths)
        if ends <= tokens and (tokens % 16 == 0 or padding >= 15 * (ranks - 1)):
            assert found, seed
        if ends <= tokens and ranks == 2:
            assert found == possible, seed
        missed += [seed] if possible and not found else []
    assert min(counts.values()) > 100
    assert len(missed) <= 0.01 * counts[True], missed


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_few_documents_of_many_are_cut(ranks):
    for seed in range(20):
        lengths = heavy_tailed(seed, 131072 * ranks)
        plan = plan_row(lengths, 131072 * ranks, ranks)
        parts = np.bincount([piece.document for own in plan.pieces for piece in own], minlength=len(lengths))
        assert (parts > 1).sum() <= 2 * ranks, seed


@pytest.mark.parametrize("window", [None, 40])
def test_one_document_is_balanced(window):
    for ranks in range(1, 9):
        plan = plan_row([ranks * 2048], ranks * 2048, ranks, window)
        assert plan.imbalance <= 1.01
        assert plan.is_aligned
        if ranks > 1 and window is None:
            assert all(len(pieces) == (1 if rank == ranks - 1 else 2) for rank, pieces in enumerate(plan.pieces))


def test_equal_inputs_give_equal_plans():
    for seed in (*DRAWS[::5], *UNUSUAL[::5]):
        lengths, seq_len, ranks, window = draw(seed)
        plan = plan_row(lengths, seq_len, ranks, window)
        again = plan_row(tuple(lengths), seq_len, ranks, window)
        assert plan == again
        for rank in range(ranks):
            one, two = plan_transfers(plan, rank), plan_transfers(again, rank)
            assert all(map(np.array_equal, (*one.send, one.keys), (*two.send, two.keys)))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("length", [1, 24, 64])
def test_equal_documents_stay_whole_and_need_no_transfer(ranks, length):
    lengths = [length] * (6 * ranks)
    plan = plan_row(lengths, sum(lengths), ranks)
    assert plan.imbalance == 1
    assert sorted(piece for pieces in plan.pieces for piece in pieces) == [
        Piece(document, 0, length) for document in range(len(lengths))
    ]
    for rank in range(ranks):
        transfers = plan_transfers(plan, rank)
        assert transfers.sent_rows == 0
        assert transfers.receive == (0,) * ranks
        assert transfers.tokens == len(transfers.keys) == 0


def test_only_the_longest_document_is_split():
    lengths = [64] * 16 + [1024] + [64] * 16
    plan = plan_row(lengths, sum(lengths), 4)
    parts = [sum(piece.document == i for pieces in plan.pieces for piece in pieces) for i in range(len(lengths))]
    assert parts[16] > 1
    assert all(count == 1 for i, count in enumerate(parts) if i != 16)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 100, 511, 4096])
def test_zigzag_chunks_cover_the_document_and_start_at_multiples_of_16(length):
    for ranks in range(1, 9):
        chunks = sorted(chunk for own in zigzag(length, ranks) for chunk in own)
        assert chunks[0][0] == 0 and chunks[-1][1] == length
        assert all(a[1] == b[0] for a, b in zip(chunks, chunks[1:], strict=False))
        assert all(start % CUT == 0 for start, _ in chunks)


def test_a_plan_is_aligned_if_every_piece_starts_at_a_multiple_of_16():
    assert plan_row([40, 24], 64, 2).is_aligned
    assert not plan_row([10], 10, 2).is_aligned  # five tokens for each rank: the document is cut at 5


@pytest.mark.parametrize("ranks", [0, -2, 3])
def test_a_row_that_the_ranks_do_not_divide_is_refused(ranks):
    with pytest.raises(ValueError, match=rf"seq_len=64: must be a multiple of the {ranks} ranks that share a row"):
        plan_row([64], 64, ranks)


@pytest.mark.parametrize("lengths", [[], [0], [8, 0, 8], [8, -1], [65], [40, 25]])
def test_lengths_that_do_not_fit_the_row_are_refused(lengths):
    with pytest.raises(ValueError, match="must be one document or more") as error:
        plan_row(lengths, 64, 2)
    assert f"lengths={lengths}:" in str(error.value)
    assert "each of 1 token or more, and together at most 64 tokens" in str(error.value)


@pytest.mark.parametrize("block", range(5))
def test_entries_read_the_keys_of_their_document(block):
    """The positions of the row are sent in place of keys, so that each entry shows which positions it reads."""
    for seed in (*DRAWS[block::5], *UNUSUAL[block::5]):
        lengths, seq_len, ranks, window = draw(seed)
        plan = plan_row(lengths, seq_len, ranks, window)
        found = [plan_transfers(plan, rank) for rank in range(ranks)]
        for rank, own in enumerate(found):
            assert [len(other.send[rank]) for other in found] == list(own.receive), seed
            assert own.receive[rank] == 0, seed
            assert own.sent_rows == sum(len(rows) for rows in own.send), seed
            received = [plan.positions(other)[transfers.send[rank]] for other, transfers in enumerate(found)]
            for part in received:
                assert np.array_equal(part, np.unique(part)), seed  # in the order of the row, each once
            rows = np.concatenate([plan.positions(rank)[: own.tokens], *received])
            check_entries(plan, rank, own, rows[own.keys], seed)
            read = np.unique(own.keys)
            assert set(range(own.tokens, len(rows))) <= set(read.tolist()), seed  # nothing is sent in vain


def check_entries(plan, rank, own, keys, seed):
    pieces = plan.parts(rank)
    if not pieces:
        assert own.cu_seqlens_q.tolist() == own.cu_seqlens_k.tolist() == [0, 0], seed
        assert own.origins.tolist() == [[0, 0, 0]] and len(keys) == 0, seed
        return
    assert own.cu_seqlens_q[0] == own.cu_seqlens_k[0] == 0 and own.cu_seqlens_k[-1] == len(keys), seed
    assert len(own.cu_seqlens_q) == len(own.cu_seqlens_k) == len(pieces) + 1, seed
    queries = plan.positions(rank)
    for i, piece in enumerate(pieces):
        begin, first = plan.begins[piece.document], plan.first_key(piece)
        entry = queries[own.cu_seqlens_q[i] : own.cu_seqlens_q[i + 1]]
        assert entry.tolist() == list(range(begin + piece.start, begin + piece.stop)), seed
        entry = keys[own.cu_seqlens_k[i] : own.cu_seqlens_k[i + 1]]
        assert entry.tolist() == list(range(begin + first, begin + piece.stop)), seed
        assert own.origins[i].tolist() == [piece.document, piece.start, first], seed
    assert all(x.dtype == np.int64 for x in (*own.send, own.keys, own.origins)), seed
    assert own.cu_seqlens_q.dtype == own.cu_seqlens_k.dtype == np.int64, seed
