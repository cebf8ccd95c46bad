"""The forward kernel for Hopper: a producer warp loads, and two or three consumer warpgroups compute 64 queries each.

The grid is persistent: a program takes the next work tile when it has begun to load the last keys of the current one.
So all programs end at about the same time. A consumer has one product of each kind in flight: while it exponentiates
the logits of a block, the matrix unit adds the block before to the output. The reference that a consumer subtracts from
logits is the row maximum of the first block. The consumer does not update it at every block. If the weights of a block
become too large, which is rare, the consumer computes this block again with new row maxima.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flash_train.attention.kernels.device.mask import THREAD_COLUMNS, count_edges, key_visits, visible
from flash_train.attention.kernels.device.philox import Dropout, first_element
from flash_train.attention.kernels.device.score import load_slope, logits
from flash_train.attention.kernels.device.softmax import add_sink, advance_max, finish_rows
from flash_train.attention.kernels.hopper.dropout import apply_dropout_packed, draw_keep_flags, make_generator
from flash_train.attention.kernels.hopper.gluon_compat import sync_warps, tma_load, tma_store, tma_store_wait
from flash_train.attention.kernels.hopper.online_softmax import (
    any_overflow,
    exceeds_limit,
    make_overflow_flags,
    rescale,
    rescale_sums,
    row_max,
    thread_row_sums,
)
from flash_train.attention.kernels.hopper.packed16 import pack, unpack
from flash_train.attention.kernels.hopper.pipeline import (
    consumer_release,
    consumer_release_no_sync,
    consumer_wait,
    load_scalar,
    make_pipeline,
    make_schedule_fence,
    make_scheduler_barriers,
    make_shared_scalars,
    once,
    producer_acquire,
    producer_load,
    schedule_fence,
    stage_of,
    store_scalar,
    tile_of,
    warp_scheduler_arrive,
    warp_scheduler_sync,
)
from flash_train.attention.kernels.hopper.scheduler import (
    TileScheduler,
    count_work_tiles,
    find_work_tile,
    key_block_start,
    lanes,
    next_work_tile,
    reset_counter,
    tma_coords,
)


class SharedMemory(NamedTuple):
    """What the partitions of a program share."""

    q: Any  #: Pipeline of tiles [64, HEAD_DIM], CONSUMERS of them in each stage
    k: Any  #: Pipeline of tiles [BLOCK_N, HEAD_DIM]
    v: Any  #: Pipeline of tiles [BLOCK_N, HEAD_DIM]
    tile_ids: Any  #: the work tile of each stage of q; -1: there are no more
    scheduler_barriers: Any
    schedule_fences: Any
    overflow_flags: Any


class QueryTile(NamedTuple):
    """The work tile of a consumer."""

    tile_id: Any
    stage: Any  #: of ``SharedMemory.q``
    q_tile: Any  #: [64, HEAD_DIM] in shared memory
    seq: Any  #: the Entry
    head: Any
    start_m: Any  #: the consumer's first query
    offs_m: Any  #: [64]
    visits: Any  #: the blocks of keys


class RowState(NamedTuple):
    """The running softmax of a consumer, from one block to the next."""

    m_i: Any  #: [64]: the reference that was subtracted from logits, in units of log2
    acc: Any  #: [64, HEAD_DIM], fp32: the output before its division
    keep_even: Any  #: the last block's flags of ``draw_keep_flags``
    keep_odd: Any
    p: Any  #: [64, BLOCK_N / 2], packed: the last block's weights, not yet added to acc
    row_sums: Any  #: [64, 8]: sums of weights (``thread_row_sums``)


@gluon.jit(do_not_specialize=["n_entries", "seqlen_q", "seqlen_k", "heads_at_once"])
def hopper_forward(
    q, k, v, out, lse, counter_ptr, cu_q, cu_k, mask, score, sinks_ptr, dropout, n_entries, seqlen_q, seqlen_k, n_heads,
    heads_at_once,
    GROUP: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, CONSUMERS: gl.constexpr, Q_STAGES: gl.constexpr,
    K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, PINGPONG: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """out = softmax(logits) v, and the natural log-sum-exp of the logits.

    q, k, v and out are TMA descriptors (``descriptors.describe``) of tiles [64, HEAD_DIM] and [BLOCK_N, HEAD_DIM]; lse
    is fp32; counter_ptr is an int32 that is 0 before and after the launch. Grid: a program for each SM, or for each
    work tile if there are fewer.

    The producer, for each work tile of 64 * CONSUMERS queries:

    1. loads the queries, with the number of the work tile;
    2. loads the keys and values of each block that the mask leaves;
    3. takes the next work tile from the counter.

    Each consumer, for its 64 queries of the work tile:

    1. computes S = q kᵀ of the first block, its row maxima and its weights P;
    2. for each further block: starts its S, starts out += P v of the block before, and computes its P meanwhile
       (``_step``);
    3. adds the last block to out;
    4. adds the sink, divides by the row sums, and writes out and lse.
    """
    scheduler = TileScheduler(cu_q, cu_k, n_entries, seqlen_q, seqlen_k, n_heads, heads_at_once)
    q_tiles = gl.allocate_shared_memory(q.dtype, [Q_STAGES * CONSUMERS] + q.block_shape, q.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [K_STAGES] + k.block_shape, k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [V_STAGES] + v.block_shape, v.layout)
    smem = SharedMemory(
        make_pipeline(q_tiles, Q_STAGES, CONSUMERS), make_pipeline(k_tiles, K_STAGES, CONSUMERS),
        make_pipeline(v_tiles, V_STAGES, CONSUMERS), make_shared_scalars(Q_STAGES), make_scheduler_barriers(),
        (make_schedule_fence(), make_schedule_fence()), make_overflow_flags(CONSUMERS),
    )  # fmt: skip
    fence_async_shared()
    # Gluon takes no starred arguments, so each consumer lists them.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consumer, (
                    out, lse, smem, scheduler, mask, score, sinks_ptr, dropout,
                    GROUP, BLOCK_N, HEAD_DIM, CONSUMERS, Q_STAGES, PINGPONG, 0,
                )),
                (_consumer, (
                    out, lse, smem, scheduler, mask, score, sinks_ptr, dropout,
                    GROUP, BLOCK_N, HEAD_DIM, CONSUMERS, Q_STAGES, PINGPONG, 1,
                )),
                (_producer, (q, k, v, smem, counter_ptr, scheduler, mask, GROUP, BLOCK_N, CONSUMERS)),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consumer, (
                    out, lse, smem, scheduler, mask, score, sinks_ptr, dropout,
                    GROUP, BLOCK_N, HEAD_DIM, CONSUMERS, Q_STAGES, PINGPONG, 0,
                )),
                (_consumer, (
                    out, lse, smem, scheduler, mask, score, sinks_ptr, dropout,
                    GROUP, BLOCK_N, HEAD_DIM, CONSUMERS, Q_STAGES, PINGPONG, 1,
                )),
                (_consumer, (
                    out, lse, smem, scheduler, mask, score, sinks_ptr, dropout,
                    GROUP, BLOCK_N, HEAD_DIM, CONSUMERS, Q_STAGES, PINGPONG, 2,
                )),
                (_producer, (q, k, v, smem, counter_ptr, scheduler, mask, GROUP, BLOCK_N, CONSUMERS)),
            ],
            [4, 4, 1], [160, 160, 24],
        )  # fmt: skip


@gluon.jit
def _producer(
    q, k, v, smem, counter_ptr, scheduler, mask, GROUP: gl.constexpr, BLOCK_N: gl.constexpr, CONSUMERS: gl.constexpr
):
    """Load the queries of each work tile, and then its keys and values block by block."""
    PACKED: gl.constexpr = scheduler.cu_q is not None
    BLOCK_M: gl.constexpr = 64 * CONSUMERS
    n_tiles = count_work_tiles(scheduler, BLOCK_M)
    done = 0  # work tiles
    step = 0  # blocks of keys of all work tiles
    tile_id = gl.program_id(0)
    while tile_id < n_tiles:
        seq, head, start_m, is_valid = find_work_tile(tile_id, scheduler, BLOCK_M, True, mask.right is not None)
        if is_valid:
            producer_acquire(smem.q, done)
            stage = stage_of(smem.q, done)
            store_scalar(smem.tile_ids, stage, tile_id)
            q_full = smem.q.full.index(stage)
            mbarrier.expect(q_full, CONSUMERS * q.block_type.nbytes)
            for w in gl.static_range(CONSUMERS):
                tma_load(
                    q, tma_coords(seq, head, start_m + 64 * w, seq.q_row, seq.len_q, PACKED), q_full,
                    smem.q.tiles.index(stage * CONSUMERS + w),
                )  # fmt: skip
            done += 1
            visits = key_visits(mask, seq, head, start_m, lanes(), BLOCK_M, BLOCK_N)
            for j in range(0, gl.maximum(visits.stop - visits.first, 1)):
                start_n = key_block_start(visits, mask, seq, j, BLOCK_N)
                coords = tma_coords(seq, head // GROUP, start_n, seq.k_row, seq.len_k, PACKED)
                producer_load(smem.k, step, k, coords)
                producer_load(smem.v, step, v, coords)
                step += 1
        tile_id = next_work_tile(counter_ptr)
    reset_counter(counter_ptr, tile_id, n_tiles)
    producer_acquire(smem.q, done)
    store_scalar(smem.tile_ids, stage_of(smem.q, done), tile_id * 0 - 1)
    mbarrier.arrive(smem.q.full.index(stage_of(smem.q, done)), count=1)


@gluon.jit
def _consumer(
    out, lse, smem, scheduler, mask, score, sinks_ptr, dropout,
    GROUP: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, CONSUMERS: gl.constexpr, Q_STAGES: gl.constexpr,
    PINGPONG: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Compute queries 64 W to 64 W + 63 of each work tile."""
    PACKED: gl.constexpr = scheduler.cu_q is not None
    BLOCK_M: gl.constexpr = 64 * CONSUMERS
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])  # logits [64, BLOCK_N]
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])  # output [64, HEAD_DIM]
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S)
    dtype: gl.constexpr = smem.q.tiles.dtype
    generator = make_generator(dropout, BLOCK_N, True)
    done = 0
    step = gl.to_tensor(0)
    consumer_wait(smem.q, done)
    tile_id = load_scalar(smem.tile_ids, stage_of(smem.q, done))
    while tile_id >= 0:
        seq, head, start_m, is_valid = find_work_tile(tile_id, scheduler, BLOCK_M, True, mask.right is not None)
        head64 = head.to(gl.int64)
        visits = key_visits(mask, seq, head64, start_m, lanes(), BLOCK_M, BLOCK_N)
        slope = load_slope(score, seq, head64)
        first_entry, first_query, first_key = first_element(dropout, seq)
        entry_dropout = Dropout(
            dropout.state, dropout.threshold, first_entry, dropout.head, first_query, first_key, dropout.by_element
        )  # fmt: skip
        start_m += 64 * W
        offs_m = start_m + gl.arange(0, 64, S_ROWS)
        q_buffer = smem.q.tiles.index(stage_of(smem.q, done) * CONSUMERS + W)
        q_tile = q_buffer.reshape([64, HEAD_DIM])
        tile = QueryTile(tile_id, stage_of(smem.q, done), q_tile, seq, head64, start_m, offs_m, visits)
        m_i = gl.full([64], float("-inf"), gl.float32, S_ROWS)
        acc = gl.zeros([64, HEAD_DIM], gl.float32, OUT)

        consumer_wait(smem.k, step)
        warp_scheduler_sync(smem.scheduler_barriers, step, W, PINGPONG)
        s_next = _start_logits(q_tile, smem.k, step, BLOCK_N, S)
        warp_scheduler_arrive(smem.scheduler_barriers, step, W, CONSUMERS, PINGPONG)
        if Q_STAGES > 1:  # by now TMA has read the output of the tile before from its stage of q
            tma_store_wait(0)
            consumer_release(smem.q, gl.maximum(done - 1, 0), done > 0)
        keep_even, keep_odd = _draw_block(entry_dropout, generator, 0, tile, head64, mask, BLOCK_N)
        s = warpgroup_mma_wait(0, deps=[s_next])
        consumer_release(smem.k, step)
        s = _masked_logits(s, 0, tile, head64, mask, score, slope, BLOCK_N, S)
        alpha, reference, m_i = advance_max(m_i, row_max(s), score.factor, True)
        p = gl.exp2(s * score.factor - reference[:, None])
        row_sums = thread_row_sums(p)
        m_i = gl.where(offs_m < seq.len_q, m_i, 0.0)  # rows past the end must not cause a second computation
        rows = RowState(m_i, acc, keep_even, keep_odd, pack(p, dtype), row_sums)
        for j in range(1, visits.stop - visits.first):
            rows = _step(
                rows, j, step, smem, tile, mask, score, slope, entry_dropout, generator, BLOCK_N, HEAD_DIM, CONSUMERS,
                PINGPONG, W,
            )  # fmt: skip
            step += 1
        m_i, acc, keep_even, keep_odd, p, row_sums = rows
        if dropout.state is not None:
            p = apply_dropout_packed(p, keep_even, keep_odd, BLOCK_N, False)
        consumer_wait(smem.v, step)
        acc_next = _start_output(p, smem.v, acc, step)
        acc = warpgroup_mma_wait(0, deps=[acc_next])
        consumer_release(smem.v, step)
        step += 1

        l_i = gl.convert_layout(gl.sum(row_sums, 1), S_ROWS)
        if sinks_ptr is not None:
            alpha, m_i, l_i = add_sink(m_i, l_i, gl.load(sinks_ptr + head))
            acc = rescale(acc, alpha)
        lse_tile, norm = finish_rows(m_i, l_i)
        if PACKED:  # rows past the last boundary have no sink either
            lse_tile = gl.where(seq.index < scheduler.n_entries, lse_tile, float("-inf"))
        if dropout.state is not None:
            norm = norm * (dropout.threshold * (1.0 / 256.0))
        acc = rescale(acc, 1.0 / norm)
        q_tile.store(acc.to(dtype))
        fence_async_shared()
        tma_store(out, tma_coords(seq, head, start_m, seq.q_row, seq.len_q, PACKED), q_buffer)
        lse_ptrs = lse.ptr + seq.batch * lse.stride_batch + head64 * lse.stride_head + seq.q_row + offs_m
        gl.store(lse_ptrs, lse_tile, mask=offs_m < seq.len_q)
        if Q_STAGES == 1:
            tma_store_wait(0)
            consumer_release(smem.q, done)
        done += 1
        consumer_wait(smem.q, done)
        tile_id = load_scalar(smem.tile_ids, stage_of(smem.q, done))
    tma_store_wait(0)


@gluon.jit
def _step(
    rows, j, step, smem, tile, mask, score, slope, dropout, generator,
    BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, CONSUMERS: gl.constexpr, PINGPONG: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Process block j while the block before enters the output.

    1. Start S of block j and out += P v of block j - 1.
    2. Wait for S; apply the mask; let the next consumer issue its products.
    3. Exponentiate the first half of the columns, and draw the block's dropout flags.
    4. Wait for the output; exponentiate the second half.
    5. If a weight is too large: compute S again with its row maxima, and rescale the output and the row sums.
    """
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    dtype: gl.constexpr = smem.v.tiles.dtype
    acc, p, m_i, row_sums = rows.acc, rows.p, rows.m_i, rows.row_sums
    head = tile.head
    consumer_wait(smem.k, step + 1)
    warp_scheduler_sync(smem.scheduler_barriers, step + 1, W, PINGPONG)
    s_next = _start_logits(tile.q_tile, smem.k, step + 1, BLOCK_N, S)
    consumer_wait(smem.v, step)
    if dropout.state is not None:
        p = apply_dropout_packed(p, rows.keep_even, rows.keep_odd, BLOCK_N, False)
    acc_next = _start_output(p, smem.v, acc, step)
    sync_warps()  # all warps have read the overflow flags of the step before; here they wait for the products anyway
    if dropout.state is not None:
        # The draws depend on a scalar that is loaded only now. Otherwise the assembler draws between the products,
        # and delays the other consumer's products.
        schedule_fence(smem.schedule_fences[0])
        head = head + (load_scalar(smem.tile_ids, tile.stage) - tile.tile_id)
    s = warpgroup_mma_wait(1, deps=[s_next])
    TERMS: gl.constexpr = len(mask.terms) > 0
    # Mask terms take long, so with them the turn ends here. Otherwise it ends after the mask, so that only one consumer
    # computes logits at a time.
    warp_scheduler_arrive(smem.scheduler_barriers, step + 1, W, CONSUMERS, PINGPONG and TERMS)
    s = _masked_logits(s, j, tile, head, mask, score, slope, BLOCK_N, S)
    warp_scheduler_arrive(smem.scheduler_barriers, step + 1, W, CONSUMERS, PINGPONG and not TERMS)

    # The wait for the output stands between the two halves of the exponentials: the assembler places the rest of the
    # work for the first half among the exponentials of the second.
    first, second = _split_columns(s * score.factor - m_i[:, None])
    first = gl.exp2(first)  # [64, BLOCK_N / 2]
    keep_even, keep_odd = _draw_block(dropout, generator, j, tile, head, mask, BLOCK_N)
    block_sums = thread_row_sums(first)
    too_large = exceeds_limit(block_sums)
    schedule_fence(smem.schedule_fences[1])
    acc = warpgroup_mma_wait(0, deps=[acc_next])
    second = gl.exp2(second)
    second_sums = thread_row_sums(second)
    smem.overflow_flags.index(W).store((too_large | exceeds_limit(second_sums)).to(gl.int8))
    block_sums += second_sums
    p = pack(_join_columns(first, second, S), dtype)
    consumer_release(smem.v, step)
    if any_overflow(smem.overflow_flags.index(W)):
        s_next = _start_logits(tile.q_tile, smem.k, once(step + 1), BLOCK_N, S)
        s = warpgroup_mma_wait(0, deps=[s_next])
        s = _masked_logits(s, once(j), tile, head, mask, score, slope, BLOCK_N, S)
        alpha, reference, m_i = advance_max(m_i, row_max(s), score.factor, True)
        p = gl.exp2(s * score.factor - reference[:, None])
        block_sums = thread_row_sums(p)
        p = pack(p, dtype)
        row_sums = rescale_sums(row_sums, alpha)
        acc = rescale(acc, alpha)
        sync_warps()
    consumer_release_no_sync(smem.k, step + 1)
    row_sums += block_sums
    return RowState(m_i, acc, keep_even, keep_odd, p, row_sums)


@gluon.jit
def _start_logits(q_tile, k_pipe, step, BLOCK_N: gl.constexpr, S: gl.constexpr):
    """Start S = q kᵀ, [64, BLOCK_N]."""
    k_tile = tile_of(k_pipe, step)
    zero = gl.zeros([64, BLOCK_N], gl.float32, S)
    return warpgroup_mma(q_tile, k_tile.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _start_output(p, v_pipe, acc, step):
    """Start acc += P v, [64, HEAD_DIM], with packed weights p."""
    v_tile = tile_of(v_pipe, step)
    weights = unpack(p, v_tile.dtype, gl.DotOperandLayout(0, acc.type.layout, 2))
    return warpgroup_mma(weights, v_tile, acc, is_async=True)


@gluon.jit
def _masked_logits(s, j, tile, head, mask, score, slope, BLOCK_N: gl.constexpr, S: gl.constexpr):
    """The logits of block j, from products s; -inf for hidden keys."""
    seq = tile.seq
    visits = tile.visits
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))[None, :]
    offs_n = columns & ~THREAD_COLUMNS
    start_n = key_block_start(visits, mask, seq, j, BLOCK_N)
    distance = gl.abs(tile.offs_m[:, None] + (seq.len_k - seq.len_q) - (start_n + columns))
    start_n += columns & THREAD_COLUMNS
    s = logits(s, score, slope, distance, False)
    nothing = visits.stop <= visits.first
    if (j < count_edges(visits)) | nothing:
        offs_m = once(tile.offs_m)[:, None]
        if len(mask.terms) > 0 and nothing:  # the block has no positions that a term could be evaluated at
            s = gl.full([64, BLOCK_N], float("-inf"), gl.float32, S)
        else:  # with no visible block, this block begins past the last key, and all of it is hidden
            s = gl.where(visible(mask, seq, head, offs_m, offs_n, start_n=start_n), s, float("-inf"))
    return s


@gluon.jit
def _draw_block(dropout, generator, j, tile, head, mask, BLOCK_N: gl.constexpr):
    """The flags of block j for ``apply_dropout_packed``."""
    keep_even, keep_odd = gl.to_tensor(0), gl.to_tensor(0)
    if dropout.state is not None:
        start_n = key_block_start(tile.visits, mask, tile.seq, j, BLOCK_N)
        keep_even, keep_odd = draw_keep_flags(
            dropout, generator, tile.seq.index, head, tile.start_m, start_n, BLOCK_N, False
        )
    return keep_even, keep_odd


@gluon.jit
def _split_columns(x):
    """The first and the second half of the columns."""
    return gl.split(x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)))


@gluon.jit
def _join_columns(a, b, LAYOUT: gl.constexpr):
    x = gl.join(a, b).permute((0, 2, 1)).reshape([a.shape[0], 2 * a.shape[1]])
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)
