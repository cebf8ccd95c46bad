"""Which tiles Hopper's kernels take: tables, and the choice of a call among them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flash_train.attention.kernels.call import UNUSED, Call
from flash_train.attention.kernels.portable.tiles import Tile


@dataclass(frozen=True)
class ForwardTile:
    """Consumers of 64 queries each, keys per step, and stages of the rings of queries, of keys and of values."""

    consumers: int
    block_n: int
    q_stages: int
    k_stages: int
    v_stages: int
    pingpong: bool = True

    @property
    def portable(self) -> Tile:
        """The same sizes, as the masks' lists of tiles want them."""
        return Tile(64 * self.consumers, self.block_n, 4, self.k_stages)


@dataclass(frozen=True)
class DQTile:
    """Keys per step, and stages of the rings of keys and of values; queries are always 128."""

    block_n: int
    k_stages: int
    v_stages: int

    @property
    def portable(self) -> Tile:
        return Tile(128, self.block_n, 4, self.k_stages)


#: by columns of a tile
FORWARD = {64: ForwardTile(2, 128, 2, 4, 4), 128: ForwardTile(2, 128, 2, 2, 3), 256: ForwardTile(2, 64, 1, 2, 3)}
LONG = ForwardTile(3, 128, 2, 3, 3)  #: for 64 columns and long walks: two consumers don't keep the processor busy
LONG_WALK = 2048  #: keys
BACKWARD = {64: Tile(128, 128, 4, 2), 128: Tile(64, 128, 4, 2), 256: Tile(64, 64, 4, 2)}
NARROW = BACKWARD[128]  #: for 64 columns, too, where dropout, a softcap or terms take registers
WIDEST_SUM = 128  #: columns; of wider heads dQ is not added up in memory, but has a kernel of its own
DQ = {64: DQTile(64, 4, 4), 128: DQTile(64, 4, 4), 256: DQTile(64, 2, 1)}
NARROW_DQ = DQTile(32, 4, 2)  #: for 256 columns, where a softcap, a bias or terms take registers, too


def forward_tile(columns: int, keys: int, call: Call) -> ForwardTile:
    tile = FORWARD[columns]
    if call.has_terms:  # numbers of their own for every pair
        return replace(tile, block_n=64)
    # what draws or biases wants registers, and lists of blocks have no blocks of 192 queries
    plain = call.rng is None and not call.softcap and call.alibi_slopes is None and not call.has_lists
    walk = keys if call.bounds.right == UNUSED else keys // 2  # with as many queries, half of the keys are hidden
    if call.bounds.left != UNUSED:
        walk = min(walk, call.bounds.left)
    return LONG if columns == 64 and walk >= LONG_WALK and plain else tile


def backward_tile(columns: int, call: Call) -> Tile:
    """Of queries and keys, for dK and dV."""
    crowded = call.rng is not None or call.softcap or call.has_terms
    return NARROW if columns == 64 and crowded else BACKWARD[columns]


def dq_tile(columns: int, call: Call) -> DQTile:
    biased = call.has_terms or bool(call.softcap) or call.alibi_slopes is not None
    return NARROW_DQ if columns > 128 and biased else DQ[columns]
