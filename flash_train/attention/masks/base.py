"""The rule itself, its bands, and what ``&`` makes of rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flash_train.attention.checks import integer
from flash_train.attention.packing import Entry, Span

SKIPPED, PARTIAL, WHOLE = 0, 1, 2
FARTHEST = 2**30  #: a bound that no sequence reaches
MAP_BLOCK = 128  #: rows and columns of a block of a map that a mask draws itself


class Lowered(NamedTuple):
    """What the kernels are told: a band, and terms that are evaluated element by element inside it.

    ``left`` and ``right`` bound the band (-1: unbounded). ``terms`` names the element-wise terms, comma-separated;
    ``tensors`` holds their tensors in order. They concern the last ``tail`` keys only (-1: all of them).
    """

    left: int
    right: int
    terms: str
    tensors: list[Tensor]
    tail: int


class BlockMap(NamedTuple):
    """What is known of blocks beforehand, and their sizes.

    ``states``: int8 (entries or 1, heads or 1, query blocks, key blocks). ``SKIPPED`` blocks hold nothing; in ``WHOLE``
    ones all terms but a band let every pair pass.
    """

    states: Tensor
    block_q: int
    block_k: int


class Mask:
    """A rule over (query position, key position) within one sequence."""

    #: where the mask's tensors lie; None where it has none
    device: torch.device | None = None

    #: every tensor that the rule reads
    tensors: tuple[Tensor, ...] = ()

    #: (queries, keys) per block, where the rule is made of blocks
    sizes: tuple[int, int] | None = None

    @property
    def per_entry(self) -> bool:
        """Whether the rule may differ between sequences of equal lengths; if not, one serves a whole batch."""
        return False

    def dense(
        self,
        entry: Entry,
        n_heads: int = 1,
        device: torch.device | str | None = None,
        queries: range | Span | None = None,
        keys: range | Span | None = None,
    ) -> Tensor:
        """The rule as bool (1 or n_heads, queries, keys), True where the query attends to the key.

        ``queries`` and ``keys`` choose a part of the sequence; all of it without them.
        """
        queries = Span(0, entry.len_q) if queries is None else queries
        keys = Span(0, entry.len_k) if keys is None else keys
        q, k = (torch.arange(r.start, r.stop, device=self.device or device) for r in (queries, keys))
        shape = (queries.stop - queries.start, keys.stop - keys.start)
        return self.attends(entry, q[:, None], k[None, :], n_heads).expand(-1, *shape).to(device)

    def attends(self, entry: Entry, q: Tensor, k: Tensor, n_heads: int) -> Tensor:
        """bool (1 or n_heads, M, N) for int64 positions ``q`` (M, 1) and ``k`` (1, N) within the sequence."""
        raise NotImplementedError

    def blocks(self, entry: Entry, block_q: int, block_k: int, n_heads: int = 1) -> Tensor:
        """Per block of queries and keys, int8 (1 or n_heads, query blocks, key blocks).

        ``SKIPPED``: the kernels do not visit it, and it holds no pair. ``WHOLE``: every pair in it attends and the
        kernels do not look. ``PARTIAL``: the kernels evaluate the rule, unless ``block_map`` knows better.
        """
        shape = (1, -(-entry.len_q // block_q), -(-entry.len_k // block_k))
        return mask_end(torch.full(shape, PARTIAL, dtype=torch.int8), entry, block_k)

    def pairs(self, entry: Entry, n_heads: int = 1) -> int:
        """How many (query, key) pairs attend, over all heads. May read tensors of the mask."""
        dense = self.dense(entry, n_heads)
        return int(dense.sum()) * (n_heads if dense.shape[0] == 1 else 1)

    def lower(self) -> Lowered:
        """What the kernels are told."""
        return Lowered(-1, -1, "", [], -1)

    def block_map(self, len_q: int, len_k: int, packed: bool, block: tuple[int, int] | None = None) -> BlockMap | None:
        """Which blocks the kernels need to visit within the band, and in which of them to look at pairs, where this
        mask knows; without a synchronisation."""
        return None

    def validate(self, batch: int, len_q: int, len_k: int, n_heads: int, device: torch.device, packed: bool) -> None:
        """Raise ValueError or TypeError where the mask's tensors do not fit the call's.

        Packed, ``batch`` counts the entries and the lengths are the tensors' total rows.
        """

    def __and__(self, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            return NotImplemented
        return _both(self, other)


class Band(Mask):
    """Query ``i`` sees the keys from ``i + shift - left`` to ``i + shift + right``, shift = len_k - len_q."""

    left: int | None
    right: int | None

    def attends(self, entry: Entry, q: Tensor, k: Tensor, n_heads: int) -> Tensor:
        own = q + (entry.len_k - entry.len_q)
        visible = torch.ones((), dtype=torch.bool, device=q.device).expand(torch.broadcast_shapes(q.shape, k.shape))
        if self.left is not None:
            visible = visible & (k >= own - self.left)
        if self.right is not None:
            visible = visible & (k <= own + self.right)
        return visible[None]

    def blocks(self, entry: Entry, block_q: int, block_k: int, n_heads: int = 1) -> Tensor:
        shift = entry.len_k - entry.len_q
        q = torch.arange(0, entry.len_q, block_q)[:, None] + shift
        k = torch.arange(0, entry.len_k, block_k)[None, :]
        last_q, last_k = q + block_q - 1, k + block_k - 1
        visited = torch.ones(q.shape[0], k.shape[1], dtype=torch.bool)
        whole = visited.clone()
        if self.left is not None:
            visited &= last_k >= q - self.left
            whole &= k >= last_q - self.left
        if self.right is not None:
            visited &= k <= last_q + self.right
            whole &= last_k <= q + self.right
        return mask_end((visited.to(torch.int8) + (visited & whole).to(torch.int8))[None], entry, block_k)

    def pairs(self, entry: Entry, n_heads: int = 1) -> int:
        m, n = entry.len_q, entry.len_k

        def ramp(x: int) -> int:  # sum of clamp(t + 1, 0, n) over t <= x
            return 0 if x < 0 else (x + 1) * (x + 2) // 2 if x < n else n * (n + 1) // 2 + (x - n + 1) * n

        def up_to(c: int) -> int:  # pairs with key - query <= c
            return ramp(m - 1 + c) - ramp(c - 1)

        below = 0 if self.left is None else up_to(n - m - self.left - 1)
        above = m * n if self.right is None else up_to(n - m + self.right)
        return n_heads * max(0, above - below)

    def lower(self) -> Lowered:
        return Lowered(-1 if self.left is None else self.left, -1 if self.right is None else self.right, "", [], -1)


@dataclass(frozen=True)
class Full(Band):
    """Every query attends to every key."""

    left = right = None


@dataclass(frozen=True)
class Causal(Band):
    """A query attends to the keys up to its own position.

    With ``len_q > len_k`` the first queries see nothing and their output is exactly 0.
    """

    left = None
    right = 0


@dataclass(frozen=True)
class Window(Band):
    """A query attends to ``left`` keys before its own position, the position itself, and ``right`` keys after it.

    ``None`` leaves a side unbounded, as does any bound of 2**30 or more: no sequence is as long, and the kernels count
    positions in int32. ``Window(4095) & Causal()`` is a causal window of 4,096 keys.
    """

    left: int | None = None
    right: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("left", self.left), ("right", self.right)):
            if value is None:
                continue
            bound = integer(value)
            if bound is None or bound < 0:
                raise ValueError(f"Window({name}={value!r}): must be an integer >= 0, or None for no bound")
            if bound is not value or bound >= FARTHEST:
                object.__setattr__(self, name, bound if bound < FARTHEST else None)


@dataclass(frozen=True)
class And(Mask):
    """Pairs that every term attends: what ``&`` builds, with at most one band, which comes first."""

    terms: tuple[Mask, ...]

    @property
    def device(self) -> torch.device | None:  # type: ignore[override]
        return next((term.device for term in self.terms if term.device is not None), None)

    @property
    def tensors(self) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(tensor for term in self.terms for tensor in term.tensors)

    @property
    def per_entry(self) -> bool:
        return any(term.per_entry for term in self.terms)

    def attends(self, entry: Entry, q: Tensor, k: Tensor, n_heads: int) -> Tensor:
        visible = self.terms[0].attends(entry, q, k, n_heads)
        for term in self.terms[1:]:
            visible = visible & term.attends(entry, q, k, n_heads)
        return visible

    def blocks(self, entry: Entry, block_q: int, block_k: int, n_heads: int = 1) -> Tensor:
        states = self.terms[0].blocks(entry, block_q, block_k, n_heads)
        for term in self.terms[1:]:
            states = torch.minimum(states, term.blocks(entry, block_q, block_k, n_heads))
        return states

    def lower(self) -> Lowered:
        parts = [term.lower() for term in self.terms]
        named = [part for part in parts if part.terms]
        tails = [part.tail for part in named]
        return Lowered(
            parts[0].left,
            parts[0].right,
            ",".join(part.terms for part in named),
            [tensor for part in named for tensor in part.tensors],
            max(tails) if tails and min(tails) >= 0 else -1,
        )

    def block_map(self, len_q: int, len_k: int, packed: bool, block: tuple[int, int] | None = None) -> BlockMap | None:
        sizes = {term.sizes for term in self.terms if term.sizes is not None}
        if len(sizes) > 1:
            raise ValueError(f"BlockSparse terms have blocks of {sorted(sizes)}: must be equal to be composed")
        block = next(iter(sizes), block)
        drawn = [term.block_map(len_q, len_k, packed, block) for term in self.terms]
        maps = [found for found in drawn if found is not None]
        if not maps:
            return None
        rows, columns = (min(m.states.shape[dim] for m in maps) for dim in (2, 3))
        states = maps[0].states[:, :, :rows, :columns]
        for other in maps[1:]:
            states = torch.minimum(states, other.states[:, :, :rows, :columns])
        if len(maps) < sum(not isinstance(term, Band) for term in self.terms):  # there are others, which ask every pair
            states = states.clamp(max=PARTIAL)
        return BlockMap(states, maps[0].block_q, maps[0].block_k)

    def validate(self, batch: int, len_q: int, len_k: int, n_heads: int, device: torch.device, packed: bool) -> None:
        for term in self.terms:
            term.validate(batch, len_q, len_k, n_heads, device, packed)


def _both(a: Mask, b: Mask) -> Mask:
    terms = [term for mask in (a, b) for term in (mask.terms if isinstance(mask, And) else (mask,))]
    bands = [term for term in terms if isinstance(term, Band)]
    others = tuple(term for term in terms if not isinstance(term, Band))
    left, right = None, None
    for band in bands:
        left, right = _tighter(left, band.left), _tighter(right, band.right)
    if left is None and right in (None, 0):
        both: Band = Full() if right is None else Causal()
    else:
        both = Window(left, right)
    if not others:
        return both
    kept = others if isinstance(both, Full) else (both, *others)
    return kept[0] if len(kept) == 1 else And(kept)


def _tighter(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def mask_end(states: Tensor, entry: Entry, block_k: int) -> Tensor:
    """The block of keys that the sequence's end cuts is never whole."""
    if entry.len_k % block_k and states.shape[-1]:
        states[..., -1] = states[..., -1].clamp(max=PARTIAL)
    return states
