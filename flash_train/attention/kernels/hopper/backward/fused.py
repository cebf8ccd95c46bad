"""The backward kernel for Hopper: a program computes dK and dV of 128 keys, and adds their part to dQ.

Each step has five products. Two consumers have 64 keys each and work on S transposed, [64, BLOCK_M], so that P and dS
enter dV and dK from registers. For dQ, both halves of dS meet in shared memory. Each consumer computes one half of dQ
from all 128 keys, and TMA adds it to an fp32 accumulator in global memory. With a head dimension above 64, or with
dropout, the consumers take turns: while one computes dV and dS, the other computes dK, dQ, the next S, dP and the
exponentials. Partitions: two consumers, a loader and a writer.
"""

from typing import Any, NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flash_train.attention.kernels.device.mask import THREAD_COLUMNS, query_visits, visible
from flash_train.attention.kernels.device.philox import Dropout, first_element
from flash_train.attention.kernels.device.score import capped_slope, load_slope, logits
from flash_train.attention.kernels.hopper.backward.dq_accumulator import (
    WRITTEN_BUT_TWO,
    DQAccumulator,
    clear_later_rows,
    convert_dq_accumulator,
    count_written,
    load_earlier_rows,
    release_last_stage,
    to_register_order,
)
from flash_train.attention.kernels.hopper.backward.loads import (
    KV_LOADED,
    KV_READ,
    KV_STORED,
    Descriptors,
    Operands,
    load_tiles,
)
from flash_train.attention.kernels.hopper.dropout import (
    apply_dropout,
    apply_dropout_packed,
    draw_keep_flags,
    make_generator,
)
from flash_train.attention.kernels.hopper.gluon_compat import (
    sync_and_arrive,
    tma_add,
    tma_store,
    tma_store_wait,
)
from flash_train.attention.kernels.hopper.packed16 import pack, unpack
from flash_train.attention.kernels.hopper.pipeline import (
    Pipeline,
    consumer_release,
    consumer_release_no_sync,
    consumer_wait,
    make_barriers,
    make_pipeline,
    make_schedule_fence,
    make_scheduler_barriers,
    once,
    phase_of,
    producer_acquire,
    schedule_fence,
    stage_of,
    tile_of,
    warp_scheduler_arrive,
    warp_scheduler_sync,
)
from flash_train.attention.kernels.hopper.scheduler import (
    TileScheduler,
    find_work_tile,
    first_padded_row,
    is_reversed,
    lanes,
    query_tile,
    step_needs_mask,
    tma_coords,
)

BLOCK_N = gl.constexpr(128)
DS_STAGES = gl.constexpr(2)
WIDE = gl.constexpr(128)  #: head dimension from which consumers take turns; with dropout they always do


class Exchange(NamedTuple):
    """Shared memory between the consumers and the writer."""

    ds: Any  #: Pipeline of tiles [BLOCK_N, BLOCK_M]: each consumer fills 64 rows, and waits for the other's
    dq_tiles: Any  #: a half of dQ from each consumer
    dq_full: Any
    dq_empty: Any
    scheduler_barriers: Any
    schedule_fences: Any


@triton.constexpr_function
def dq_columns(block_m, head_dim):
    """Columns of a consumer's half of dQ, which has 64 rows: with 128 queries all, with 64 queries one half."""
    return head_dim if block_m == 128 else head_dim // 2


@gluon.jit(do_not_specialize=["n_entries", "seqlen_q", "seqlen_k", "heads_at_once", "n_sms"])
def hopper_backward(
    q, k, v, dout, lse2, delta, dq_accum, counters_ptr, dq, dk, dv, cu_q, cu_k, mask, score, dropout, grad_scale,
    n_entries, seqlen_q, seqlen_k, n_kv_heads, heads_at_once, n_sms, padded_rows,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr, WITH_DQ: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """dK and dV, and with WITH_DQ also dQ. ``grad_scale`` is the scale over the rate of keeping.

    q, dout, k, v, dk and dv are TMA descriptors (``descriptors.describe``) of tiles [BLOCK_M, HEAD_DIM] and
    [BLOCK_N, HEAD_DIM], and dq of [64, HEAD_DIM]; lse2 and delta describe tiles [BLOCK_M] of (heads * padded_rows).
    dq_accum describes the fp32 accumulator of dQ in pieces (``backward.rows``), and counters_ptr are the counters of
    ``backward.dq_accumulator``; these two and dq are None without dQ. Grid: a program for each work tile of keys
    (``scheduler.find_work_tile``). With dQ, programs wait for some programs of lower numbers, which a GPU starts first.

    The loader loads K and V of the work tile, and then, for each block of queries of each head of the group, Q, lse2,
    dO and delta. Each consumer, for its 64 keys and each block of queries:

    1. computes Sᵀ = K Qᵀ and dPᵀ = V dOᵀ, the mask, Pᵀ = exp2(Sᵀ - lse2), and its dropped elements;
    2. starts dV += Pᵀ dO, computes dSᵀ = Pᵀ (dPᵀ - delta), and stores it to shared memory;
    3. starts dK += dSᵀ Q, its half of dQ = dS K of the step before, and Sᵀ of the next step;
    4. hands its half of dQ to the writer.

    The writer clears the accumulator for heads to come, adds the halves of dQ to it, and writes dK and dV. At the end,
    loader and consumers convert the accumulator of heads that are complete to dQ (``backward.dq_accumulator``).
    """
    scheduler = TileScheduler(cu_q, cu_k, n_entries, seqlen_q, seqlen_k, n_kv_heads, heads_at_once, n_sms)
    accum = DQAccumulator(dq_accum, counters_ptr, padded_rows)
    descs = Descriptors(q, k, v, dout, lse2, delta)
    k_tile = gl.allocate_shared_memory(k.dtype, [1] + k.block_shape, k.layout)
    v_tile = gl.allocate_shared_memory(v.dtype, [1] + v.block_shape, v.layout)
    q_tiles = gl.allocate_shared_memory(q.dtype, [STAGES] + q.block_shape, q.layout)
    do_tiles = gl.allocate_shared_memory(dout.dtype, [STAGES] + dout.block_shape, dout.layout)
    lse_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], lse2.layout)
    delta_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], delta.layout)
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], k.dtype)
    ds_tiles = k_tile  # unused without dQ; partitions take None only if it is an argument of the kernel
    dq_tiles = k_tile
    zeros = k_tile
    if WITH_DQ:
        ROWS: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [num_warps, 1], [1, 0])
        zeros = gl.allocate_shared_memory(gl.float32, dq_accum.block_shape, dq_accum.layout)
        zeros.store(gl.zeros([dq_columns(BLOCK_M, HEAD_DIM) // 2, 128], gl.float32, ROWS))
        ds_tiles = gl.allocate_shared_memory(k.dtype, [DS_STAGES, BLOCK_N, BLOCK_M], DS)
        dq_tiles = gl.allocate_shared_memory(gl.float32, [2] + dq_accum.block_shape, dq_accum.layout)
    q_pipe = make_pipeline(q_tiles, STAGES, 2)
    do_pipe = make_pipeline(do_tiles, STAGES, 2)
    operands = Operands(k_tile, v_tile, q_pipe, do_pipe, lse_tiles, delta_tiles, make_barriers(3, 2))
    ds_full = (make_barriers(DS_STAGES, 1), make_barriers(DS_STAGES, 1))  # one for each consumer's half
    ds_pipe = Pipeline(ds_tiles, ds_full, make_barriers(DS_STAGES, 2))
    exchange = Exchange(
        ds_pipe, dq_tiles, make_barriers(2, 1), make_barriers(2, 1), make_scheduler_barriers(),
        (make_schedule_fence(), make_schedule_fence()),
    )  # fmt: skip
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consumer, (
                operands, exchange, accum, dq, scheduler, mask, score, dropout, grad_scale,
                GROUP, BLOCK_M, HEAD_DIM, WITH_DQ, 0,
            )),
            (_consumer, (
                operands, exchange, accum, dq, scheduler, mask, score, dropout, grad_scale,
                GROUP, BLOCK_M, HEAD_DIM, WITH_DQ, 1,
            )),
            (_loader, (descs, operands, accum, scheduler, mask, GROUP, BLOCK_M, HEAD_DIM, WITH_DQ)),
            (_writer, (
                operands, exchange, zeros, accum, dk, dv, scheduler, mask, GROUP, BLOCK_M, HEAD_DIM, WITH_DQ,
            )),
        ],
        [4, 1, 1], [240, 24, 24],
    )  # fmt: skip


@gluon.jit
def _loader(
    descs, operands, accum, scheduler, mask,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, HEAD_DIM: gl.constexpr, WITH_DQ: gl.constexpr,
):  # fmt: skip
    steps = load_tiles(descs, operands, scheduler, mask, accum.padded_rows, GROUP, BLOCK_M, BLOCK_N)
    if WITH_DQ:
        PIECES: gl.constexpr = HEAD_DIM // dq_columns(BLOCK_M, HEAD_DIM)
        load_earlier_rows(accum, operands.q, operands.do, steps, scheduler, GROUP, BLOCK_N, PIECES)


@gluon.jit
def _writer(
    operands, exchange, zeros, accum, dk, dv, scheduler, mask,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, HEAD_DIM: gl.constexpr, WITH_DQ: gl.constexpr,
):  # fmt: skip
    """Clear the accumulator of dQ for a later work tile, add each step's dQ to it, and write dK and dV."""
    PACKED: gl.constexpr = scheduler.cu_q is not None
    seq, kv_head, start_n, is_valid = find_work_tile(gl.program_id(0), scheduler, BLOCK_N, False, False)
    flat_head = kv_head if PACKED else seq.index * scheduler.n_heads + kv_head
    if WITH_DQ:
        PIECES: gl.constexpr = HEAD_DIM // dq_columns(BLOCK_M, HEAD_DIM)
        clear_later_rows(accum, zeros, flat_head, scheduler, GROUP, BLOCK_N, PIECES)
    if is_valid:
        if WITH_DQ:
            visits = query_visits(mask, seq, kv_head.to(gl.int64) * GROUP, start_n, lanes(), BLOCK_M, BLOCK_N)
            reverse = is_reversed(gl.program_id(0), scheduler)
            first = first_padded_row(seq, scheduler)
            for i in range(0, GROUP * (visits.stop - visits.first)):
                head, start_m = query_tile(visits, mask, kv_head, i, reverse, GROUP, BLOCK_M)
                row = head * accum.padded_rows + first + start_m
                piece = row // 64 * (HEAD_DIM // dq_columns(BLOCK_M, HEAD_DIM))
                for w in gl.static_range(2):
                    mbarrier.wait(exchange.dq_full.index(w), i & 1)
                    tma_add(accum.desc, [(piece + w) * accum.desc.block_shape[0], 0], exchange.dq_tiles.index(w))
                tma_store_wait(1)
                mbarrier.arrive(exchange.dq_empty.index(0), count=1)
                tma_store_wait(0)
                mbarrier.arrive(exchange.dq_empty.index(1), count=1)
        coords = tma_coords(seq, kv_head, start_n, seq.k_row, seq.len_k, PACKED)
        mbarrier.wait(operands.kv.index(KV_STORED), 0)
        tma_store(dk, coords, operands.k_tile.index(0))
        tma_store(dv, coords, operands.v_tile.index(0))
    if WITH_DQ:
        count_written(accum.counters_ptr + flat_head, WRITTEN_BUT_TWO)
    tma_store_wait(0)


@gluon.jit
def _consumer(
    operands, exchange, accum, dq, scheduler, mask, score, dropout, grad_scale,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, HEAD_DIM: gl.constexpr, WITH_DQ: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """dK and dV of keys 64 W to 64 W + 63 of the work tile, and half W of dQ."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])  # S transposed [64, BLOCK_M]
    D: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])  # dK and dV [64, HEAD_DIM]
    COLUMNS: gl.constexpr = dq_columns(BLOCK_M, HEAD_DIM)
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])  # half of dQ [64, COLUMNS]
    A: gl.constexpr = gl.DotOperandLayout(0, D, 2)
    COLS: gl.constexpr = gl.SliceLayout(0, S)
    DROPOUT: gl.constexpr = dropout.state is not None
    PINGPONG: gl.constexpr = HEAD_DIM >= WIDE or DROPOUT
    dtype: gl.constexpr = operands.k_tile.dtype
    q_pipe = operands.q
    do_pipe = operands.do
    ds_pipe = exchange.ds
    seq, kv_head, start_n, is_valid = find_work_tile(gl.program_id(0), scheduler, BLOCK_N, False, False)
    steps = gl.to_tensor(0)
    if is_valid:
        visits = query_visits(mask, seq, kv_head.to(gl.int64) * GROUP, start_n, lanes(), BLOCK_M, BLOCK_N)
        reverse = is_reversed(gl.program_id(0), scheduler)
        steps = GROUP * (visits.stop - visits.first)
        first_entry, first_query, first_key = first_element(dropout, seq)
        entry_dropout = Dropout(
            dropout.state, dropout.threshold, first_entry, dropout.head, first_query, first_key, dropout.by_element
        )  # fmt: skip
        generator = make_generator(dropout, BLOCK_M, False)
        own_n = start_n + 64 * W
        partial = start_n + BLOCK_N > seq.len_k  # keys past the end are zeros, and their weights must be 0
        dk_acc = gl.zeros([64, HEAD_DIM], gl.float32, D)
        dv_acc = gl.zeros([64, HEAD_DIM], gl.float32, D)
        zero = gl.zeros([64, BLOCK_M], gl.float32, S)
        zero_dq = gl.zeros([64, COLUMNS], gl.float32, DQ)

        mbarrier.wait(operands.kv.index(KV_LOADED), 0)
        if steps > 0:
            consumer_wait(q_pipe, 0)
            k_own = _consumer_rows(operands.k_tile, 0, W, HEAD_DIM)  # [64, HEAD_DIM]
            s_next = warpgroup_mma(k_own, tile_of(q_pipe, 0).permute((1, 0)), zero, use_acc=False, is_async=True)
            for i in range(0, steps):
                head, start_m = query_tile(visits, mask, kv_head, i, reverse, GROUP, BLOCK_M)
                head = head.to(gl.int64)
                # Always 0. Addresses that depend on a step are computed in it; other addresses stay in registers.
                zero_index = i >> 30
                k_own = _consumer_rows(operands.k_tile, zero_index, W, HEAD_DIM)  # [64, HEAD_DIM]
                v_own = _consumer_rows(operands.v_tile, zero_index, W, HEAD_DIM)
                q_tile = tile_of(q_pipe, i)  # [BLOCK_M, HEAD_DIM]
                do_tile = tile_of(do_pipe, i)
                if DROPOUT:  # while the matrix unit works
                    keep_even, keep_odd = draw_keep_flags(
                        entry_dropout, generator, seq.index, head, start_m, own_n, BLOCK_M, True
                    )
                    schedule_fence(exchange.schedule_fences[0])
                # Wait for all products in flight. With a partial wait across the loop's back edge, the assembler
                # cannot tell which products are in flight, and runs every product by itself.
                qk = warpgroup_mma_wait(0, deps=[s_next])  # S transposed [64, BLOCK_M]
                consumer_wait(do_pipe, i)
                dp_next = warpgroup_mma(v_own, do_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
                lse_row = operands.lse_tiles.index(stage_of(q_pipe, i)).load(COLS)
                columns = gl.arange(0, BLOCK_M, COLS)[None, :]
                offs_m = columns & ~THREAD_COLUMNS
                first_m = start_m + (columns & THREAD_COLUMNS)
                offs_n = own_n + gl.arange(0, 64, gl.SliceLayout(1, S))[:, None]
                distance = gl.abs(offs_m - (offs_n - (seq.len_k - seq.len_q) - first_m))
                s = logits(qk, score, load_slope(score, seq, head), distance, False)
                p = gl.exp2(s * score.factor - lse_row[None, :])
                if step_needs_mask(visits, i, reverse, GROUP) | partial:
                    if len(mask.terms) > 0:  # once: no address of a term is computed before this branch
                        seen = visible(mask, seq, head, once(first_m + offs_m), offs_n)
                    else:
                        seen = visible(mask, seq, head, offs_m, once(offs_n), start_m=first_m)
                    p = gl.where(seen, p, 0.0)
                p_kept = pack(p, dtype)
                if DROPOUT:
                    p_kept = apply_dropout_packed(p_kept, keep_even, keep_odd, BLOCK_M, True)
                # The turn begins here: a step is two turns long, and dP and the exponentials need none.
                warp_scheduler_sync(exchange.scheduler_barriers, i, W, PINGPONG)
                schedule_fence(exchange.schedule_fences[1])
                dp = warpgroup_mma_wait(0, deps=[dp_next])
                dv_next = warpgroup_mma(unpack(p_kept, dtype, A), do_tile, dv_acc, is_async=True)
                # With dropout, dS takes longer: the turn ends before it.
                warp_scheduler_arrive(exchange.scheduler_barriers, i, W, 2, DROPOUT)
                delta_row = operands.delta_tiles.index(stage_of(do_pipe, i)).load(COLS)
                if DROPOUT:
                    dp = apply_dropout(dp, keep_even, keep_odd, S, BLOCK_M, True)
                ds_next = p * (dp - delta_row[None, :])
                if score.softcap is not None:
                    ds_next *= capped_slope(qk, score, False)
                ds16 = ds_next.to(dtype)
                if WITH_DQ:
                    producer_acquire(ds_pipe, i)
                    ds_pipe.tiles.index(stage_of(ds_pipe, i)).slice(64 * W, 64).store(ds16)
                    fence_async_shared()
                    sync_and_arrive(ds_pipe.full[W].index(stage_of(ds_pipe, i)))
                warp_scheduler_arrive(exchange.scheduler_barriers, i, W, 2, PINGPONG and not DROPOUT)
                dk_next = warpgroup_mma(gl.convert_layout(ds16, A), q_tile, dk_acc, is_async=True)
                if WITH_DQ:
                    # dQ of the step before, so that consumers may be half a step apart, and the exponentials of one
                    # overlap with the products of the other. The first step computes its own dQ and discards it.
                    before = gl.maximum(i - 1, 0)
                    dq_next = _start_dq(
                        ds_pipe, before, operands.k_tile.index(zero_index), zero_dq, BLOCK_M, HEAD_DIM, W
                    )
                dv_acc = warpgroup_mma_wait(2 if WITH_DQ else 1, deps=[dv_next])
                consumer_wait(q_pipe, i + 1, i + 1 < steps)
                # The next S, during the rest of this step. The last step computes one from old data and discards it.
                s_next = warpgroup_mma(
                    k_own, tile_of(q_pipe, i + 1).permute((1, 0)), zero, use_acc=False, is_async=True
                )
                if WITH_DQ:
                    dk_acc, dq_half = warpgroup_mma_wait(1, deps=[dk_next, dq_next])
                else:
                    dk_acc = warpgroup_mma_wait(1, deps=[dk_next])
                consumer_release(q_pipe, i)
                consumer_release_no_sync(do_pipe, i)
                if WITH_DQ:
                    consumer_release_no_sync(ds_pipe, before, i > 0)
                    mbarrier.wait(exchange.dq_empty.index(W), i & 1, pred=i > 0)
                    exchange.dq_tiles.index(W).store(to_register_order(dq_half, COLUMNS))
                    fence_async_shared()
                    sync_and_arrive(exchange.dq_full.index(W), i > 0)
            warpgroup_mma_wait(0, deps=[s_next])
            if WITH_DQ:
                release_last_stage(q_pipe, steps)
                dq_next = _start_dq(ds_pipe, steps - 1, operands.k_tile.index(0), zero_dq, BLOCK_M, HEAD_DIM, W)
                dq_half = warpgroup_mma_wait(0, deps=[dq_next])
                mbarrier.wait(exchange.dq_empty.index(W), steps & 1)
                exchange.dq_tiles.index(W).store(to_register_order(dq_half, COLUMNS))
                fence_async_shared()
                sync_and_arrive(exchange.dq_full.index(W))

        sync_and_arrive(operands.kv.index(KV_READ))
        mbarrier.wait(operands.kv.index(KV_READ), 0)
        dv_scale = 1.0
        if DROPOUT:
            dv_scale = 256.0 / dropout.threshold
        _consumer_rows(operands.v_tile, 0, W, HEAD_DIM).store((dv_acc * dv_scale).to(dtype))
        _consumer_rows(operands.k_tile, 0, W, HEAD_DIM).store((dk_acc * grad_scale).to(dtype))
        fence_async_shared()
        sync_and_arrive(operands.kv.index(KV_STORED))
    if WITH_DQ:
        PIECES: gl.constexpr = HEAD_DIM // COLUMNS
        staging = ds_pipe.tiles.index(W)
        convert_dq_accumulator(
            accum, dq, q_pipe, do_pipe, staging, steps, scheduler, grad_scale, GROUP, BLOCK_N, PIECES, W
        )


@gluon.jit
def _start_dq(ds_pipe, i, k_tile, zero, BLOCK_M: gl.constexpr, HEAD_DIM: gl.constexpr, W: gl.constexpr):
    """Start half W of dQ = dS K of step i: 64 of 128 queries, or half the columns of 64 queries.

    Waits for the other consumer's half of dS.
    """
    mbarrier.wait(ds_pipe.full[1 - W].index(stage_of(ds_pipe, i)), phase_of(ds_pipe, i))
    ds_tile = ds_pipe.tiles.index(stage_of(ds_pipe, i))  # [BLOCK_N, BLOCK_M]
    k_all = k_tile.reshape([BLOCK_N, HEAD_DIM])
    if BLOCK_M == 128:
        ds_tile = ds_tile.slice(64 * W, 64, 1)
    else:
        k_all = k_all.slice(HEAD_DIM // 2 * W, HEAD_DIM // 2, 1)
    return warpgroup_mma(ds_tile.permute((1, 0)), k_all, zero, use_acc=False, is_async=True)


@gluon.jit
def _consumer_rows(tile, i, W: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Rows 64 W to 64 W + 63 of a tile of keys or values."""
    return tile.index(i).reshape([BLOCK_N, HEAD_DIM]).slice(64 * W, 64)
