"""Attention dropout: the generator state, and the map from (state, entry, head, query, key) to one random byte.

The mask is a pure function of these coordinates. So it is the same for every tile size, backend and packing, and in the
forward and the backward. One call of Philox4x32 with 7 rounds (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC'11) gives 16 random bytes, one for each of 16 elements.

**Stream.** The 64-bit seed and the 64-bit offset become one 64-bit key: the first two words of
``philox(counter=(offset_lo, offset_hi, 0x666C6173, 0x68747261), key=(seed_lo, seed_hi))``.

**Counter.** The element (query, key) of a head of an entry reads the call

    counter = (4 * (query // 16) + query % 8 // 2,  4 * (key // 16) + key % 8 // 2,  head,  entry)

    word    = 2 * (query % 2) + key % 2
    byte    = 2 * (query // 8 % 2) + key // 8 % 2        (byte 0 is the least significant)

So one call covers rows {r, r + 1, r + 8, r + 9} and columns {c, c + 1, c + 8, c + 9} of a 16 x 16 tile. The map is
symmetric in queries and keys. A thread that holds a tensor-core fragment of S (rows l / 4 + {0, 8}, columns
2 (l % 4) + {0, 1} + 8 j, for lane l) needs two whole words of each call. So does a thread that holds Sᵀ in the
backward. The thread four lanes away needs the other two words.

An element is kept if its byte is below ``k``, which has probability ``k / 256`` exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from flash_train.attention.checks import integer
from flash_train.attention.index_tensors import INTEGERS, check_range
from flash_train.attention.tracing import has_no_values

PHILOX_ROUNDS = 7
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)  #: added to the key after each round
_MASK32 = 0xFFFFFFFF
STREAM_DOMAIN = (0x666C6173, 0x68747261)


class EntryOrigins(NamedTuple):
    """The place of each batch row or packed entry of a call in a larger dropout mask.

    Attributes:
        first: int32 (entries, 3), contiguous, on the device of q: entry, query and key of the larger attention.
        aligned: whether all queries and keys in ``first`` are multiples of 16. The kernels are then faster. They trust
            this flag.
    """

    first: torch.Tensor
    aligned: bool = False

    def validate(self, entries: int, device: torch.device) -> None:
        """Raise ValueError if the tensor does not fit a call with this number of entries; on a CPU also for values."""
        first = self.first
        if not isinstance(first, torch.Tensor):
            raise TypeError(f"EntryOrigins.first is a {type(first).__name__}: must be an int32 tensor")
        if first.dtype != torch.int32 or tuple(first.shape) != (entries, 3) or first.device != device:
            found = f"{first.dtype} of shape {tuple(first.shape)} on {first.device}"
            raise ValueError(f"EntryOrigins.first is {found}: must be torch.int32 of shape ({entries}, 3) on {device}")
        check_range("EntryOrigins.first", first, 2**31)
        if self.aligned and device.type == "cpu" and not has_no_values(first) and bool((first[:, 1:] % 16).any()):
            raise ValueError("EntryOrigins(aligned=True): every query and key must be a multiple of 16")


@dataclass(frozen=True)
class RngState:
    """The generator state of one attention call, and the position of the call in the whole dropout mask.

    Attributes:
        seed: 64-bit integer: a Python int, or an int64 scalar on the device.
        offset: likewise.
        entry: coordinate of the call's first entry. A shard of a larger attention sets the four coordinates to draw
            its part of the larger mask.
        head: coordinate of the call's first head.
        query: coordinate of the call's first query. The kernels are faster if query and key are multiples of 16.
        key: coordinate of the call's first key.
        entries: coordinates of each entry, if the call's entries are pieces of a larger attention's sequences. The
            fields ``entry``, ``query`` and ``key`` must then be 0. Attention to a cache does not accept ``entries``.

    Raises:
        TypeError: ``entries`` that are not ``EntryOrigins``.
        ValueError: a value that is not an integer, or a coordinate outside [0, 2**31).
    """

    seed: int | torch.Tensor
    offset: int | torch.Tensor = 0
    entry: int = 0
    head: int = 0
    query: int = 0
    key: int = 0
    entries: EntryOrigins | None = None

    def __post_init__(self) -> None:
        for name in ("seed", "offset"):
            value = getattr(self, name)
            given: int | torch.Tensor | None = value
            if not isinstance(value, torch.Tensor):
                given = integer(value)
            elif value.numel() != 1 or value.dtype not in INTEGERS:  # no device memory is read
                given = None
            if isinstance(given, int) and not -(2**63) <= given < 2**64:
                raise ValueError(f"RngState({name}={given}): must fit 64 bits")
            if given is None:
                raise ValueError(f"RngState({name}={value!r}): must be an integer, or an int64 scalar on the device")
            if given is not value:
                object.__setattr__(self, name, given)
        for name in ("entry", "head", "query", "key"):
            value = getattr(self, name)
            number = integer(value)
            if number is None or not 0 <= number < 2**31:
                raise ValueError(f"RngState({name}={value!r}): must be an integer in [0, 2**31)")
            if number is not value:
                object.__setattr__(self, name, number)
        if self.entries is not None:
            if not isinstance(self.entries, EntryOrigins):
                raise TypeError(f"RngState(entries={self.entries!r}): must be EntryOrigins, or None")
            if self.entry or self.query or self.key:
                raise ValueError(
                    f"RngState(entry={self.entry}, query={self.query}, key={self.key}) with entries: must be 0"
                )

    @property
    def origin(self) -> tuple[int, int, int, int]:
        """(entry, head, query, key) of the call's first element."""
        return self.entry, self.head, self.query, self.key

    def as_tensor(self, device: torch.device) -> torch.Tensor:
        """Return seed and offset as int64 (2,) on the device, without synchronising with it."""

        def word(value: int | torch.Tensor) -> torch.Tensor:
            if isinstance(value, torch.Tensor):
                return value.to(device=device, dtype=torch.int64).reshape(1)
            return torch.full((1,), _signed64(value), dtype=torch.int64, device=device)

        return torch.cat([word(self.seed), word(self.offset)])


def entry_origin(
    origin: tuple[int, int, int, int], entries: EntryOrigins | None, index: int
) -> tuple[int, int, int, int]:
    """Return (entry, head, query, key) of the first element of a call's entry; reads the tensor of ``entries``."""
    first_entry, head, query, key = origin
    if entries is None:
        return first_entry + index, head, query, key
    entry, query, key = entries.first[index].tolist()
    return entry, head, query, key


def draw_state(device: torch.device) -> torch.Tensor:
    """Draw a new state, int64 (2,), from PyTorch's generator of the device.

    Because the generator is PyTorch's, the state follows ``torch.manual_seed``, activation checkpointing restores it,
    and each replay of a CUDA graph draws another one.
    """
    return torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=device)


def keep_mask(
    state: torch.Tensor, entry: int, head: int | range, queries: torch.Tensor, keys: torch.Tensor, threshold: int
) -> torch.Tensor:
    """Compute the dropout mask of a head, or of several heads, of one entry, in plain PyTorch.

    Tests compare every kernel with it.

    Args:
        state: int64 (2,): seed and offset.
        entry: batch row; packed, number of the entry.
        head: query head, or query heads.
        queries, keys: int64 (m,), (n,): positions within the entry.
        threshold: ``k`` from 1 to 256; an element is kept with probability ``k / 256``.

    Returns:
        bool (m, n) for one head, (heads, m, n) for several, True if the weight is kept.
    """
    queries, keys = queries.to(state.device)[:, None], keys.to(state.device)[None, :]
    heads = torch.tensor(head, dtype=torch.int64, device=state.device)[..., None, None]
    shape = torch.broadcast_shapes(heads.shape, queries.shape, keys.shape)
    words = philox(
        (
            (4 * (queries // 16) + queries % 8 // 2).expand(shape),
            (4 * (keys // 16) + keys % 8 // 2).expand(shape),
            heads.expand(shape),
            torch.full(shape, entry, dtype=torch.int64, device=state.device),
        ),
        stream_key(state),
    )
    word = torch.stack(words, -1).gather(-1, (2 * (queries % 2) + keys % 2).expand(shape)[..., None])[..., 0]
    byte = (word >> (8 * (2 * (queries // 8 % 2) + keys // 8 % 2))) & 0xFF
    return byte < threshold


def stream_key(state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the 64-bit Philox key of (seed, offset), as two int64 scalars below 2**32."""
    seed, offset = state[0], state[1]
    domain = [torch.full_like(seed, word) for word in STREAM_DOMAIN]
    counter = (offset & _MASK32, (offset >> 32) & _MASK32, domain[0], domain[1])
    return philox(counter, (seed & _MASK32, (seed >> 32) & _MASK32))[:2]


def philox(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    key: tuple[torch.Tensor, torch.Tensor],
    rounds: int = PHILOX_ROUNDS,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute Philox4x32 on int64 tensors that hold 32-bit words; return four such tensors."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        high0, low0 = _multiply(c0, PHILOX_MULTIPLIERS[0])
        high1, low1 = _multiply(c2, PHILOX_MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + PHILOX_WEYL[0]) & _MASK32, (k1 + PHILOX_WEYL[1]) & _MASK32
    return c0, c1, c2, c3


def _multiply(a: torch.Tensor, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the high and low words of the 64-bit product of two 32-bit words, computed in int64 without overflow."""
    upper, lower = (a >> 16) * b, (a & 0xFFFF) * b
    return (upper + (lower >> 16)) >> 16, ((upper << 16) + lower) & _MASK32


def _signed64(value: int) -> int:
    value &= 0xFFFFFFFFFFFFFFFF
    return value - 2**64 if value >= 2**63 else value
