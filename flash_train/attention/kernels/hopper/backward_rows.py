"""Before and after Hopper's backward: row statistics, and the sum of dQ, in rows padded to whole blocks.

The sum of dQ lies in pieces of 64 rows and some columns, one behind the other, and within a piece as the registers of
the threads had it that computed it (``backward._by_thread``).

The padded rows of a head are those of its entries, each from a multiple of PAD on, so that TMA finds every block
aligned; entry e of a packing begins at ``(cu[e] // PAD + e) * PAD``, as the slots of ``device.schedule.find_tile`` do.
"""

import triton
import triton.language as tl

from flash_train.attention.kernels.device.schedule import find_tile, load_entry
from flash_train.attention.kernels.device.score import LOG2_E
from flash_train.attention.kernels.device.tile import far_row_pointers, load_tile, stat_pointers, store_tile

PAD = 128  #: rows


@triton.jit(do_not_specialize=["n_entries", "seqlen_q", "n_counters", "first_cleared", "last_cleared"])
def hopper_prepare(
    out, dout, lse, dlse, delta_ptr, lse2_ptr, dq_ptr, counters, cu_q, keep_rate, n_entries, seqlen_q,
    padded, n_counters, first_cleared, last_cleared,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Per query row, into (heads, padded): ``delta`` and the log-sum-exp as ``attention_backward_rows`` gives them;
    past an entry's rows +inf, so that no weight comes of them. dQ's sum, fp32 (heads, padded, BLOCK_D), becomes 0,
    where there is one, but for the heads of all entries from ``first_cleared`` to ``last_cleared``, which the backward
    clears (``sums``); its ``n_counters`` counters become 0, too.

    Grid (padded / BLOCK, heads).
    """
    slots, heads = tl.num_programs(0), tl.num_programs(1)
    program = tl.program_id(1) * slots + tl.program_id(0)
    slot, head = _find_rows(program, slots, heads, cu_q, n_entries)
    entry, tile = find_tile(slot, cu_q, n_entries, seqlen_q, BLOCK)
    seq = load_entry(entry, cu_q, cu_q, n_entries, seqlen_q, seqlen_q, WALKS_KEYS=True)
    start = tile * BLOCK
    left = seq.len_q - start
    row = seq.q_row + start
    inside = tl.arange(0, BLOCK) < left
    out_ptrs = far_row_pointers(out, seq.batch, head, row, BLOCK, BLOCK_D)
    dout_ptrs = far_row_pointers(dout, seq.batch, head, row, BLOCK, BLOCK_D)
    out_tile = load_tile(out_ptrs, left, True, BLOCK, BLOCK_D, HEAD_DIM)
    dout_tile = load_tile(dout_ptrs, left, True, BLOCK, BLOCK_D, HEAD_DIM)
    d = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1)
    if dlse is not None:
        d -= tl.load(stat_pointers(dlse, seq.batch, head, row, BLOCK), mask=inside, other=0.0)
    lse_tile = tl.load(stat_pointers(lse, seq.batch, head, row, BLOCK), mask=inside, other=float("-inf"))
    lse_tile = tl.where(lse_tile == float("-inf"), float("inf"), lse_tile * LOG2_E)
    at = head * padded + slot * BLOCK + tl.arange(0, BLOCK)
    tl.store(delta_ptr + at, d * keep_rate)
    tl.store(lse2_ptr + at, lse_tile)
    if dq_ptr is not None:
        for first in range(0, n_counters, slots * heads):
            tl.store(counters + first + program, 0, mask=first + program < n_counters)
        of_all = head if cu_q is not None else entry * heads + head
        if (of_all < first_cleared) | (of_all >= last_cleared):
            columns = tl.arange(0, BLOCK_D)[None, :]
            tl.store(dq_ptr + at[:, None] * BLOCK_D + columns, tl.zeros([BLOCK, BLOCK_D], tl.float32))


@triton.jit(do_not_specialize=["n_entries", "seqlen_q", "slots", "heads"])
def hopper_finish(
    dq_ptr, dq, cu_q, grad_scale, n_entries, seqlen_q, padded, slots, heads,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The sum of dQ, scaled, in q's dtype and order. COLUMNS: of a piece. Grid: as many of the places of
    ``hopper_prepare``'s, ``slots`` x ``heads``, as are to be finished; the first are in the backward's last heads."""
    slot, head = _find_rows(tl.program_id(0), slots, heads, cu_q, n_entries)
    entry, tile = find_tile(slot, cu_q, n_entries, seqlen_q, BLOCK)
    seq = load_entry(entry, cu_q, cu_q, n_entries, seqlen_q, seqlen_q, WALKS_KEYS=True)
    start = tile * BLOCK
    pieces = tl.load(dq_ptr + (head * padded + slot * BLOCK) * BLOCK_D + tl.arange(0, BLOCK * BLOCK_D))
    tile_sum = in_rows(pieces, BLOCK, BLOCK_D, COLUMNS)
    dq_ptrs = far_row_pointers(dq, seq.batch, head, seq.q_row + start, BLOCK, BLOCK_D)
    store_tile(dq_ptrs, tile_sum * grad_scale, seq.len_q - start, BLOCK, BLOCK_D, HEAD_DIM)


@triton.jit
def _find_rows(program, slots, heads, cu_q, n_entries):
    """(slot, head) of a program. First come those that the backward takes last, whose sum is in the cache when it ends;
    last those that it begins with."""
    place = slots * heads - 1 - program
    tiles = slots // n_entries if cu_q is None else slots  # of entries that have heads of their own
    slot = place // (tiles * heads) * tiles + place % tiles
    return slot, (place // tiles % heads).to(tl.int64)


@triton.jit
def in_rows(pieces, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, COLUMNS: tl.constexpr):
    """[BLOCK, BLOCK_D] of its pieces of 64 x COLUMNS: of eight columns after eight, the four numbers of each of 128
    threads, which are two in a row, and two in the eighth row below."""
    parts = tl.reshape(pieces, [BLOCK // 64, BLOCK_D // COLUMNS, COLUMNS // 8, 4, 8, 4, 2, 2])
    return tl.reshape(tl.permute(parts, [0, 3, 6, 4, 1, 2, 5, 7]), [BLOCK, BLOCK_D])
