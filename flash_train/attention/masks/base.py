"""The interface of a mask, bands, and the conjunction that ``&`` builds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from flash_train.attention.checks import integer
from flash_train.attention.masks.registry import DeviceTerm, register_class
from flash_train.attention.packing import Entry, Span

#: the state of a block in a map: no pair attends, some pairs do, or all do
SKIPPED, PARTIAL, WHOLE = 0, 1, 2
UNBOUNDED = 2**30  #: larger than the length of any sequence
MAP_BLOCK = 128  #: queries and keys per block of a map, unless a ``BlockSparse`` term fixes them


class Lowered(NamedTuple):
    """A mask in the kernels' form: a band, and terms that they evaluate for each pair inside the band.

    Attributes:
        left: bound of the band as in ``Window``; -1 for no bound.
        right: likewise.
        terms: names of the terms, joined by commas.
        tensors: the tensors of all terms, in order.
        tail: the terms restrict the last ``tail`` keys only; -1: all keys.
    """

    left: int
    right: int
    terms: str
    tensors: list[Tensor]
    tail: int


class BlockMap(NamedTuple):
    """The states of blocks that are known before the kernels run, without the mask's band.

    Attributes:
        states: int8 (entries or 1, heads or 1, query blocks, key blocks). No pair of a ``SKIPPED`` block attends. In a
            ``WHOLE`` block every pair passes all terms except the band.
        block_q: queries per block.
        block_k: keys per block.
    """

    states: Tensor
    block_q: int
    block_k: int


class TermParts(NamedTuple):
    """One term as plain values, from which ``Mask.from_parts`` makes an equal term."""

    integers: tuple[int, ...] = ()
    tensors: tuple[Tensor, ...] = ()


class Mask:
    """A rule over (query position, key position) within one sequence.

    A new term is one subclass. It sets ``kind`` and ``tensors`` and defines ``attends``, which is enough for the dense
    backends and the FLOP counts. ``device_term`` lets the kernels run it, and ``to_parts`` with ``from_parts`` lets the
    dense backends run it in a traced program. All other methods have defaults that are right for any rule; override
    them to skip blocks and to check arguments. A subclass of a term needs its own ``kind`` if its rule differs.
    """

    #: name of the term in operators and saved programs, unique among terms; a class that sets it is registered
    kind: ClassVar[str] = ""

    #: every tensor that the rule reads
    tensors: tuple[Tensor, ...] = ()

    #: (queries, keys) per block if blocks define the rule
    block_sizes: tuple[int, int] | None = None

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        if "kind" in cls.__dict__:
            register_class(cls)

    @property
    def device(self) -> torch.device | None:
        """Device of the mask's tensors; None if it has none."""
        return self.tensors[0].device if self.tensors else None

    @property
    def per_entry(self) -> bool:
        """Whether the rule may differ between sequences of equal lengths; if not, one dense mask serves a batch."""
        return True

    def dense(
        self,
        entry: Entry,
        n_heads: int = 1,
        device: torch.device | str | None = None,
        queries: range | Span | None = None,
        keys: range | Span | None = None,
    ) -> Tensor:
        """Return the rule as bool (1 or n_heads, queries, keys), True if the query attends to the key.

        ``queries`` and ``keys`` choose a part of the sequence; None takes all.
        """
        queries = Span(0, entry.len_q) if queries is None else queries
        keys = Span(0, entry.len_k) if keys is None else keys
        q, k = (torch.arange(r.start, r.stop, device=self.device or device) for r in (queries, keys))
        shape = (queries.stop - queries.start, keys.stop - keys.start)
        return self.attends(entry, q[:, None], k[None, :], n_heads).expand(-1, *shape).to(device)

    def attends(self, entry: Entry, q: Tensor, k: Tensor, n_heads: int) -> Tensor:
        """Return bool (1 or n_heads, M, N) for int64 positions ``q`` (M, 1) and ``k`` (1, N) within the sequence."""
        raise NotImplementedError

    def blocks(self, entry: Entry, block_q: int, block_k: int, n_heads: int = 1) -> Tensor:
        """Return the states of the blocks of one sequence, int8 (1 or n_heads, query blocks, key blocks).

        ``SKIPPED``: no pair attends, and the kernels do not visit the block. ``WHOLE``: every pair attends, and the
        kernels do not evaluate the rule. ``PARTIAL``: the kernels evaluate the rule, unless ``block_map`` knows more.
        """
        shape = (1, -(-entry.len_q // block_q), -(-entry.len_k // block_k))
        return clamp_last_block(torch.full(shape, PARTIAL, dtype=torch.int8), entry, block_k)

    def pairs(self, entry: Entry, n_heads: int = 1) -> int:
        """Count the (query, key) pairs that attend, summed over all heads. May read the mask's tensors."""
        dense = self.dense(entry, n_heads)
        return int(dense.sum()) * (n_heads if dense.shape[0] == 1 else 1)

    def lower(self) -> Lowered:
        """Return the mask in the kernels' form. By default: no band, and one term that ``device_term`` evaluates."""
        return Lowered(-1, -1, self.kind or type(self).__qualname__, [x.contiguous() for x in self.tensors], -1)

    @classmethod
    def device_term(cls, tensors: Iterator[Tensor]) -> DeviceTerm:
        """Return the ``@triton.jit`` function ``(entry, head, q, k, *arguments) -> bool tile`` and its arguments.

        Import Triton inside this method: masks also serve machines without Triton.

        Args:
            tensors: the tensors of all lowered terms; take this term's tensors with ``next``.
        """
        raise ValueError(
            f"mask={cls.__name__}: must be a term that defines device_term, for this project's kernels; or use another "
            "backend, such as standard"
        )

    def to_parts(self) -> TermParts:
        """Return the term as integers and tensors, which a PyTorch operator accepts.

        Raises:
            ValueError: only Python can evaluate this term.
        """
        raise ValueError(
            f"mask={type(self).__name__}: must be a term that defines to_parts and from_parts, for a dense backend in "
            "a traced program; or use backend=flash"
        )

    @classmethod
    def from_parts(cls, integers: Iterator[int], tensors: Iterator[Tensor]) -> Mask:
        """Make the term from its parts; take as many from each iterator as ``to_parts`` returned."""
        raise NotImplementedError

    def block_map(self, len_q: int, len_k: int, packed: bool, block: tuple[int, int] | None = None) -> BlockMap | None:
        """Return the states of blocks if the mask knows them without a synchronisation, else None.

        Args:
            len_q, len_k: lengths; packed, rows of the tensors.
            packed: whether the tensors are packed.
            block: (queries, keys) per block that another term requires; None leaves the choice.
        """
        return None

    def validate(self, batch: int, len_q: int, len_k: int, n_heads: int, device: torch.device, packed: bool) -> None:
        """Raise ValueError or TypeError if the mask's tensors do not fit the call's.

        Packed, ``batch`` is the number of entries, and the lengths are the tensors' rows.
        """

    def __and__(self, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            return NotImplemented
        return _intersect(self, other)


class Band(Mask):
    """Query ``i`` attends to the keys from ``i + shift - left`` to ``i + shift + right``, shift = len_k - len_q."""

    kind = "band"
    left: int | None
    right: int | None

    @property
    def per_entry(self) -> bool:
        return False

    def attends(self, entry: Entry, q: Tensor, k: Tensor, n_heads: int) -> Tensor:
        aligned = q + (entry.len_k - entry.len_q)
        visible = torch.ones((), dtype=torch.bool, device=q.device).expand(torch.broadcast_shapes(q.shape, k.shape))
        if self.left is not None:
            visible = visible & (k >= aligned - self.left)
        if self.right is not None:
            visible = visible & (k <= aligned + self.right)
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
        return clamp_last_block((visited.to(torch.int8) + (visited & whole).to(torch.int8))[None], entry, block_k)

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
        left, right = self.to_parts().integers
        return Lowered(left, right, "", [], -1)

    def to_parts(self) -> TermParts:
        return TermParts((-1 if self.left is None else self.left, -1 if self.right is None else self.right))

    @classmethod
    def from_parts(cls, integers: Iterator[int], tensors: Iterator[Tensor]) -> Mask:
        left, right = next(integers), next(integers)
        return Window(None if left < 0 else left, None if right < 0 else right)


@dataclass(frozen=True)
class Full(Band):
    """Every query attends to every key."""

    left = right = None


@dataclass(frozen=True)
class Causal(Band):
    """A query attends to the keys up to its own position.

    With ``len_q > len_k`` the first queries attend to no key, and their output is exactly 0.
    """

    left = None
    right = 0


@dataclass(frozen=True)
class Window(Band):
    """A query attends to ``left`` keys before its own position, the position itself, and ``right`` keys after it.

    ``None`` leaves a side unbounded, as does any bound of 2**30 or more: no sequence is that long, and the kernels
    count positions in int32. ``Window(4095) & Causal()`` is a causal window of 4,096 keys.

    Raises:
        ValueError: a bound that is negative or not an integer.
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
            if bound is not value or bound >= UNBOUNDED:
                object.__setattr__(self, name, bound if bound < UNBOUNDED else None)


@dataclass(frozen=True)
class And(Mask):
    """A mask whose pairs attend under every term. ``&`` builds it, with at most one band, which comes first."""

    terms: tuple[Mask, ...]

    def __post_init__(self) -> None:
        if any(isinstance(term, Band) for term in self.terms[1:]):
            names = ", ".join(term.kind for term in self.terms)
            raise ValueError(f"And({names}): must have one band at most, and first; combine masks with &")

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
        lowered = [term.lower() for term in self.terms]
        named = [term for term in lowered if term.terms]
        tails = [term.tail for term in named]
        return Lowered(
            lowered[0].left,
            lowered[0].right,
            ",".join(term.terms for term in named),
            [tensor for term in named for tensor in term.tensors],
            max(tails) if tails and min(tails) >= 0 else -1,
        )

    def block_map(self, len_q: int, len_k: int, packed: bool, block: tuple[int, int] | None = None) -> BlockMap | None:
        sizes = {term.block_sizes for term in self.terms if term.block_sizes is not None}
        if len(sizes) > 1:
            raise ValueError(f"BlockSparse terms have blocks of {sorted(sizes)}: must be equal to be composed")
        block = next(iter(sizes), block)
        maps_or_none = [term.block_map(len_q, len_k, packed, block) for term in self.terms]
        maps = [found for found in maps_or_none if found is not None]
        if not maps:
            return None
        rows, columns = (min(m.states.shape[dim] for m in maps) for dim in (2, 3))
        states = maps[0].states[:, :, :rows, :columns]
        for other in maps[1:]:
            states = torch.minimum(states, other.states[:, :, :rows, :columns])
        if len(maps) < sum(not isinstance(term, Band) for term in self.terms):  # a term without a map: check all pairs
            states = states.clamp(max=PARTIAL)
        return BlockMap(states, maps[0].block_q, maps[0].block_k)

    def validate(self, batch: int, len_q: int, len_k: int, n_heads: int, device: torch.device, packed: bool) -> None:
        for term in self.terms:
            term.validate(batch, len_q, len_k, n_heads, device, packed)


def _intersect(a: Mask, b: Mask) -> Mask:
    terms = [term for mask in (a, b) for term in (mask.terms if isinstance(mask, And) else (mask,))]
    bands = [term for term in terms if isinstance(term, Band)]
    others = tuple(term for term in terms if not isinstance(term, Band))
    left, right = None, None
    for band in bands:
        left, right = _tighter_bound(left, band.left), _tighter_bound(right, band.right)
    if left is None and right in (None, 0):
        both: Band = Full() if right is None else Causal()
    else:
        both = Window(left, right)
    if not others:
        return both
    kept = others if isinstance(both, Full) else (both, *others)
    return kept[0] if len(kept) == 1 else And(kept)


def _tighter_bound(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def clamp_last_block(states: Tensor, entry: Entry, block_k: int) -> Tensor:
    """Make a key block that extends past the sequence's end at most PARTIAL, since the kernels mask its end."""
    if entry.len_k % block_k and states.shape[-1]:
        states[..., -1] = states[..., -1].clamp(max=PARTIAL)
    return states


def check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    """Raise ValueError unless the mask's tensor is on the device of q."""
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device} and q on {device}: must be the same device")
