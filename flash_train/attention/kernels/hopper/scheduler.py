"""Which tiles of which heads a program works on, in which order, and where they lie for TMA."""

from typing import Any, NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_train.attention.kernels.device.mask import count_edges, edge_block
from flash_train.attention.packing import Entry

RAGGED = gl.constexpr(1 << 30)
_LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))


class Work(NamedTuple):
    """Entries and heads of a launch, and the order in which they are taken: see ``find_task``."""

    cu_q: Any
    cu_k: Any
    n_entries: Any
    seqlen_q: Any  #: packed, all rows
    seqlen_k: Any
    n_heads: Any
    heads_at_once: Any
    processors: Any = None  #: how many tasks run at a time, where they walk queries


@gluon.jit
def count_tasks(work, BLOCK: gl.constexpr):
    """Tasks of a launch that walks keys. Packed, some hold nothing."""
    return (
        work.n_heads * count_slots(work.cu_q, work.n_entries, work.seqlen_q, BLOCK) * _lanes(work.cu_q, work.n_entries)
    )


@gluon.jit
def next_task(counter):
    """A task that no program has taken; the first of each is its own number.

    For a partition of one warp, whose first lane asks. Asked as a scalar, the answer goes through shared memory, and
    was once seen not to arrive. Not to be asked before it is needed: a task that waits for its program could be the
    one that the others wait for.
    """
    lane = gl.arange(0, 32, _LANES)
    asked = gl.atomic_add(counter + lane * 0, lane * 0 + 1, mask=lane == 0, sem="relaxed")
    return gl.num_programs(0) + gl.max(gl.where(lane == 0, asked, -1), 0)


@gluon.jit
def leave_counter(counter, told, tasks):
    """Make the counter 0 again for the next launch: by the program that was told last, beyond all tasks. Each task of a
    launch has asked for one other, so that nobody asks after it."""
    lane = gl.arange(0, 32, _LANES)
    gl.store(counter + lane * 0, lane * 0, mask=(lane == 0) & (told == tasks + gl.num_programs(0) - 1))


@gluon.jit
def find_task(task, work, BLOCK: gl.constexpr, WALKS_KEYS: gl.constexpr, REVERSED: gl.constexpr):
    """(entry, head, first row, whether there is anything to do) of a task.

    Tasks go through ``heads_at_once`` heads, whose rows fit the cache together, tile by tile, and then through the
    next; at last through twice as many or more. Under a causal mask tiles go from long to short, and those who had
    short ones begin with the long ones of the next heads. At the end all wait for the longest that began late: the
    more heads, the earlier theirs begin.
    REVERSED: an entry's last tile comes first, which under a causal mask takes the longest.
    A tile is one of queries where the program WALKS_KEYS, else one of keys; heads are those of the tiled tensor.
    """
    slots, heads, last = _groups(work, BLOCK, WALKS_KEYS)
    group = gl.minimum(task // (slots * work.heads_at_once), last)
    first = group * work.heads_at_once
    size = gl.where(group < last, work.heads_at_once, heads - first)
    place = task - first * slots
    seq, head, tile, tiles = find_tile(place // size, first + place % size, work, BLOCK, WALKS_KEYS)
    live = tile < tiles
    if REVERSED:
        tile = tiles - 1 - tile
    return seq, head, tile * BLOCK, live


@gluon.jit
def task_beside(task, work, GROUPS: gl.constexpr, BLOCK: gl.constexpr):
    """(whether there is one, head, slot) of the task of keys so many groups of heads from this one, in this one's place
    of its group. There is none in the last group, whose size is another."""
    slots, _, last = _groups(work, BLOCK, False)
    size = slots * work.heads_at_once
    other = task + GROUPS * size
    place = other % size
    head = other // size * work.heads_at_once + place % work.heads_at_once
    return (other >= 0) & (other < last * size), head, place // work.heads_at_once


@gluon.jit
def count_heads(work):
    """Of all entries; packed, these are rows of the same heads."""
    return work.n_heads * _lanes(work.cu_q, work.n_entries)


@gluon.jit
def _groups(work, BLOCK: gl.constexpr, WALKS_KEYS: gl.constexpr):
    """Slots of a head, heads of all entries, and the number of the last group of ``heads_at_once`` or more of them."""
    cu = work.cu_q if WALKS_KEYS else work.cu_k
    seqlen = work.seqlen_q if WALKS_KEYS else work.seqlen_k
    heads = count_heads(work)
    last = gl.maximum(heads // work.heads_at_once - 2, 0)
    return count_slots(cu, work.n_entries, seqlen, BLOCK), heads, last


@gluon.jit
def find_tile(slot, head, work, BLOCK: gl.constexpr, WALKS_KEYS: gl.constexpr):
    """(entry, its head, tile, tiles of the entry) of a slot of a head of all entries; past those there is nothing."""
    n_entries = work.n_entries
    cu = work.cu_q if WALKS_KEYS else work.cu_k
    if cu is None:
        entry = head // work.n_heads
        head = head % work.n_heads
        zero = (entry * 0).to(gl.int64)
        seq = Entry(entry, entry.to(gl.int64), zero, zero, work.seqlen_q, work.seqlen_k)
        tile = slot
        tiles = gl.cdiv(work.seqlen_q if WALKS_KEYS else work.seqlen_k, BLOCK)
    else:
        entry = _entry_of(slot, cu, n_entries, BLOCK)
        tile = slot - (gl.load(cu + entry) // BLOCK + entry)
        q_row = gl.load(work.cu_q + entry)
        k_row = gl.load(work.cu_k + entry)
        len_q = gl.load(work.cu_q + entry + 1, mask=entry < n_entries, other=work.seqlen_q) - q_row
        len_k = gl.load(work.cu_k + entry + 1, mask=entry < n_entries, other=work.seqlen_k) - k_row
        # the rows past the last boundary form an entry of their own, of which there is nothing to walk
        if WALKS_KEYS:
            len_k = gl.where(entry < n_entries, len_k, 0)
            tiles = gl.cdiv(len_q, BLOCK)
        else:
            len_q = gl.where(entry < n_entries, len_q, 0)
            tiles = gl.cdiv(len_k, BLOCK)
        seq = Entry(entry, (entry * 0).to(gl.int64), q_row.to(gl.int64), k_row.to(gl.int64), len_q, len_k)
    return seq, head, tile, tiles


@gluon.jit
def at(seq, head, row, first_row, rows, PACKED: gl.constexpr):
    """Coordinates of a tile, as ``descriptors.describe`` has them: rows past the entry's are zeros, and not written.

    Packed, two more dimensions lead to the entry: their strides add up to its first row modulo 2**64 bytes, and the
    last of its rows is the last that the row's dimension has.
    """
    zero = gl.to_tensor(0)
    if PACKED:
        return gl.to_tensor(RAGGED), (first_row + rows).to(gl.int32), head, RAGGED - rows + row, zero
    else:
        return seq.batch.to(gl.int32), head, row, zero


@gluon.jit
def start_of_block(visits, mask, seq, j, BLOCK_N: gl.constexpr):
    """The first key of the j-th block: those that need the mask, then the others.

    Past the end where there is none: zeros are loaded.
    """
    edges = count_edges(visits)
    block = gl.where(j < edges, edge_block(visits, mask, j), visits.clear_from + j - edges)
    if mask.tiles is None:
        start = block * BLOCK_N
    else:
        start = (gl.load(visits.list + block, mask=visits.stop > visits.first, other=0) >> 1) * BLOCK_N
    return gl.where(visits.stop > visits.first, start, seq.len_k)


@gluon.jit
def walks_back(task, work):
    """Whether a task of keys takes its blocks of queries from the last on: so that those at work are at the same ones.

    Every other round of tasks does. Those of a first round begin together, with the last queries, which all keys see.
    They end one by one, short walks first, and the long ones of the next round begin one by one; but with what they lie
    apart they end together, and so meet at every query on the way up. The next round begins together again.
    """
    return task // work.processors % 2 == 0


@gluon.jit
def query_tile(visits, mask, kv_head, i, back, GROUP: gl.constexpr, BLOCK_M: gl.constexpr):
    """Head and first query of a walk's step i: the blocks of a head, those that need the mask first. Where heads share
    keys, each block of all of them, and those that need the mask last if the walk goes ``back``."""
    g, j = _step(visits, i, back, GROUP)
    edges = count_edges(visits)
    block = gl.where(j < edges, edge_block(visits, mask, j), visits.clear_from + j - edges)
    if mask.tiles is not None:
        block = gl.load(visits.list + block) >> 1
    return kv_head * GROUP + g, block * BLOCK_M


@gluon.jit
def step_needs_mask(visits, i, back, GROUP: gl.constexpr):
    _, j = _step(visits, i, back, GROUP)
    return j < count_edges(visits)


@gluon.jit
def _step(visits, i, back, GROUP: gl.constexpr):
    if GROUP == 1:  # of one head's queries the cache holds those between the programs at work
        g, j = i * 0, i
    else:
        g, j = i % GROUP, i // GROUP
        j = gl.where(back, visits.stop - visits.first - 1 - j, j)
    return g, j


@gluon.jit
def padded_row(seq, work):
    """The entry's first row of those of ``rows``."""
    if work.cu_q is None:
        row = seq.index * (gl.cdiv(work.seqlen_q, 128) * 128)
    else:
        row = (seq.q_row.to(gl.int32) // 128 + seq.index) * 128
    return row


@gluon.jit
def _lanes(cu, n_entries):
    """How many entries have heads of their own: all, or one where they are packed along the rows."""
    return n_entries if cu is None else n_entries * 0 + 1


@gluon.jit
def count_slots(cu, n_entries, seqlen, BLOCK: gl.constexpr):
    """Places for tiles along the rows: see ``device.schedule.find_tile``."""
    if cu is None:
        slots = gl.cdiv(seqlen, BLOCK)
    else:
        slots = seqlen // BLOCK + n_entries + 1
    return slots


@gluon.jit
def lanes():
    """0 to 127, four to a lane, in every warp: each finds for itself what it looks for."""
    WARPS: gl.constexpr = [[0]] * _log2(gl.num_warps())
    return gl.arange(
        0, 128, gl.DistributedLinearLayout([[32], [64]], [[1], [2], [4], [8], [16]], WARPS, block_bases=[], shape=[128])
    )


@gluon.jit
def _entry_of(slot, cu, n_entries, BLOCK: gl.constexpr):
    """The entry that owns a slot."""
    entry = slot * 0 - 1
    for start in range(0, n_entries + 1, 128):
        e = start + lanes()
        first = gl.load(cu + e, mask=e <= n_entries, other=0) // BLOCK + e
        entry += gl.sum(((first <= slot) & (e <= n_entries)).to(gl.int32), 0)
    return entry


@triton.constexpr_function
def _log2(n):
    return n.bit_length() - 1
