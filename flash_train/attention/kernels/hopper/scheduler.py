"""The tile scheduler: the order of the work tiles, the entry, head and rows of each, and its TMA coordinates.

A work tile is a tile of queries (in kernels that loop over keys) or of keys (in kernels that loop over queries) of one
head of one entry. Work tiles are numbered; the scheduler maps a number to a tile.
"""

from typing import Any, NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_train.attention.kernels.device.mask import count_edges, edge_block
from flash_train.attention.packing import Entry

RAGGED = gl.constexpr(1 << 30)
_WARP_LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))


class TileScheduler(NamedTuple):
    """Entries and heads of a launch, and the order of its work tiles: see ``find_work_tile``."""

    cu_q: Any
    cu_k: Any
    n_entries: Any
    seqlen_q: Any  #: packed: rows of the whole tensor
    seqlen_k: Any
    n_heads: Any
    heads_at_once: Any
    n_sms: Any = None  #: work tiles that run at the same time, in kernels that loop over queries


@gluon.jit
def count_work_tiles(scheduler, BLOCK: gl.constexpr):
    """Work tiles of a launch that loops over keys. In packed calls some of them are empty."""
    slots = count_slots(scheduler.cu_q, scheduler.n_entries, scheduler.seqlen_q, BLOCK)
    return scheduler.n_heads * slots * _head_copies(scheduler.cu_q, scheduler.n_entries)


@gluon.jit
def next_work_tile(counter_ptr):
    """Take the next work tile that no program has taken. A program's first tile is its own number.

    Only a partition of one warp may call it: the first lane increments the counter. A scalar atomic would return its
    result through shared memory, where it was once lost. Call it only when the next tile is needed: other programs may
    wait for a tile that was taken too early.
    """
    lane = gl.arange(0, 32, _WARP_LANES)
    taken = gl.atomic_add(counter_ptr + lane * 0, lane * 0 + 1, mask=lane == 0, sem="relaxed")
    return gl.num_programs(0) + gl.max(gl.where(lane == 0, taken, -1), 0)


@gluon.jit
def reset_counter(counter_ptr, tile_id, n_tiles):
    """Set the counter to 0 for the next launch.

    Every work tile increments it once, so that the program with the highest number, past all tiles, is the last one to
    read it.
    """
    lane = gl.arange(0, 32, _WARP_LANES)
    gl.store(counter_ptr + lane * 0, lane * 0, mask=(lane == 0) & (tile_id == n_tiles + gl.num_programs(0) - 1))


@gluon.jit
def find_work_tile(tile_id, scheduler, BLOCK: gl.constexpr, WALKS_KEYS: gl.constexpr, REVERSED: gl.constexpr):
    """(entry, head, first row, whether the tile has rows) of a work tile.

    The order is by groups of ``heads_at_once`` heads, whose rows fit the L2 cache together. Within a group it is tile
    by tile, each tile for all heads. The last group has two to three times as many heads, or all heads if there are
    fewer. Under a causal mask tiles go from long to short, and programs that end with short tiles begin the long ones
    of the next group. At the end of the launch all programs wait for the longest tile that began late. With more heads
    in the last group, its long tiles begin earlier.

    WALKS_KEYS: the kernel loops over keys, and a work tile is one of queries; else it is one of keys. Heads are the
    heads of the tiled tensor. REVERSED: the last tile of an entry comes first; it takes the longest under a causal
    mask.
    """
    slots, heads, last = _groups(scheduler, BLOCK, WALKS_KEYS)
    group = gl.minimum(tile_id // (slots * scheduler.heads_at_once), last)
    first = group * scheduler.heads_at_once
    size = gl.where(group < last, scheduler.heads_at_once, heads - first)
    offset = tile_id - first * slots
    seq, head, tile, tiles = find_tile(offset // size, first + offset % size, scheduler, BLOCK, WALKS_KEYS)
    is_valid = tile < tiles
    if REVERSED:
        tile = tiles - 1 - tile
    return seq, head, tile * BLOCK, is_valid


@gluon.jit
def shifted_work_tile(tile_id, scheduler, GROUPS: gl.constexpr, BLOCK: gl.constexpr):
    """(whether it exists, head, slot) of the tile of keys at the same position GROUPS groups of heads later.

    The last group has another size, and so no tile.
    """
    slots, _, last = _groups(scheduler, BLOCK, False)
    size = slots * scheduler.heads_at_once
    other = tile_id + GROUPS * size
    offset = other % size
    head = other // size * scheduler.heads_at_once + offset % scheduler.heads_at_once
    return (other >= 0) & (other < last * size), head, offset // scheduler.heads_at_once


@gluon.jit
def count_heads(scheduler):
    """Heads of all entries. Entries of a packed call are rows of the same heads."""
    return scheduler.n_heads * _head_copies(scheduler.cu_q, scheduler.n_entries)


@gluon.jit
def _groups(scheduler, BLOCK: gl.constexpr, WALKS_KEYS: gl.constexpr):
    """Slots of a head, heads of all entries, and the index of the last group of heads."""
    cu = scheduler.cu_q if WALKS_KEYS else scheduler.cu_k
    seqlen = scheduler.seqlen_q if WALKS_KEYS else scheduler.seqlen_k
    heads = count_heads(scheduler)
    last = gl.maximum(heads // scheduler.heads_at_once - 2, 0)
    return count_slots(cu, scheduler.n_entries, seqlen, BLOCK), heads, last


@gluon.jit
def find_tile(slot, head, scheduler, BLOCK: gl.constexpr, WALKS_KEYS: gl.constexpr):
    """(entry, its head, tile, tiles of the entry) of a slot. ``head`` counts the heads of all entries.

    A slot with tile >= tiles is empty.
    """
    n_entries = scheduler.n_entries
    cu = scheduler.cu_q if WALKS_KEYS else scheduler.cu_k
    if cu is None:
        entry = head // scheduler.n_heads
        head = head % scheduler.n_heads
        zero = (entry * 0).to(gl.int64)
        seq = Entry(entry, entry.to(gl.int64), zero, zero, scheduler.seqlen_q, scheduler.seqlen_k)
        tile = slot
        tiles = gl.cdiv(scheduler.seqlen_q if WALKS_KEYS else scheduler.seqlen_k, BLOCK)
    else:
        entry = _find_entry(slot, cu, n_entries, BLOCK)
        tile = slot - (gl.load(cu + entry) // BLOCK + entry)
        q_row = gl.load(scheduler.cu_q + entry)
        k_row = gl.load(scheduler.cu_k + entry)
        len_q = gl.load(scheduler.cu_q + entry + 1, mask=entry < n_entries, other=scheduler.seqlen_q) - q_row
        len_k = gl.load(scheduler.cu_k + entry + 1, mask=entry < n_entries, other=scheduler.seqlen_k) - k_row
        # the rows past the last boundary are an entry without keys (or without queries)
        if WALKS_KEYS:
            len_k = gl.where(entry < n_entries, len_k, 0)
            tiles = gl.cdiv(len_q, BLOCK)
        else:
            len_q = gl.where(entry < n_entries, len_q, 0)
            tiles = gl.cdiv(len_k, BLOCK)
        seq = Entry(entry, (entry * 0).to(gl.int64), q_row.to(gl.int64), k_row.to(gl.int64), len_q, len_k)
    return seq, head, tile, tiles


@gluon.jit
def tma_coords(seq, head, row, first_row, rows, PACKED: gl.constexpr):
    """Coordinates of a tile in the descriptors of ``descriptors.describe``.

    TMA reads zeros for rows past the entry's last one, and does not write them. In packed calls the two leading
    dimensions select the entry: their strides add up to its first row modulo 2**64 bytes. The last row of the entry is
    the last row of the row dimension.
    """
    zero = gl.to_tensor(0)
    if PACKED:
        return gl.to_tensor(RAGGED), (first_row + rows).to(gl.int32), head, RAGGED - rows + row, zero
    else:
        return seq.batch.to(gl.int32), head, row, zero


@gluon.jit
def key_block_start(visits, mask, seq, j, BLOCK_N: gl.constexpr):
    """The first key of block j of a loop: first the blocks that need the mask, then the others.

    If there is no block, it is past the last key, where TMA reads zeros.
    """
    edges = count_edges(visits)
    block = gl.where(j < edges, edge_block(visits, mask, j), visits.clear_from + j - edges)
    if mask.tiles is None:
        start = block * BLOCK_N
    else:
        start = (gl.load(visits.list + block, mask=visits.stop > visits.first, other=0) >> 1) * BLOCK_N
    return gl.where(visits.stop > visits.first, start, seq.len_k)


@gluon.jit
def is_reversed(tile_id, scheduler):
    """Whether a tile of keys goes through its blocks of queries from the last to the first.

    The direction alternates between rounds of work tiles, so that programs that run at the same time read the same
    queries from the second-level cache. docs/hopper_log.md explains why, under "Order of the work tiles".
    """
    return tile_id // scheduler.n_sms % 2 == 0


@gluon.jit
def query_tile(visits, mask, kv_head, i, reverse, GROUP: gl.constexpr, BLOCK_M: gl.constexpr):
    """(head, first query) of step i.

    With one head per key head, blocks that need the mask come first. With GROUP heads, each block comes for all of
    them; blocks that need the mask come last if ``reverse``.
    """
    g, j = _head_and_block(visits, i, reverse, GROUP)
    edges = count_edges(visits)
    block = gl.where(j < edges, edge_block(visits, mask, j), visits.clear_from + j - edges)
    if mask.tiles is not None:
        block = gl.load(visits.list + block) >> 1
    return kv_head * GROUP + g, block * BLOCK_M


@gluon.jit
def step_needs_mask(visits, i, reverse, GROUP: gl.constexpr):
    _, j = _head_and_block(visits, i, reverse, GROUP)
    return j < count_edges(visits)


@gluon.jit
def _head_and_block(visits, i, reverse, GROUP: gl.constexpr):
    """(head of the group, block) of step i."""
    if GROUP == 1:  # the cache holds the queries of one head between the first and the last running program
        g, j = i * 0, i
    else:
        g, j = i % GROUP, i // GROUP
        j = gl.where(reverse, visits.stop - visits.first - 1 - j, j)
    return g, j


@gluon.jit
def first_padded_row(seq, scheduler):
    """The entry's first row in the padded buffers of ``backward.rows``."""
    if scheduler.cu_q is None:
        row = seq.index * (gl.cdiv(scheduler.seqlen_q, 128) * 128)
    else:
        row = (seq.q_row.to(gl.int32) // 128 + seq.index) * 128
    return row


@gluon.jit
def _head_copies(cu, n_entries):
    """How many entries have heads of their own: all in padded calls, and 1 in packed calls."""
    return n_entries if cu is None else n_entries * 0 + 1


@gluon.jit
def count_slots(cu, n_entries, seqlen, BLOCK: gl.constexpr):
    """Slots for the tiles of a head: see ``device.schedule.find_tile``."""
    if cu is None:
        slots = gl.cdiv(seqlen, BLOCK)
    else:
        slots = seqlen // BLOCK + n_entries + 1
    return slots


@gluon.jit
def lanes():
    """0 to 127, four in each lane, the same in every warp: each warp searches by itself."""
    WARPS: gl.constexpr = [[0]] * _log2(gl.num_warps())
    return gl.arange(
        0, 128, gl.DistributedLinearLayout([[32], [64]], [[1], [2], [4], [8], [16]], WARPS, block_bases=[], shape=[128])
    )


@gluon.jit
def _find_entry(slot, cu, n_entries, BLOCK: gl.constexpr):
    """The entry that owns a slot of a packed call."""
    entry = slot * 0 - 1
    for start in range(0, n_entries + 1, 128):
        e = start + lanes()
        first = gl.load(cu + e, mask=e <= n_entries, other=0) // BLOCK + e
        entry += gl.sum(((first <= slot) & (e <= n_entries)).to(gl.int32), 0)
    return entry


@triton.constexpr_function
def _log2(n):
    return n.bit_length() - 1
