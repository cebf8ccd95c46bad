"""Before and after Hopper's backward: statistics of each row, and the accumulator of dQ, in padded rows.

The padded rows of a head are the rows of its entries; each entry begins at a multiple of PAD, so that every block is
aligned for TMA. Entry e of a packed call begins at ``(cu[e] // PAD + e) * PAD``, like the slots of
``device.schedule.find_tile``.

The accumulator consists of pieces of 64 rows and some columns, one after the other. Within a piece, numbers are in the
order of the registers of the threads that computed it (``dq_accumulator.to_register_order``).
"""

import triton
import triton.language as tl

from flash_train.attention.kernels.device.schedule import find_tile, load_entry
from flash_train.attention.kernels.device.score import LOG2_E
from flash_train.attention.kernels.device.tile import far_row_pointers, load_tile, stat_pointers, store_tile

PAD = 128  #: rows


@triton.jit(do_not_specialize=["n_entries", "seqlen_q", "n_counters", "first_cleared", "last_cleared"])
def hopper_prepare(
    out, dout, lse, dlse, delta_ptr, lse2_ptr, dq_accum_ptr, counters_ptr, cu_q, keep_rate, n_entries, seqlen_q,
    padded_rows, n_counters, first_cleared, last_cleared,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Prepare the backward: row statistics, a cleared accumulator of dQ, and counters of 0.

    Grid (padded_rows / BLOCK, heads). Each program, for BLOCK rows of a head:

    1. loads out, dout, lse and dlse;
    2. writes delta and the log-sum-exp in base 2, as ``attention_backward_rows`` does, to (heads, padded_rows). Past an
       entry's rows the log-sum-exp is +inf, so that weights are 0 there.
    3. clears the accumulator dq_accum_ptr, fp32 (heads, padded_rows, BLOCK_D), and its ``n_counters`` counters, unless
       it is None. The backward itself clears the heads from ``first_cleared`` up to, not including, ``last_cleared``
       (``backward.dq_accumulator``). These numbers count the heads of all entries.
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
    offs_padded = head * padded_rows + slot * BLOCK + tl.arange(0, BLOCK)
    tl.store(delta_ptr + offs_padded, d * keep_rate)
    tl.store(lse2_ptr + offs_padded, lse_tile)
    if dq_accum_ptr is not None:
        for first in range(0, n_counters, slots * heads):
            tl.store(counters_ptr + first + program, 0, mask=first + program < n_counters)
        flat_head = head if cu_q is not None else entry * heads + head
        if (flat_head < first_cleared) | (flat_head >= last_cleared):
            columns = tl.arange(0, BLOCK_D)[None, :]
            tl.store(dq_accum_ptr + offs_padded[:, None] * BLOCK_D + columns, tl.zeros([BLOCK, BLOCK_D], tl.float32))


@triton.jit(do_not_specialize=["n_entries", "seqlen_q", "slots", "heads"])
def hopper_finish(
    dq_accum_ptr, dq, cu_q, grad_scale, n_entries, seqlen_q, padded_rows, slots, heads,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Convert the accumulator to dQ for the heads that the backward has not converted: scale, round, and reorder.

    COLUMNS: columns of a piece. Grid: one program for each block of these heads, which are the first of the
    ``slots`` x ``heads`` programs of ``hopper_prepare``.
    """
    slot, head = _find_rows(tl.program_id(0), slots, heads, cu_q, n_entries)
    entry, tile = find_tile(slot, cu_q, n_entries, seqlen_q, BLOCK)
    seq = load_entry(entry, cu_q, cu_q, n_entries, seqlen_q, seqlen_q, WALKS_KEYS=True)
    start = tile * BLOCK
    pieces = tl.load(dq_accum_ptr + (head * padded_rows + slot * BLOCK) * BLOCK_D + tl.arange(0, BLOCK * BLOCK_D))
    tile_sum = from_register_order(pieces, BLOCK, BLOCK_D, COLUMNS)
    dq_ptrs = far_row_pointers(dq, seq.batch, head, seq.q_row + start, BLOCK, BLOCK_D)
    store_tile(dq_ptrs, tile_sum * grad_scale, seq.len_q - start, BLOCK, BLOCK_D, HEAD_DIM)


@triton.jit
def _find_rows(program, slots, heads, cu_q, n_entries):
    """(slot, head) of a program, in the reverse of the backward's order.

    The backward's last rows come first: the accumulator of the last heads is in the cache when it ends, and it begins
    with the rows that are prepared last.
    """
    index = slots * heads - 1 - program
    tiles = slots // n_entries if cu_q is None else slots  # of an entry; packed entries share their heads
    slot = index // (tiles * heads) * tiles + index % tiles
    return slot, (index // tiles % heads).to(tl.int64)


@triton.jit
def from_register_order(pieces, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows [BLOCK, BLOCK_D] from their pieces of 64 x COLUMNS, the inverse of ``dq_accumulator.to_register_order``.

    For every eight columns, a piece has four numbers of each of 128 threads: two in a row, and two eight rows below.
    """
    parts = tl.reshape(pieces, [BLOCK // 64, BLOCK_D // COLUMNS, COLUMNS // 8, 4, 8, 4, 2, 2])
    return tl.reshape(tl.permute(parts, [0, 3, 6, 4, 1, 2, 5, 7]), [BLOCK, BLOCK_D])
