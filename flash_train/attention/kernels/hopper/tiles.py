"""Tile shapes of Hopper's kernels: tables, and the choice for a call."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flash_train.attention.kernels.call import UNUSED, Call
from flash_train.attention.kernels.launch_options import present_options
from flash_train.attention.kernels.tile_sizes import Tile


@dataclass(frozen=True)
class ForwardTile:
    """Consumers of 64 queries each, keys per step, and pipeline stages of queries, keys and values."""

    consumers: int
    block_n: int
    q_stages: int
    k_stages: int
    v_stages: int
    pingpong: bool = True

    @property
    def as_tile(self) -> Tile:
        """The same sizes as a ``Tile``, for the mask's lists of tiles."""
        return Tile(64 * self.consumers, self.block_n, 4, self.k_stages)


@dataclass(frozen=True)
class DQTile:
    """Keys per step, and pipeline stages of keys and values; a tile always has 128 queries."""

    block_n: int
    k_stages: int
    v_stages: int

    @property
    def as_tile(self) -> Tile:
        return Tile(128, self.block_n, 4, self.k_stages)


#: by the columns of a tile
FORWARD = {64: ForwardTile(2, 128, 2, 4, 4), 128: ForwardTile(2, 128, 2, 2, 3), 256: ForwardTile(2, 64, 1, 2, 3)}
#: for 64 columns and ``LaunchOptions.long_walk`` keys or more: two consumers would not keep the SM busy
LONG = ForwardTile(3, 128, 2, 3, 3)
BACKWARD = {64: Tile(128, 128, 4, 2), 128: Tile(64, 128, 4, 2), 256: Tile(64, 64, 4, 2)}
NARROW = BACKWARD[128]  #: also for 64 columns if dropout, a softcap or terms need registers
WIDEST_DQ_ACCUMULATOR = 128  #: columns; wider heads have a separate kernel for dQ instead of an accumulator in memory
DQ = {64: DQTile(64, 4, 4), 128: DQTile(64, 4, 4), 256: DQTile(64, 2, 1)}
NARROW_DQ = DQTile(32, 4, 2)  #: for 256 columns if a softcap, ALiBi or terms need registers, too


def forward_tile(columns: int, keys: int, call: Call) -> ForwardTile:
    tile = FORWARD[columns]
    if call.has_terms:  # they may load a number for every pair
        return replace(tile, block_n=64)
    # dropout, softcap and ALiBi need registers, and lists of tiles have no blocks of 192 queries
    plain = call.rng is None and not call.softcap and call.alibi_slopes is None and not call.has_lists
    walk = (
        keys if call.bounds.right == UNUSED else keys // 2
    )  # if there are as many queries, half of the keys are hidden
    if call.bounds.left != UNUSED:
        walk = min(walk, call.bounds.left)
    return LONG if columns == 64 and walk >= present_options().long_walk and plain else tile


def backward_tile(columns: int, call: Call) -> Tile:
    """Return the queries and keys of a tile of the dK and dV kernel."""
    crowded = call.rng is not None or call.softcap or call.has_terms
    return NARROW if columns == 64 and crowded else BACKWARD[columns]


def dq_tile(columns: int, call: Call) -> DQTile:
    biased = call.has_terms or bool(call.softcap) or call.alibi_slopes is not None
    return NARROW_DQ if columns > 128 and biased else DQ[columns]
