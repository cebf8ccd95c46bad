"""dK and dV for Hopper at head dimension 256: of 64 keys, one consumer computes dV and the other dK.

Both gradients of 128 keys would not fit the registers. With 64 keys, the accumulator of dQ in memory would be updated
twice as often as in ``fused``, so dQ has a kernel of its own (``dq``). One consumer computes S transposed,
its weights and dV; the other computes dP transposed, dS and dK. The weights pass from the first to the second through
shared memory, with a negative sign where dropout removes them. Partitions: the consumer for dV, the consumer for dK, a
loader.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flash_train.attention.kernels.device.mask import query_visits, visible
from flash_train.attention.kernels.device.philox import Dropout, first_element
from flash_train.attention.kernels.device.score import capped_slope, load_slope, logits
from flash_train.attention.kernels.hopper.backward.loads import KV_LOADED, Descriptors, Operands, load_tiles
from flash_train.attention.kernels.hopper.dropout import apply_dropout, draw_keep_flags, make_generator
from flash_train.attention.kernels.hopper.gluon_compat import tma_store, tma_store_wait
from flash_train.attention.kernels.hopper.pipeline import (
    consumer_release,
    consumer_wait,
    make_barriers,
    make_pipeline,
    make_schedule_fence,
    once,
    producer_acquire,
    producer_commit,
    schedule_fence,
    stage_of,
    tile_of,
)
from flash_train.attention.kernels.hopper.scheduler import (
    TileScheduler,
    find_work_tile,
    is_reversed,
    lanes,
    query_tile,
    step_needs_mask,
    tma_coords,
)

BLOCK_N = gl.constexpr(64)
P_STAGES = gl.constexpr(2)


@gluon.jit(do_not_specialize=["n_entries", "seqlen_q", "seqlen_k", "heads_at_once", "n_sms"])
def hopper_backward_wide(
    q, k, v, dout, lse2, delta, dk, dv, cu_q, cu_k, mask, score, dropout, grad_scale, n_entries, seqlen_q, seqlen_k,
    n_kv_heads, heads_at_once, n_sms, padded_rows,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """dK and dV. ``grad_scale`` is the scale over the rate of keeping.

    q, dout, k, v, dk and dv are TMA descriptors (``descriptors.describe``) of tiles [BLOCK_M, HEAD_DIM] and
    [BLOCK_N, HEAD_DIM]; lse2 and delta describe tiles [BLOCK_M] of (heads * padded_rows). Grid: a program for each work
    tile of keys (``scheduler.find_work_tile``).

    The loader loads K and V of the work tile, and then Q, lse2, dO and delta of each step. In each step

    1. the first consumer computes Sᵀ = K Qᵀ and Pᵀ with mask and dropout, stores Pᵀ to shared memory, and starts
       dV += Pᵀ dO;
    2. the second consumer computes dPᵀ = V dOᵀ, loads Pᵀ, computes dSᵀ = Pᵀ (dPᵀ - delta), and starts dK += dSᵀ Q.

    At the end each consumer writes its gradient.
    """
    scheduler = TileScheduler(cu_q, cu_k, n_entries, seqlen_q, seqlen_k, n_kv_heads, heads_at_once, n_sms)
    descs = Descriptors(q, k, v, dout, lse2, delta)
    k_tile = gl.allocate_shared_memory(k.dtype, [1] + k.block_shape, k.layout)
    v_tile = gl.allocate_shared_memory(v.dtype, [1] + v.block_shape, v.layout)
    q_tiles = gl.allocate_shared_memory(q.dtype, [STAGES] + q.block_shape, q.layout)
    do_tiles = gl.allocate_shared_memory(dout.dtype, [STAGES] + dout.block_shape, dout.layout)
    lse_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], lse2.layout)
    delta_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], delta.layout)
    P: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], k.dtype)
    p_tiles = gl.allocate_shared_memory(k.dtype, [P_STAGES, BLOCK_N, BLOCK_M], P)
    q_pipe = make_pipeline(q_tiles, STAGES, 2)
    do_pipe = make_pipeline(do_tiles, STAGES, 2)
    p_pipe = make_pipeline(p_tiles, P_STAGES, 1)
    operands = Operands(k_tile, v_tile, q_pipe, do_pipe, lse_tiles, delta_tiles, make_barriers(1, 2))
    fence = make_schedule_fence()
    fence_async_shared()
    gl.warp_specialize(
        [
            (_dv_consumer, (
                dv, operands, p_pipe, fence, scheduler, mask, score, dropout, GROUP, BLOCK_M, HEAD_DIM,
            )),
            (_dk_consumer, (dk, operands, p_pipe, scheduler, mask, dropout, grad_scale, GROUP, BLOCK_M, HEAD_DIM)),
            (load_tiles, (descs, operands, scheduler, mask, padded_rows, GROUP, BLOCK_M, BLOCK_N)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip


@gluon.jit
def _dv_consumer(
    dv, operands, p_pipe, fence, scheduler, mask, score, dropout,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """The weights P, and dV."""
    PACKED: gl.constexpr = scheduler.cu_q is not None
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])  # S transposed [64, BLOCK_M]
    D: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])  # dV [64, HEAD_DIM]
    A: gl.constexpr = gl.DotOperandLayout(0, D, 2)
    COLS: gl.constexpr = gl.SliceLayout(0, S)
    k_tile = operands.k_tile
    q_pipe = operands.q
    do_pipe = operands.do
    dtype: gl.constexpr = k_tile.dtype
    seq, kv_head, start_n, is_valid = find_work_tile(gl.program_id(0), scheduler, BLOCK_N, False, False)
    if is_valid:
        visits = query_visits(mask, seq, kv_head.to(gl.int64) * GROUP, start_n, lanes(), BLOCK_M, BLOCK_N)
        reverse = is_reversed(gl.program_id(0), scheduler)
        steps = GROUP * (visits.stop - visits.first)
        first_entry, first_query, first_key = first_element(dropout, seq)
        entry_dropout = Dropout(
            dropout.state, dropout.threshold, first_entry, dropout.head, first_query, first_key, dropout.by_element
        )  # fmt: skip
        generator = make_generator(dropout, BLOCK_M, False)
        partial = start_n + BLOCK_N > seq.len_k  # keys past the end are zeros, and their weights must be 0
        acc = gl.zeros([64, HEAD_DIM], gl.float32, D)
        zero = gl.zeros([64, BLOCK_M], gl.float32, S)

        mbarrier.wait(operands.kv.index(KV_LOADED), 0)
        if steps > 0:
            consumer_wait(q_pipe, 0)
            k_own = k_tile.index(0).reshape([BLOCK_N, HEAD_DIM])
            s_next = warpgroup_mma(k_own, tile_of(q_pipe, 0).permute((1, 0)), zero, use_acc=False, is_async=True)
            for i in range(0, steps):
                head, start_m = query_tile(visits, mask, kv_head, i, reverse, GROUP, BLOCK_M)
                head = head.to(gl.int64)
                if dropout.state is not None:  # while the matrix unit works
                    keep_even, keep_odd = draw_keep_flags(
                        entry_dropout, generator, seq.index, head, start_m, start_n, BLOCK_M, True
                    )
                    schedule_fence(fence)
                qk = warpgroup_mma_wait(0, deps=[s_next])  # S transposed [64, BLOCK_M]
                lse_row = operands.lse_tiles.index(stage_of(q_pipe, i)).load(COLS)
                consumer_release(q_pipe, i)
                offs_m = start_m + gl.arange(0, BLOCK_M, COLS)[None, :]
                offs_n = start_n + gl.arange(0, 64, gl.SliceLayout(1, S))[:, None]
                distance = gl.abs(offs_m + (seq.len_k - seq.len_q) - offs_n)
                s = logits(qk, score, load_slope(score, seq, head), distance, False)
                p = gl.exp2(s * score.factor - lse_row[None, :])
                if step_needs_mask(visits, i, reverse, GROUP) | partial:
                    p = gl.where(visible(mask, seq, head, once(offs_m), offs_n), p, 0.0)
                p_kept = p
                p_signed = p  # for the other consumer
                if dropout.state is not None:
                    p_kept = apply_dropout(p, keep_even, keep_odd, S, BLOCK_M, True)
                    p_signed = 2.0 * p_kept - p
                if score.softcap is not None:
                    p_signed *= capped_slope(qk, score, False)
                p16 = p_kept.to(dtype)
                producer_acquire(p_pipe, i)
                p_pipe.tiles.index(stage_of(p_pipe, i)).store(p_signed.to(dtype))
                fence_async_shared()
                producer_commit(p_pipe, i)
                consumer_wait(do_pipe, i)
                acc_next = warpgroup_mma(gl.convert_layout(p16, A), tile_of(do_pipe, i), acc, is_async=True)
                # The next S. The last step computes one from old data and discards it.
                consumer_wait(q_pipe, i + 1, i + 1 < steps)
                # The index is always 0: addresses that depend on a step are computed in it, not kept in registers.
                k_own = k_tile.index(i >> 30).reshape([BLOCK_N, HEAD_DIM])
                s_next = warpgroup_mma(
                    k_own, tile_of(q_pipe, i + 1).permute((1, 0)), zero, use_acc=False, is_async=True
                )
                acc = warpgroup_mma_wait(1, deps=[acc_next])
                consumer_release(do_pipe, i)
            warpgroup_mma_wait(0, deps=[s_next])

        scale = 1.0
        if dropout.state is not None:
            scale = 256.0 / dropout.threshold
        _store(dv, k_tile, acc * scale, seq, kv_head, start_n, PACKED, HEAD_DIM)  # only this consumer reads the keys


@gluon.jit
def _dk_consumer(
    dk, operands, p_pipe, scheduler, mask, dropout, grad_scale,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """dS, and dK."""
    PACKED: gl.constexpr = scheduler.cu_q is not None
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])  # dP transposed [64, BLOCK_M]
    D: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])  # dK [64, HEAD_DIM]
    A: gl.constexpr = gl.DotOperandLayout(0, D, 2)
    COLS: gl.constexpr = gl.SliceLayout(0, S)
    v_tile = operands.v_tile
    q_pipe = operands.q
    do_pipe = operands.do
    dtype: gl.constexpr = v_tile.dtype
    seq, kv_head, start_n, is_valid = find_work_tile(gl.program_id(0), scheduler, BLOCK_N, False, False)
    if is_valid:
        visits = query_visits(mask, seq, kv_head.to(gl.int64) * GROUP, start_n, lanes(), BLOCK_M, BLOCK_N)
        steps = GROUP * (visits.stop - visits.first)
        acc = gl.zeros([64, HEAD_DIM], gl.float32, D)
        zero = gl.zeros([64, BLOCK_M], gl.float32, S)

        mbarrier.wait(operands.kv.index(KV_LOADED), 0)
        if steps > 0:
            consumer_wait(do_pipe, 0)
            v_own = v_tile.index(0).reshape([BLOCK_N, HEAD_DIM])
            dp_next = warpgroup_mma(v_own, tile_of(do_pipe, 0).permute((1, 0)), zero, use_acc=False, is_async=True)
            for i in range(0, steps):
                dp = warpgroup_mma_wait(0, deps=[dp_next])  # [64, BLOCK_M]
                delta_row = operands.delta_tiles.index(stage_of(do_pipe, i)).load(COLS)
                consumer_release(do_pipe, i)
                consumer_wait(p_pipe, i)
                p = p_pipe.tiles.index(stage_of(p_pipe, i)).load(S).to(gl.float32)
                consumer_release(p_pipe, i)
                if dropout.state is not None:  # a negative weight is one that dropout removed
                    dp = gl.where(p < 0.0, 0.0, dp)
                    p = gl.abs(p)
                ds16 = (p * (dp - delta_row[None, :])).to(dtype)
                consumer_wait(q_pipe, i)
                acc_next = warpgroup_mma(gl.convert_layout(ds16, A), tile_of(q_pipe, i), acc, is_async=True)
                # The next dP. The last step computes one from old data and discards it.
                consumer_wait(do_pipe, i + 1, i + 1 < steps)
                v_own = v_tile.index(i >> 30).reshape([BLOCK_N, HEAD_DIM])  # always 0, as above
                dp_next = warpgroup_mma(
                    v_own, tile_of(do_pipe, i + 1).permute((1, 0)), zero, use_acc=False, is_async=True
                )
                acc = warpgroup_mma_wait(1, deps=[acc_next])
                consumer_release(q_pipe, i)
            warpgroup_mma_wait(0, deps=[dp_next])

        _store(dk, v_tile, acc * grad_scale, seq, kv_head, start_n, PACKED, HEAD_DIM)  # only this one reads the values


@gluon.jit
def _store(desc, tile, x, seq, kv_head, start_n, PACKED: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Write a gradient through shared memory of a tile that is no longer read."""
    tile.index(0).reshape([BLOCK_N, HEAD_DIM]).store(x.to(tile.dtype))
    fence_async_shared()
    coords = tma_coords(seq, kv_head, start_n, seq.k_row, seq.len_k, PACKED)
    tma_store(desc, coords, tile.index(0))
    tma_store_wait(0)
