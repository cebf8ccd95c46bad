"""The tiles of Hopper's kernels, and the choice among them for a call."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flash_train.attention.kernels.call import UNUSED, Call
from flash_train.attention.kernels.portable.tiles import Tile


@dataclass(frozen=True)
class ForwardTile:
    """Consumers of 64 queries each, keys per step, and stages of the pipelines of queries, of keys and of values."""

    consumers: int
    block_n: int
    q_stages: int
    k_stages: int
    v_stages: int
    pingpong: bool = True

    @property
    def portable(self) -> Tile:
        """The same sizes as a ``Tile``, for the lists of tiles of a mask."""
        return Tile(64 * self.consumers, self.block_n, 4, self.k_stages)


@dataclass(frozen=True)
class DQTile:
    """Keys per step, and stages of the pipelines of keys and of values. A tile always has 128 queries."""

    block_n: int
    k_stages: int
    v_stages: int

    @property
    def portable(self) -> Tile:
        return Tile(128, self.block_n, 4, self.k_stages)


#: by columns of a tile
FORWARD = {64: ForwardTile(2, 128, 2, 4, 4), 128: ForwardTile(2, 128, 2, 2, 3), 256: ForwardTile(2, 64, 1, 2, 3)}
LONG = ForwardTile(3, 128, 2, 3, 3)  #: for 64 columns and many keys: two consumers do not keep the SM busy
LONG_WALK = 2048  #: from so many keys on
BACKWARD = {64: Tile(128, 128, 4, 2), 128: Tile(64, 128, 4, 2), 256: Tile(64, 64, 4, 2)}
NARROW = BACKWARD[128]  #: also for 64 columns, if dropout, a softcap or terms take registers
WIDEST_ACCUMULATOR = 128  #: columns; for wider heads dQ has its own kernel instead of an accumulator in memory
DQ = {64: DQTile(64, 4, 4), 128: DQTile(64, 4, 4), 256: DQTile(64, 2, 1)}
NARROW_DQ = DQTile(32, 4, 2)  #: for 256 columns, if a softcap, a bias or terms take registers


def forward_tile(columns: int, keys: int, call: Call) -> ForwardTile:
    tile = FORWARD[columns]
    if call.has_terms:  # terms may take registers for every pair
        return replace(tile, block_n=64)
    # dropout and biases need registers, and lists of tiles do not know blocks of 192 queries
    plain = call.rng is None and not call.softcap and call.alibi_slopes is None and not call.has_lists
    walk = keys if call.bounds.right == UNUSED else keys // 2  # a causal mask hides half of the keys on average
    if call.bounds.left != UNUSED:
        walk = min(walk, call.bounds.left)
    return LONG if columns == 64 and walk >= LONG_WALK and plain else tile


def backward_tile(columns: int, call: Call) -> Tile:
    """Return the tile of queries and keys for dK and dV."""
    crowded = call.rng is not None or call.softcap or call.has_terms
    return NARROW if columns == 64 and crowded else BACKWARD[columns]


def dq_tile(columns: int, call: Call) -> DQTile:
    biased = call.has_terms or bool(call.softcap) or call.alibi_slopes is not None
    return NARROW_DQ if columns > 128 and biased else DQ[columns]
