"""dQ's sum, finished by the backward itself: while its own gradients leave, a program takes rows of heads whose tasks
are all done, from the cache still. The last heads are left to ``rows.hopper_finish``.

A program's share are the tiles of queries of an earlier task's number, in every head of the group; where there are more
tiles of queries than of keys, those that follow at that distance, too. The loader has them come behind the walk, a
consumer's 64 rows by either ring: a piece (``rows``) fits a stage. A later task's share is cleared at the beginning.

Of each head are counted the tasks that have added all they have; and, behind all those counters, those whose share is
cleared, but for the first heads and the last, of which ``rows.hopper_prepare`` does it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from flash_train.attention.kernels.hopper.pipeline import (
    Ring,
    fill,
    release,
    release_too,
    stage_of,
    sync_warps,
    wait_empty,
    wait_full,
)
from flash_train.attention.kernels.hopper.scheduler import at, count_heads, count_slots, find_tile, task_beside

PAD = gl.constexpr(128)  #: rows, as in ``rows``
AHEAD = gl.constexpr(2)  #: groups of heads: all tasks of one were begun two groups before, and most are done
LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
THREADS = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))  #: of a piece, as ``backward._by_thread``
#: what this thread had TMA write is in memory, for whoever acquires what it counts next
WRITTEN = gl.constexpr("cp.async.bulk.wait_group 0; fence.proxy.async.global; fence.acq_rel.gpu; mov.b32 $0, $1;")
#: the same, but for its last two tiles
WRITTEN_BUT_TWO = gl.constexpr(
    "cp.async.bulk.wait_group 2; fence.proxy.async.global; fence.acq_rel.gpu; mov.b32 $0, $1;"
)
#: what was in memory when that was counted, TMA reads next
ACQUIRED = gl.constexpr("fence.acq_rel.gpu; fence.proxy.async.global; mov.b32 $0, $1;")


@gluon.jit
def clear_ahead(
    sum_dq, zeros, counters, head, work, padded, GROUP: gl.constexpr, BLOCK: gl.constexpr, PIECES: gl.constexpr
):
    """Clear a later task's share of dQ's sum, and wait until that of this task's head is. For a partition of one warp;
    ``zeros``: a piece of them."""
    cleared = counters + count_heads(work)
    found, unit, slot = task_beside(gl.program_id(0), work, AHEAD, BLOCK)
    slots_k, slots_q = _slots(work, BLOCK)
    if found:
        for s in range(slot, slots_q, slots_k):
            seq, kv_head, tile, tiles = find_tile(s, unit, work, PAD, True)
            first = s if work.cu_q is not None else seq.index * slots_q + s
            for p in range(0, GROUP * 2 * PIECES):
                piece = (kv_head * GROUP + p // (2 * PIECES)) * padded // 64 + first * 2
                place = (piece * PIECES + p % (2 * PIECES)) * sum_dq.block_shape[0]
                tma.async_copy_shared_to_global(sum_dq, [place, 0], zeros)
        count(cleared + unit, WRITTEN)
    by_program, _, _ = task_beside(gl.program_id(0), work, 0, BLOCK)
    before, _, _ = task_beside(gl.program_id(0), work, -AHEAD, BLOCK)
    if by_program & before:
        wait_for(cleared + head, slots_k)


@gluon.jit
def count(counter, CODE: gl.constexpr):
    """One task more of a head has had TMA write all it has to. For a partition of one warp."""
    lane = gl.arange(0, 32, LANES)
    one = gl.inline_asm_elementwise(CODE, "=r,r", [lane * 0 + 1], dtype=gl.int32, is_pure=False, pack=1)
    gl.atomic_add(counter + lane * 0, one, mask=lane == 0, sem="relaxed")


@gluon.jit
def wait_for(counter, tasks):
    """Wait until so many were counted. Gives a 0, on which depends whatever must not come before."""
    seen = gl.load(counter, volatile=True)
    while seen < tasks:
        seen = gl.load(counter, volatile=True)
    lane = gl.arange(0, 32, LANES) * 0
    return gl.max(gl.inline_asm_elementwise(ACQUIRED, "=r,r", [lane], dtype=gl.int32, is_pure=False, pack=1), 0)


@gluon.jit
def load_before(
    sum_dq, counters, q_ring, do_ring, steps, work, padded,
    GROUP: gl.constexpr, BLOCK: gl.constexpr, PIECES: gl.constexpr,
):  # fmt: skip
    """Have the pieces of a program's share come by the rings behind its steps. For a partition of one warp."""
    if steps > 0:
        wait_empty(q_ring, steps)
        mbarrier.arrive(q_ring.full.index(stage_of(q_ring, steps)), count=1)
    found, unit, slot = task_beside(gl.program_id(0), work, -AHEAD, BLOCK)
    if found:
        slots_k, slots_q = _slots(work, BLOCK)
        zero = wait_for(counters + unit, slots_k)
        q_pieces, do_pieces = _as_pieces(q_ring, sum_dq), _as_pieces(do_ring, sum_dq)
        q_step, do_step = _first_steps(steps)
        for s in range(slot, slots_q, slots_k):
            seq, kv_head, tile, tiles = find_tile(s, unit, work, PAD, True)
            first = s if work.cu_q is not None else seq.index * slots_q + s
            if tile < tiles:
                for g in range(0, GROUP):
                    piece = ((kv_head * GROUP + g) * padded // 64 + first * 2) * PIECES + zero
                    for p in gl.static_range(PIECES):
                        fill(q_pieces, q_step, sum_dq, [(piece + p) * sum_dq.block_shape[0], 0])
                        fill(do_pieces, do_step, sum_dq, [(piece + PIECES + p) * sum_dq.block_shape[0], 0])
                        q_step += 1
                        do_step += 1


@gluon.jit
def finish_before(
    sum_dq, dq, q_ring, do_ring, staging, steps, work, scale, GROUP: gl.constexpr, BLOCK: gl.constexpr,
    PIECES: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """The W-th 64 rows of each tile of a program's share, to dq, a descriptor of tiles [64, columns]; by way of
    ``staging``, memory of as many bytes or more that nobody reads any more."""
    PACKED: gl.constexpr = work.cu_q is not None
    COLUMNS: gl.constexpr = dq.block_shape[-1] // PIECES
    found, unit, slot = task_beside(gl.program_id(0), work, -AHEAD, BLOCK)
    if found:
        slots_k, slots_q = _slots(work, BLOCK)
        own = _as_pieces(q_ring if W == 0 else do_ring, sum_dq)
        q_step, do_step = _first_steps(steps)
        tile_out = staging._reinterpret(dq.dtype, dq.block_shape, dq.layout)
        flat = tile_out.reshape([64, dq.block_shape[-1]])
        for s in range(slot, slots_q, slots_k):
            seq, kv_head, tile, tiles = find_tile(s, unit, work, PAD, True)
            if tile < tiles:
                for g in range(0, GROUP):
                    tma.store_wait(0)
                    sync_warps()
                    for p in gl.static_range(PIECES):
                        step = q_step if W == 0 else do_step
                        wait_full(own, step)
                        numbers = own.tiles.index(stage_of(own, step)).load(THREADS)
                        release(q_ring, q_step)
                        release_too(do_ring, do_step)
                        q_step += 1
                        do_step += 1
                        parts = numbers.reshape([COLUMNS // 8, 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5))
                        half = flat.slice(p * COLUMNS, COLUMNS, 1)
                        half.store((parts.reshape([64, COLUMNS]) * scale).to(dq.dtype))
                    fence_async_shared()
                    where = at(seq, kv_head * GROUP + g, tile * PAD + 64 * W, seq.q_row, seq.len_q, PACKED)
                    tma.async_copy_shared_to_global(dq, where, tile_out)
        tma.store_wait(0)


@gluon.jit
def leave_last(q_ring, steps):
    """The stage behind a walk's last step: the walk's last logits, of the step after it, read what is there."""
    wait_full(q_ring, steps)
    release(q_ring, steps)


@gluon.jit
def _first_steps(steps):
    return gl.where(steps > 0, steps + 1, 0), steps


@gluon.jit
def _slots(work, BLOCK: gl.constexpr):
    """Tasks of a head, and its tiles of queries."""
    slots_k = count_slots(work.cu_k, work.n_entries, work.seqlen_k, BLOCK)
    return slots_k, count_slots(work.cu_q, work.n_entries, work.seqlen_q, PAD)


@gluon.jit
def _as_pieces(ring, sum_dq):
    """The same memory, and the same barriers."""
    STAGES: gl.constexpr = ring.empty.shape[0]
    return Ring(
        ring.tiles._reinterpret(gl.float32, [STAGES] + sum_dq.block_shape, sum_dq.layout), ring.full, ring.empty
    )
