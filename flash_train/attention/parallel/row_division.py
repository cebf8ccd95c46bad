"""The steps that divide a packed row among ranks: share the documents out, align them, and equalise the tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flash_train.attention.masks.base import Causal, Window
from flash_train.attention.packing import Entry

CUT = 16  #: documents are cut at multiples of 16 tokens where possible: dropout then draws whole Philox calls
WHOLE = 64  #: a document of at most 1 / 64 of a rank's tokens moves whole; from a longer one only the tail moves


@dataclass(frozen=True, order=True)
class Piece:
    """The tokens ``start`` to ``stop`` of a document of the row, counted from the document's first token."""

    document: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def count_pairs(piece: Piece, window: int | None = None) -> int:
    """Count the (query, key) pairs of a causal piece."""
    band = Causal() if window is None else Window(window, 0)
    return band.pairs(Entry.of_lengths(len(piece), piece.stop))


def zigzag(length: int, ranks: int) -> list[list[tuple[int, int]]]:
    """Return for each rank the two chunks of a document of this length, as (start, stop); cuts at multiples of 16."""
    cuts = [CUT * round(i * length / (2 * ranks * CUT)) for i in range(2 * ranks)] + [length]
    cuts = [min(cut, length) for cut in cuts]
    chunks = list(zip(cuts, cuts[1:], strict=False))
    return [[chunk for chunk in (chunks[r], chunks[-1 - r]) if chunk[0] < chunk[1]] for r in range(ranks)]


def in_order(pieces: Iterable[Piece], lengths: Sequence[int]) -> tuple[Piece, ...]:
    """Join adjacent pieces, and order them: parts of documents, whole documents, padding.

    Each kind is ordered by the keys that its last query sees, most first. Kernels compute an entry's late queries
    first, and entries in their order, so work that takes long begins early, and the processors end together.
    """
    joined: list[Piece] = []
    for piece in sorted(pieces):
        if joined and (joined[-1].document, joined[-1].stop) == (piece.document, piece.start):
            piece = Piece(piece.document, joined.pop().start, piece.stop)
        joined.append(piece)

    def kind(piece: Piece) -> int:
        if piece.document == len(lengths):
            return 2
        return int(len(piece) == lengths[piece.document])

    return tuple(sorted(joined, key=lambda piece: (kind(piece), -piece.stop, piece)))


class Shares:
    """What each rank holds while a row is divided. A rank may hold too many tokens for a time.

    Attributes:
        pieces: the pieces of each rank, in any order.
        room: the tokens that each rank lacks; negative if it has too many.
        pairs: the (query, key) pairs of each rank.
        owed: the tokens of padding that each rank must have.
    """

    def __init__(self, room: Sequence[int], window: int | None) -> None:
        self.window = window
        self.room = list(room)
        self.pieces: list[list[Piece]] = [[] for _ in room]
        self.pairs = [0] * len(room)
        self.owed = [0] * len(room)

    def copy(self) -> Shares:
        other = Shares(self.room, self.window)
        other.pieces = [list(own) for own in self.pieces]
        other.pairs, other.owed = list(self.pairs), list(self.owed)
        return other

    @property
    def imbalance(self) -> float:
        """The largest number of pairs of a rank over the mean."""
        return max(self.pairs) * len(self.pairs) / sum(self.pairs)

    def give(self, rank: int, piece: Piece, pairs: int) -> None:
        self.pieces[rank].append(piece)
        self.room[rank] -= piece.stop - piece.start
        self.pairs[rank] += pairs

    def move(self, source: int, piece: Piece, start: int, stop: int, target: int) -> Piece:
        """Move the tokens ``start`` to ``stop`` of the document from a piece of one rank to another rank."""
        moved = Piece(piece.document, start, stop)
        pairs = count_pairs(moved, self.window)
        rest = (Piece(piece.document, piece.start, start), Piece(piece.document, stop, piece.stop))
        self.pieces[source].remove(piece)
        self.pieces[source] += [part for part in rest if len(part)]
        self.room[source] += len(moved)
        self.pairs[source] -= pairs
        self.give(target, moved, pairs)
        return moved

    def choose(self, size: int) -> int:
        """Return the rank with the fewest pairs that has room for ``size`` tokens, or else the one with most room."""
        able = [rank for rank, room in enumerate(self.room) if room >= size]
        return min(able, key=self.pairs.__getitem__) if able else self.room.index(max(self.room))


class RowDivision:
    """The division of one row. It takes the arguments of ``plan_row``."""

    def __init__(self, lengths: Sequence[int], seq_len: int, ranks: int, window: int | None) -> None:
        self.lengths, self.ranks, self.window = lengths, ranks, window
        self.tokens = seq_len // ranks  #: of each rank
        self.padding = seq_len - sum(lengths)
        self.pairs = [count_pairs(Piece(0, 0, length), window) for length in lengths]  #: of each document
        self._longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
        self._chunks: dict[int, list[list[tuple[Piece, int]]]] = {}

    def share_out(self, split: int) -> Shares:
        """Split the ``split`` longest documents over all ranks; give every other one to the rank with the fewest pairs.

        A document for which no rank has room goes to the rank with the most room, which then has too many tokens.
        """
        shares = Shares([self.tokens] * self.ranks, self.window)
        for document in self._longest_first[:split]:
            has_chunk_for_each = self.lengths[document] >= CUT * self.ranks
            fewest_first = sorted(range(self.ranks), key=shares.pairs.__getitem__)
            for rank, chunks in zip(fewest_first, self._chunks_of(document), strict=True):
                for piece, pairs in chunks:
                    size = len(piece)
                    fits = has_chunk_for_each and 2 * shares.room[rank] >= size  # a small excess moves later
                    shares.give(rank if fits else shares.choose(size), piece, pairs)
        for document in self._longest_first[split:]:
            length = self.lengths[document]
            shares.give(shares.choose(length), Piece(document, 0, length), self.pairs[document])
        return shares

    def equalise(self, shares: Shares) -> Shares:
        """Return shares with the same number of tokens for each rank, padding included, and aligned if possible."""
        for fewest in (False, True):
            aligned = self._align(shares, fewest)
            if aligned is not None and self._level(aligned, CUT):
                return aligned
        unaligned = shares.copy()
        self._level(unaligned, 1)
        return unaligned

    def _chunks_of(self, document: int) -> list[list[tuple[Piece, int]]]:
        """Return the chunks of a document and their pairs, in one list per rank, that with the most pairs first."""
        if document not in self._chunks:
            chunks = [
                [(piece, count_pairs(piece, self.window)) for piece in (Piece(document, *chunk) for chunk in own)]
                for own in zigzag(self.lengths[document], self.ranks)
            ]
            self._chunks[document] = sorted(chunks, key=lambda own: -sum(pairs for _, pairs in own))
        return self._chunks[document]

    def _align(self, shares: Shares, fewest: bool) -> Shares | None:
        """Move tails until each rank can have its number of tokens with cuts at multiples of 16.

        A tail is the last ``length % 16`` tokens of a document. Everything before it can be cut in units of 16 tokens,
        so a rank's tails and padding together must equal ``tokens`` modulo 16. From the highest rank down to rank 1,
        each exchanges tails with lower ranks. Rank 0 is then right, too, because the total is.

        Args:
            shares: the pieces of each rank; unchanged.
            fewest: True: each rank keeps as few tails as possible, so that the next ranks can choose among more. False:
                prefer to move tails of short documents, because a tail alone needs all keys of its document.

        Returns:
            the shares, with ``owed``; None if a rank finds no tails.
        """
        shares, padding = shares.copy(), self.padding
        ends = {
            piece.document: (rank, piece)
            for rank, own in enumerate(shares.pieces)
            for piece in own
            if piece.stop == self.lengths[piece.document]
        }
        tails = {i: self.lengths[i] % CUT for i in reversed(self._longest_first) if self.lengths[i] % CUT}
        lacking = [self.tokens] * self.ranks  # tokens without tails; only the remainder modulo 16 matters
        for document, tail in tails.items():
            lacking[ends[document][0]] -= tail
        for rank in range(self.ranks - 1, 0, -1):
            within_reach = [document for document in tails if ends[document][0] <= rank]
            own = {document for document in within_reach if ends[document][0] == rank}
            paddings = range(min(padding, CUT - 1) + 1)
            moves: Iterable[int] | None
            if fewest:
                kept = _cheapest(((1, i, tails[i]) for i in within_reach), [self.tokens - size for size in paddings])
                moves = None if kept is None else sorted(own ^ set(kept))
            else:
                candidates = ((self.lengths[i], i, -tails[i] if i in own else tails[i]) for i in within_reach)
                moves = _cheapest(candidates, [lacking[rank] - size for size in paddings])
            if moves is None:
                return None
            roomiest = max(range(rank), key=shares.room.__getitem__)
            for document in moves:
                source, piece = ends[document]
                target = roomiest if source == rank else rank
                is_short = piece.start == 0 and WHOLE * len(piece) <= self.tokens
                start = piece.start if is_short else piece.stop - tails[document]
                ends[document] = target, shares.move(source, piece, start, piece.stop, target)
                lacking[source] += tails[document]
                lacking[target] -= tails[document]
            shares.owed[rank] = lacking[rank] % CUT
            padding -= shares.owed[rank]
        shares.owed[0] = padding % CUT
        return shares

    def _level(self, shares: Shares, unit: int) -> bool:
        """Move tokens, in multiples of ``unit``, until each rank has the same number, and add the padding.

        The tokens are the first of a document where possible: they have few pairs and need no keys of other ranks.

        Returns:
            False if a rank has too many tokens in pieces that are shorter than the unit.
        """
        shares.room = [room - owed for room, owed in zip(shares.room, shares.owed, strict=True)]
        for rank in sorted(range(self.ranks), key=shares.room.__getitem__):
            while (excess := -shares.room[rank]) > 0:
                able = [piece for piece in shares.pieces[rank] if len(piece) >= unit]
                if not able:
                    return False
                # the shortest that has enough tokens, or else the longest
                piece = min(able, key=lambda p: (p.start, max(0, excess - len(p) // unit * unit), len(p), p.document))
                size = min(excess, len(piece) // unit * unit)
                target = shares.choose(size)
                size = min(size, shares.room[target])
                shares.move(rank, piece, piece.start, piece.start + size, target)
        start = 0
        for rank, (room, owed) in enumerate(zip(shares.room, shares.owed, strict=True)):
            if room + owed:
                shares.give(rank, Piece(len(self.lengths), start, start + room + owed), 0)
            start += room + owed
        return True


def _cheapest(items: Iterable[tuple[int, int, int]], wanted: Sequence[int]) -> tuple[int, ...] | None:
    """Return the items of least total cost whose values have a wanted sum modulo 16, by dynamic programming.

    Args:
        items: cost, number and value of each item, by ascending cost.
        wanted: the sums; of two with the same cost the first is taken.

    Returns:
        the numbers of the items; None if no items have such a sum.
    """
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}  # for each sum: the least cost, and the items
    targets = [total % CUT for total in wanted]
    for cost, number, value in items:
        if min((best[total][0] for total in targets if total in best), default=cost + 1) <= cost:
            break  # no selection with this item or a later one costs less
        for total, (paid, numbers) in list(best.items()):
            total = (total + value) % CUT
            if total not in best or paid + cost < best[total][0]:
                best[total] = paid + cost, (*numbers, number)
    found = [best[total] for total in targets if total in best]
    return min(found, key=lambda selection: selection[0])[1] if found else None
