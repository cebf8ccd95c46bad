"""The fp32 accumulator of dQ: programs of the backward kernel clear it, and convert it to dQ.

A program converts rows of complete heads while its own gradients are written, so that the rows are still in the L2
cache. ``rows.hopper_finish`` converts the last heads.

1. At its beginning a program clears the rows of a later work tile (``clear_later_rows``).
2. It counts that it has added its part of dQ to the accumulator (``count_written``).
3. After its last step the loader loads the rows of an earlier work tile (``load_earlier_rows``), through the pipelines
   of Q and dO: a piece (``backward.rows``) fits a stage, and each pipeline carries the 64 rows of one consumer.
4. The consumers scale, round and store these rows (``convert_dq_accumulator``).

The rows of a work tile of keys are the tiles of queries with its slot, in every query head of its key head. If there
are more slots for queries than for keys, slot s of the keys also has the slots s + n, s + 2 n, ... of the queries,
where n is the number of slots for keys.

Each key head has two counters. The first counts the work tiles that have added their dQ. The second, stored behind the
first counters of all heads, counts the work tiles whose rows are cleared. ``rows.hopper_prepare`` clears the rows of
the first and the last heads.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from flash_train.attention.kernels.hopper.gluon_compat import reinterpret, sync_warps, tma_store, tma_store_wait
from flash_train.attention.kernels.hopper.pipeline import (
    Pipeline,
    consumer_release,
    consumer_release_no_sync,
    consumer_wait,
    producer_acquire,
    producer_load,
    stage_of,
)
from flash_train.attention.kernels.hopper.scheduler import (
    count_heads,
    count_slots,
    find_tile,
    shifted_work_tile,
    tma_coords,
)

PAD = gl.constexpr(128)  #: rows, as in ``backward.rows``
#: Groups of heads between a work tile and the rows that it converts: all tiles of that group began two groups ago, and
#: most of them are complete.
AHEAD = gl.constexpr(2)
LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
#: layout of a piece, as ``to_register_order`` stores it
THREADS = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))
#: Makes TMA writes of this thread visible to the threads that acquire its next increment of a counter.
WRITTEN = gl.constexpr("cp.async.bulk.wait_group 0; fence.proxy.async.global; fence.acq_rel.gpu; mov.b32 $0, $1;")
#: the same without the last two writes
WRITTEN_BUT_TWO = gl.constexpr(
    "cp.async.bulk.wait_group 2; fence.proxy.async.global; fence.acq_rel.gpu; mov.b32 $0, $1;"
)
#: Makes writes before the counter's increment visible to TMA reads of this thread.
ACQUIRED = gl.constexpr("fence.acq_rel.gpu; fence.proxy.async.global; mov.b32 $0, $1;")


class DQAccumulator(NamedTuple):
    """The accumulator; descriptor and counters are None without dQ."""

    desc: Any  #: TMA descriptor of pieces
    counters_ptr: Any
    padded_rows: Any  #: rows of a head


@gluon.jit
def clear_later_rows(
    accum, zeros, head, scheduler, GROUP: gl.constexpr, BLOCK: gl.constexpr, PIECES: gl.constexpr
):  # fmt: skip
    """Clear the rows of a later work tile, and wait until the rows of this tile's head are cleared.

    For a partition of one warp. ``zeros`` is a piece of zeros in shared memory.
    """
    cleared = accum.counters_ptr + count_heads(scheduler)
    found, flat_head, slot = shifted_work_tile(gl.program_id(0), scheduler, AHEAD, BLOCK)
    slots_k, slots_q = _slots(scheduler, BLOCK)
    if found:
        for s in range(slot, slots_q, slots_k):
            seq, kv_head, tile, tiles = find_tile(s, flat_head, scheduler, PAD, True)
            first = s if scheduler.cu_q is not None else seq.index * slots_q + s
            for p in range(0, GROUP * 2 * PIECES):
                piece = (kv_head * GROUP + p // (2 * PIECES)) * accum.padded_rows // 64 + first * 2
                row = (piece * PIECES + p % (2 * PIECES)) * accum.desc.block_shape[0]
                tma_store(accum.desc, [row, 0], zeros)
        count_written(cleared + flat_head, WRITTEN)
    exists, _, _ = shifted_work_tile(gl.program_id(0), scheduler, 0, BLOCK)
    before, _, _ = shifted_work_tile(gl.program_id(0), scheduler, -AHEAD, BLOCK)
    if exists & before:  # else hopper_prepare has cleared them
        wait_for_count(cleared + head, slots_k)


@gluon.jit
def count_written(counter_ptr, CODE: gl.constexpr):
    """Count a work tile of a head whose TMA writes are complete. For a partition of one warp."""
    lane = gl.arange(0, 32, LANES)
    one = gl.inline_asm_elementwise(CODE, "=r,r", [lane * 0 + 1], dtype=gl.int32, is_pure=False, pack=1)
    gl.atomic_add(counter_ptr + lane * 0, one, mask=lane == 0, sem="relaxed")


@gluon.jit
def wait_for_count(counter_ptr, n_tiles):
    """Wait until n_tiles work tiles are counted. Returns a 0 that later accesses must depend on."""
    seen = gl.load(counter_ptr, volatile=True)
    while seen < n_tiles:
        seen = gl.load(counter_ptr, volatile=True)
    lane = gl.arange(0, 32, LANES) * 0
    return gl.max(gl.inline_asm_elementwise(ACQUIRED, "=r,r", [lane], dtype=gl.int32, is_pure=False, pack=1), 0)


@gluon.jit
def load_earlier_rows(
    accum, q_pipe, do_pipe, steps, scheduler, GROUP: gl.constexpr, BLOCK: gl.constexpr, PIECES: gl.constexpr
):
    """Load the rows of an earlier work tile through the pipelines, after ``steps`` steps.

    For a partition of one warp.
    """
    if steps > 0:
        producer_acquire(q_pipe, steps)
        mbarrier.arrive(q_pipe.full.index(stage_of(q_pipe, steps)), count=1)
    found, flat_head, slot = shifted_work_tile(gl.program_id(0), scheduler, -AHEAD, BLOCK)
    if found:
        slots_k, slots_q = _slots(scheduler, BLOCK)
        zero = wait_for_count(accum.counters_ptr + flat_head, slots_k)
        desc = accum.desc
        q_pieces, do_pieces = _as_pieces(q_pipe, desc), _as_pieces(do_pipe, desc)
        q_step, do_step = _first_steps(steps)
        for s in range(slot, slots_q, slots_k):
            seq, kv_head, tile, tiles = find_tile(s, flat_head, scheduler, PAD, True)
            first = s if scheduler.cu_q is not None else seq.index * slots_q + s
            if tile < tiles:
                for g in range(0, GROUP):
                    piece = ((kv_head * GROUP + g) * accum.padded_rows // 64 + first * 2) * PIECES + zero
                    for p in gl.static_range(PIECES):
                        producer_load(q_pieces, q_step, desc, [(piece + p) * desc.block_shape[0], 0])
                        producer_load(do_pieces, do_step, desc, [(piece + PIECES + p) * desc.block_shape[0], 0])
                        q_step += 1
                        do_step += 1


@gluon.jit
def convert_dq_accumulator(
    accum, dq, q_pipe, do_pipe, staging, steps, scheduler, scale, GROUP: gl.constexpr, BLOCK: gl.constexpr,
    PIECES: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Scale and round rows 64 W to 64 W + 63 of each tile of an earlier work tile, and write them to dq.

    ``dq`` is a descriptor of tiles [64, columns]; ``staging`` is shared memory for at least one tile that no partition
    reads any more.
    """
    PACKED: gl.constexpr = scheduler.cu_q is not None
    COLUMNS: gl.constexpr = dq.block_shape[-1] // PIECES
    found, flat_head, slot = shifted_work_tile(gl.program_id(0), scheduler, -AHEAD, BLOCK)
    if found:
        slots_k, slots_q = _slots(scheduler, BLOCK)
        own = _as_pieces(q_pipe if W == 0 else do_pipe, accum.desc)
        q_step, do_step = _first_steps(steps)
        TILES: gl.constexpr = staging.shape[0] * staging.shape[1] // (64 * dq.block_shape[-1])
        tile_out = reinterpret(staging, dq.dtype, [TILES] + dq.block_shape, dq.layout).index(0)
        flat = tile_out.reshape([64, dq.block_shape[-1]])
        for s in range(slot, slots_q, slots_k):
            seq, kv_head, tile, tiles = find_tile(s, flat_head, scheduler, PAD, True)
            if tile < tiles:
                for g in range(0, GROUP):
                    tma_store_wait(0)
                    sync_warps()
                    for p in gl.static_range(PIECES):
                        step = q_step if W == 0 else do_step
                        consumer_wait(own, step)
                        numbers = own.tiles.index(stage_of(own, step)).load(THREADS)  # [COLUMNS / 2, 128]
                        consumer_release(q_pipe, q_step)
                        consumer_release_no_sync(do_pipe, do_step)
                        q_step += 1
                        do_step += 1
                        parts = numbers.reshape([COLUMNS // 8, 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5))
                        half = flat.slice(p * COLUMNS, COLUMNS, 1)
                        half.store((parts.reshape([64, COLUMNS]) * scale).to(dq.dtype))
                    fence_async_shared()
                    coords = tma_coords(seq, kv_head * GROUP + g, tile * PAD + 64 * W, seq.q_row, seq.len_q, PACKED)
                    tma_store(dq, coords, tile_out)
        tma_store_wait(0)


@gluon.jit
def release_last_stage(q_pipe, steps):
    """Release the stage after the last step, which the last step's S read although nothing was loaded into it."""
    consumer_wait(q_pipe, steps)
    consumer_release(q_pipe, steps)


@gluon.jit
def _first_steps(steps):
    """The pipelines' first steps for pieces, of q and of dO. Only q has a stage to release after the last step."""
    return gl.where(steps > 0, steps + 1, 0), steps


@gluon.jit
def _slots(scheduler, BLOCK: gl.constexpr):
    """Slots of a head for tiles of keys, and for tiles of queries."""
    slots_k = count_slots(scheduler.cu_k, scheduler.n_entries, scheduler.seqlen_k, BLOCK)
    return slots_k, count_slots(scheduler.cu_q, scheduler.n_entries, scheduler.seqlen_q, PAD)


@gluon.jit
def _as_pieces(pipe, desc):
    """The same memory and barriers as a pipeline of pieces."""
    STAGES: gl.constexpr = pipe.empty.shape[0]
    return Pipeline(
        reinterpret(pipe.tiles, gl.float32, [STAGES] + desc.block_shape, desc.layout), pipe.full, pipe.empty
    )


@gluon.jit
def to_register_order(tile, COLUMNS: gl.constexpr):
    """A tile [64, COLUMNS] in the order of the registers that hold it: [COLUMNS / 2, 128].

    In this order each thread stores 16 adjacent bytes; in the order of rows, threads would use the same banks of
    shared memory. ``rows.from_register_order`` is the inverse.
    """
    parts = tile.reshape([4, 2, 8, COLUMNS // 8, 4, 2])  # warp, row + 8, row; columns by 8, by 2, by 1
    return parts.permute((3, 0, 2, 4, 1, 5)).reshape([COLUMNS // 2, 128])
