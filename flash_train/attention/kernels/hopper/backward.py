"""The backward kernel for Hopper: one program computes dK and dV of 128 keys, and adds their part to dQ.

Five products a step, in one kernel: consumers of 64 keys each work on S transposed, [64, BLOCK_M], so that P and dS
enter dV and dK from registers; dS passes through shared memory, from both consumers to both, for dQ, of which each
computes one half, and which TMA adds to a sum in fp32 in memory. Consumers take turns: one has dV and dS, the
other dK, dQ, the next S, dP and the exponentials. Partitions: two consumers, a loader, a writer.
"""

import triton
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flash_train.attention.kernels.device.mask import query_visits, visible
from flash_train.attention.kernels.device.philox import load_key
from flash_train.attention.kernels.device.score import capped_slope, load_slope, logits
from flash_train.attention.kernels.hopper.dq_sum import (
    WRITTEN_BUT_TWO,
    clear_ahead,
    count,
    finish_before,
    leave_last,
    load_before,
)
from flash_train.attention.kernels.hopper.dropout import draw, find_places, keep, keep_wide
from flash_train.attention.kernels.hopper.packed16 import pack, unpack
from flash_train.attention.kernels.hopper.pipeline import (
    Ring,
    arrive,
    hold,
    make_barriers,
    make_mark,
    make_ring,
    make_turns,
    once,
    pass_turn,
    phase_of,
    release,
    release_too,
    stage_of,
    take_turn,
    tile_of,
    wait_empty,
    wait_full,
)
from flash_train.attention.kernels.hopper.scheduler import (
    Work,
    at,
    find_task,
    lanes,
    padded_row,
    query_tile,
    step_needs_mask,
    walks_back,
)

BLOCK_N = gl.constexpr(128)
DS_STAGES = gl.constexpr(2)
WIDE = gl.constexpr(128)  #: columns of heads whose consumers take turns: narrower ones only with dropout


@triton.constexpr_function
def dq_columns(block_m, head_dim):
    """A consumer's half of dQ has 64 rows: half of 128 and every column, or all of 64 and half the columns."""
    return head_dim if block_m == 128 else head_dim // 2


@builtin
def tma_reduce_add(desc, coord, src, _semantic=None):
    """Add a tile in shared memory to a tensor, element by element and without order, as ``async_copy_shared_to_global``
    stores one: Gluon has the instruction, and no name for it."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


@gluon.jit(do_not_specialize=["n_entries", "seqlen_q", "seqlen_k", "heads_at_once", "processors"])
def hopper_backward(
    q, k, v, dout, lse2, delta, sum_dq, counters, dq, dk, dv, cu_q, cu_k, mask, score, dropout, grad_scale,
    n_entries, seqlen_q, seqlen_k, n_kv_heads, heads_at_once, processors, padded,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr, WITH_DQ: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """q, dout, k, v, dk and dv are descriptors (``descriptors.describe``) of tiles [BLOCK_M, HEAD_DIM] and
    [BLOCK_N, HEAD_DIM], dq of [64, HEAD_DIM]; lse2 and delta of [BLOCK_M] in (heads * padded); sum_dq, fp32, of pieces
    (``rows``); counters, of tasks of heads, are those of ``sums``. Without dQ these three are None. Grid: a program for
    each task (``tasks.find_task``); with dQ they wait for some of lower numbers, which a GPU begins before them."""
    work = Work(cu_q, cu_k, n_entries, seqlen_q, seqlen_k, n_kv_heads, heads_at_once, processors)
    k_tile = gl.allocate_shared_memory(k.dtype, [1] + k.block_shape, k.layout)
    v_tile = gl.allocate_shared_memory(v.dtype, [1] + v.block_shape, v.layout)
    q_tiles = gl.allocate_shared_memory(q.dtype, [STAGES] + q.block_shape, q.layout)
    do_tiles = gl.allocate_shared_memory(dout.dtype, [STAGES] + dout.block_shape, dout.layout)
    lse_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], lse2.layout)
    delta_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], delta.layout)
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], k.dtype)
    ds_tiles = k_tile  # without dQ anything: partitions take no None that is not an argument
    dq_tiles = k_tile
    zeros = k_tile
    if WITH_DQ:
        ROWS: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [num_warps, 1], [1, 0])
        zeros = gl.allocate_shared_memory(gl.float32, sum_dq.block_shape, sum_dq.layout)
        zeros.store(gl.zeros([dq_columns(BLOCK_M, HEAD_DIM) // 2, 128], gl.float32, ROWS))
        ds_tiles = gl.allocate_shared_memory(k.dtype, [DS_STAGES, BLOCK_N, BLOCK_M], DS)
        dq_tiles = gl.allocate_shared_memory(gl.float32, [2] + sum_dq.block_shape, sum_dq.layout)
    q_ring = make_ring(q_tiles, STAGES, 2)  # the log-sum-exp comes and goes with its queries, delta with dout
    do_ring = make_ring(do_tiles, STAGES, 2)
    kv = make_barriers(3, 2)  # filled, read for the last time, gradients stored in their place
    # Filled by both consumers, each of which waits for the other's half only.
    ds_ring = Ring(ds_tiles, (make_barriers(DS_STAGES, 1), make_barriers(DS_STAGES, 1)), make_barriers(DS_STAGES, 2))
    dq_full = make_barriers(2, 1)  # of either consumer
    dq_empty = make_barriers(2, 1)
    turns = make_turns()
    marks = (make_mark(), make_mark())
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (
                k_tile, v_tile, q_ring, do_ring, lse_tiles, delta_tiles, ds_ring, dq_tiles, kv, dq_full, dq_empty,
                turns, marks, sum_dq, dq, work, mask, score, dropout, grad_scale, GROUP, BLOCK_M, HEAD_DIM, WITH_DQ, 0,
            )),
            (_consume, (
                k_tile, v_tile, q_ring, do_ring, lse_tiles, delta_tiles, ds_ring, dq_tiles, kv, dq_full, dq_empty,
                turns, marks, sum_dq, dq, work, mask, score, dropout, grad_scale, GROUP, BLOCK_M, HEAD_DIM, WITH_DQ, 1,
            )),
            (_load, (
                q, k, v, dout, lse2, delta, sum_dq, counters, k_tile, v_tile, q_ring, do_ring, lse_tiles, delta_tiles,
                kv, work, mask, padded, GROUP, BLOCK_M, HEAD_DIM, WITH_DQ,
            )),
            (_write, (
                sum_dq, counters, zeros, dk, dv, k_tile, v_tile, dq_tiles, kv, dq_full, dq_empty, work, mask,
                padded, GROUP, BLOCK_M, HEAD_DIM, WITH_DQ,
            )),
        ],
        [4, 1, 1], [240, 24, 24],
    )  # fmt: skip


@gluon.jit
def _load(
    q, k, v, dout, lse2, delta, sum_dq, counters, k_tile, v_tile, q_ring, do_ring, lse_tiles, delta_tiles, kv, work,
    mask, padded,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, HEAD_DIM: gl.constexpr, WITH_DQ: gl.constexpr,
):  # fmt: skip
    steps = load_walk(
        q, k, v, dout, lse2, delta, k_tile, v_tile, q_ring, do_ring, lse_tiles, delta_tiles, kv, work, mask, padded,
        GROUP, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    if WITH_DQ:
        PIECES: gl.constexpr = HEAD_DIM // dq_columns(BLOCK_M, HEAD_DIM)
        load_before(sum_dq, counters, q_ring, do_ring, steps, work, padded, GROUP, BLOCK_N, PIECES)


@gluon.jit
def load_walk(
    q, k, v, dout, lse2, delta, k_tile, v_tile, q_ring, do_ring, lse_tiles, delta_tiles, kv, work, mask, padded,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """A task's keys and values, and every step's queries with their log-sum-exp, and dout with delta. Returns how many
    steps there are."""
    PACKED: gl.constexpr = work.cu_q is not None
    seq, kv_head, start_n, live = find_task(gl.program_id(0), work, BLOCK_N, False, False)
    steps = gl.to_tensor(0)
    if live:
        filled = kv.index(0)
        where = at(seq, kv_head, start_n, seq.k_row, seq.len_k, PACKED)
        mbarrier.arrive(filled, count=1)
        mbarrier.expect(filled, k.block_type.nbytes + v.block_type.nbytes)
        tma.async_copy_global_to_shared(k, where, filled, k_tile.index(0))
        tma.async_copy_global_to_shared(v, where, filled, v_tile.index(0))
        visits = query_visits(mask, seq, kv_head.to(gl.int64) * GROUP, start_n, lanes(), BLOCK_M, BLOCK_N)
        back = walks_back(gl.program_id(0), work)
        first = padded_row(seq, work)
        steps = GROUP * (visits.stop - visits.first)
        for i in range(0, steps):
            head, start_m = query_tile(visits, mask, kv_head, i, back, GROUP, BLOCK_M)
            where = at(seq, head, start_m, seq.q_row, seq.len_q, PACKED)
            row = [head * padded + first + start_m]
            stage = stage_of(q_ring, i)
            wait_empty(q_ring, i)
            mbarrier.expect(q_ring.full.index(stage), q.block_type.nbytes + 4 * BLOCK_M)
            tma.async_copy_global_to_shared(q, where, q_ring.full.index(stage), q_ring.tiles.index(stage))
            tma.async_copy_global_to_shared(lse2, row, q_ring.full.index(stage), lse_tiles.index(stage))
            wait_empty(do_ring, i)
            mbarrier.expect(do_ring.full.index(stage), dout.block_type.nbytes + 4 * BLOCK_M)
            tma.async_copy_global_to_shared(dout, where, do_ring.full.index(stage), do_ring.tiles.index(stage))
            tma.async_copy_global_to_shared(delta, row, do_ring.full.index(stage), delta_tiles.index(stage))
    return steps


@gluon.jit
def _write(
    sum_dq, counters, zeros, dk, dv, k_tile, v_tile, dq_tiles, kv, dq_full, dq_empty, work, mask, padded,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, HEAD_DIM: gl.constexpr, WITH_DQ: gl.constexpr,
):  # fmt: skip
    PACKED: gl.constexpr = work.cu_q is not None
    seq, kv_head, start_n, live = find_task(gl.program_id(0), work, BLOCK_N, False, False)
    head_of_all = kv_head if PACKED else seq.index * work.n_heads + kv_head
    if WITH_DQ:
        PIECES: gl.constexpr = HEAD_DIM // dq_columns(BLOCK_M, HEAD_DIM)
        clear_ahead(sum_dq, zeros, counters, head_of_all, work, padded, GROUP, BLOCK_N, PIECES)
    if live:
        if WITH_DQ:
            visits = query_visits(mask, seq, kv_head.to(gl.int64) * GROUP, start_n, lanes(), BLOCK_M, BLOCK_N)
            back = walks_back(gl.program_id(0), work)
            first = padded_row(seq, work)
            for i in range(0, GROUP * (visits.stop - visits.first)):
                head, start_m = query_tile(visits, mask, kv_head, i, back, GROUP, BLOCK_M)
                piece = (head * padded + first + start_m) // 64 * (HEAD_DIM // dq_columns(BLOCK_M, HEAD_DIM))
                for w in gl.static_range(2):
                    mbarrier.wait(dq_full.index(w), i & 1)
                    tma_reduce_add(sum_dq, [(piece + w) * sum_dq.block_shape[0], 0], dq_tiles.index(w))
                tma.store_wait(1)
                mbarrier.arrive(dq_empty.index(0), count=1)
                tma.store_wait(0)
                mbarrier.arrive(dq_empty.index(1), count=1)
        where = at(seq, kv_head, start_n, seq.k_row, seq.len_k, PACKED)
        mbarrier.wait(kv.index(2), 0)
        tma.async_copy_shared_to_global(dk, where, k_tile.index(0))
        tma.async_copy_shared_to_global(dv, where, v_tile.index(0))
    if WITH_DQ:
        count(counters + head_of_all, WRITTEN_BUT_TWO)
    tma.store_wait(0)


@gluon.jit
def _consume(
    k_tile, v_tile, q_ring, do_ring, lse_tiles, delta_tiles, ds_ring, dq_tiles, kv, dq_full, dq_empty, turns, marks,
    sum_dq, dq, work, mask, score, dropout, grad_scale,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, HEAD_DIM: gl.constexpr, WITH_DQ: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """dK and dV of the W-th 64 keys, and the W-th half of dQ of all 128."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])  # of S transposed [64, BLOCK_M]
    D: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])  # of dK and dV [64, HEAD_DIM]
    COLUMNS: gl.constexpr = dq_columns(BLOCK_M, HEAD_DIM)
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])  # of half of dQ [64, COLUMNS]
    A: gl.constexpr = gl.DotOperandLayout(0, D, 2)
    COLS: gl.constexpr = gl.SliceLayout(0, S)
    DROPOUT: gl.constexpr = dropout.state is not None
    PINGPONG: gl.constexpr = HEAD_DIM >= WIDE or DROPOUT
    dtype: gl.constexpr = k_tile.dtype
    seq, kv_head, start_n, live = find_task(gl.program_id(0), work, BLOCK_N, False, False)
    steps = gl.to_tensor(0)
    if live:
        visits = query_visits(mask, seq, kv_head.to(gl.int64) * GROUP, start_n, lanes(), BLOCK_M, BLOCK_N)
        back = walks_back(gl.program_id(0), work)
        steps = GROUP * (visits.stop - visits.first)
        key0, key1 = load_key(dropout)
        places = find_places(dropout, BLOCK_M)
        first_n = start_n + 64 * W
        partial = start_n + BLOCK_N > seq.len_k  # keys past the end are zeros, of which no weight may come
        dk_acc = gl.zeros([64, HEAD_DIM], gl.float32, D)
        dv_acc = gl.zeros([64, HEAD_DIM], gl.float32, D)
        zero = gl.zeros([64, BLOCK_M], gl.float32, S)
        zero_dq = gl.zeros([64, COLUMNS], gl.float32, DQ)

        mbarrier.wait(kv.index(0), 0)
        if steps > 0:
            wait_full(q_ring, 0)
            k_own = _rows_of(k_tile, 0, W, HEAD_DIM)
            s_next = warpgroup_mma(k_own, tile_of(q_ring, 0).permute((1, 0)), zero, use_acc=False, is_async=True)
            for i in range(0, steps):
                head, start_m = query_tile(visits, mask, kv_head, i, back, GROUP, BLOCK_M)
                head = head.to(gl.int64)
                # Always 0. Addresses that depend on a step are computed in it: those that do not take registers.
                none = i >> 30
                k_own = _rows_of(k_tile, none, W, HEAD_DIM)
                v_own = _rows_of(v_tile, none, W, HEAD_DIM)
                q_tile = tile_of(q_ring, i)
                do_tile = tile_of(do_ring, i)
                if DROPOUT:  # drawn while the matrix unit works
                    even, odd = draw(dropout, key0, key1, seq.index, head, start_m, first_n, places, BLOCK_M, True)
                    hold(marks[0])
                # All that is in flight: of a part, across the loop's back edge, the assembler cannot tell which it is,
                # and would run every product by itself.
                product = warpgroup_mma_wait(0, deps=[s_next])
                wait_full(do_ring, i)
                dp_next = warpgroup_mma(v_own, do_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
                lse_row = lse_tiles.index(stage_of(q_ring, i)).load(COLS)
                offs_m = start_m + gl.arange(0, BLOCK_M, COLS)[None, :]
                offs_n = first_n + gl.arange(0, 64, gl.SliceLayout(1, S))[:, None]
                distance = gl.abs(offs_m + (seq.len_k - seq.len_q) - offs_n)
                s = logits(product, score, load_slope(score, seq, head), distance, False)
                p = gl.exp2(s * score.factor - lse_row[None, :])
                if step_needs_mask(visits, i, back, GROUP) | partial:
                    p = gl.where(visible(mask, seq, head, once(offs_m), offs_n), p, 0.0)
                kept = pack(p, dtype)
                if DROPOUT:
                    kept = keep(kept, even, odd, BLOCK_M, True)
                # Only here: two turns are a step, and dP and the exponentials need none.
                take_turn(turns, i, W, PINGPONG)
                hold(marks[1])
                dp = warpgroup_mma_wait(0, deps=[dp_next])
                dv_next = warpgroup_mma(unpack(kept, dtype, A), do_tile, dv_acc, is_async=True)
                pass_turn(turns, i, W, 2, DROPOUT)  # dS takes longer with it
                delta_row = delta_tiles.index(stage_of(do_ring, i)).load(COLS)
                if DROPOUT:
                    dp = keep_wide(dp, even, odd, S, BLOCK_M, True)
                ds_next = p * (dp - delta_row[None, :])
                if score.softcap is not None:
                    ds_next *= capped_slope(product, score, False)
                ds16 = ds_next.to(dtype)
                if WITH_DQ:
                    wait_empty(ds_ring, i)
                    ds_ring.tiles.index(stage_of(ds_ring, i)).slice(64 * W, 64).store(ds16)
                    fence_async_shared()
                    arrive(ds_ring.full[W].index(stage_of(ds_ring, i)))
                pass_turn(turns, i, W, 2, PINGPONG and not DROPOUT)
                dk_next = warpgroup_mma(gl.convert_layout(ds16, A), q_tile, dk_acc, is_async=True)
                if WITH_DQ:
                    # That of the step before: consumers may then be half a step apart, and one's exponentials
                    # coincide with the other's products. In the first step its own, for nothing.
                    before = gl.maximum(i - 1, 0)
                    dq_next = _start_dq(ds_ring, before, k_tile.index(none), zero_dq, BLOCK_M, HEAD_DIM, W)
                dv_acc = warpgroup_mma_wait(2 if WITH_DQ else 1, deps=[dv_next])
                wait_full(q_ring, i + 1, i + 1 < steps)
                # The next logits, during the rest of this step; after the last one, of what is there, for nothing.
                s_next = warpgroup_mma(
                    k_own, tile_of(q_ring, i + 1).permute((1, 0)), zero, use_acc=False, is_async=True
                )
                if WITH_DQ:
                    dk_acc, dq_half = warpgroup_mma_wait(1, deps=[dk_next, dq_next])
                else:
                    dk_acc = warpgroup_mma_wait(1, deps=[dk_next])
                release(q_ring, i)
                release_too(do_ring, i)
                if WITH_DQ:
                    release_too(ds_ring, before, i > 0)
                    mbarrier.wait(dq_empty.index(W), i & 1, pred=i > 0)
                    dq_tiles.index(W).store(_by_thread(dq_half, COLUMNS))
                    fence_async_shared()
                    arrive(dq_full.index(W), i > 0)
            warpgroup_mma_wait(0, deps=[s_next])
            if WITH_DQ:
                leave_last(q_ring, steps)
                dq_next = _start_dq(ds_ring, steps - 1, k_tile.index(0), zero_dq, BLOCK_M, HEAD_DIM, W)
                dq_half = warpgroup_mma_wait(0, deps=[dq_next])
                mbarrier.wait(dq_empty.index(W), steps & 1)
                dq_tiles.index(W).store(_by_thread(dq_half, COLUMNS))
                fence_async_shared()
                arrive(dq_full.index(W))

        arrive(kv.index(1))
        mbarrier.wait(kv.index(1), 0)
        dv_scale = 1.0
        if DROPOUT:
            dv_scale = 256.0 / dropout.threshold
        _rows_of(v_tile, 0, W, HEAD_DIM).store((dv_acc * dv_scale).to(dtype))
        _rows_of(k_tile, 0, W, HEAD_DIM).store((dk_acc * grad_scale).to(dtype))
        fence_async_shared()
        arrive(kv.index(2))
    if WITH_DQ:
        PIECES: gl.constexpr = HEAD_DIM // COLUMNS
        staging = ds_ring.tiles.index(W)
        finish_before(sum_dq, dq, q_ring, do_ring, staging, steps, work, grad_scale, GROUP, BLOCK_N, PIECES, W)


@gluon.jit
def _start_dq(ds_ring, i, k_tile, zero, BLOCK_M: gl.constexpr, HEAD_DIM: gl.constexpr, W: gl.constexpr):
    """dQ of step i from 128 keys: the W-th 64 of its queries, or the W-th half of the columns of 64 queries. Waits
    for the other consumer's half of dS."""
    mbarrier.wait(ds_ring.full[1 - W].index(stage_of(ds_ring, i)), phase_of(ds_ring, i))
    ds_tile = ds_ring.tiles.index(stage_of(ds_ring, i))
    k_all = k_tile.reshape([BLOCK_N, HEAD_DIM])
    if BLOCK_M == 128:
        ds_tile = ds_tile.slice(64 * W, 64, 1)
    else:
        k_all = k_all.slice(HEAD_DIM // 2 * W, HEAD_DIM // 2, 1)
    return warpgroup_mma(ds_tile.permute((1, 0)), k_all, zero, use_acc=False, is_async=True)


@gluon.jit
def _by_thread(tile, COLUMNS: gl.constexpr):
    """[64, COLUMNS] in the order of the registers that hold it: it goes to shared memory by 16 bytes a thread, side by
    side, where the rows of a tile would meet at the same banks. ``rows.in_rows`` is the inverse."""
    parts = tile.reshape([4, 2, 8, COLUMNS // 8, 4, 2])  # warp, row + 8, row; columns by 8, by 2, by 1
    return parts.permute((3, 0, 2, 4, 1, 5)).reshape([COLUMNS // 2, 128])


@gluon.jit
def _rows_of(tile, i, W: gl.constexpr, HEAD_DIM: gl.constexpr):
    """The W-th 64 of a tile's keys."""
    return tile.index(i).reshape([BLOCK_N, HEAD_DIM]).slice(64 * W, 64)
