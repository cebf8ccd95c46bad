"""dQ by itself, for Hopper: each tile of queries belongs to one program, so that dQ is bitwise the same in every run.

A loader feeds two consumers of 64 queries each. As in the forward, a consumer computes the next logits while the matrix
unit adds a block to dQ.
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

from flash_train.attention.kernels.device.mask import count_edges, key_visits, visible
from flash_train.attention.kernels.device.philox import Dropout, first_element
from flash_train.attention.kernels.device.score import capped_slope, load_slope, logits
from flash_train.attention.kernels.hopper.dropout import apply_dropout, draw_keep_flags, make_generator
from flash_train.attention.kernels.hopper.gluon_compat import tma_load, tma_store, tma_store_wait
from flash_train.attention.kernels.hopper.pipeline import (
    consumer_release,
    consumer_wait,
    make_barriers,
    make_pipeline,
    make_schedule_fence,
    once,
    producer_load,
    schedule_fence,
    tile_of,
)
from flash_train.attention.kernels.hopper.scheduler import (
    TileScheduler,
    find_work_tile,
    first_padded_row,
    key_block_start,
    lanes,
    tma_coords,
)

BLOCK_M = gl.constexpr(128)


class SharedMemory(NamedTuple):
    """What the partitions of a program share."""

    q_tiles: Any  #: [64, HEAD_DIM] for each consumer
    do_tiles: Any
    q_full: Any  #: barrier of q_tiles and do_tiles
    k: Any  #: Pipeline of tiles [BLOCK_N, HEAD_DIM]
    v: Any
    schedule_fences: Any


@gluon.jit(do_not_specialize=["n_entries", "seqlen_q", "seqlen_k", "heads_at_once"])
def hopper_backward_dq(
    q, k, v, dout, lse2_ptr, delta_ptr, dq, dslope, cu_q, cu_k, mask, score, dropout, grad_scale, keep_rate, n_entries,
    seqlen_q, seqlen_k, n_heads, heads_at_once, padded_rows,
    GROUP: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """dQ, and the gradient of ALiBi slopes.

    q, dout and dq are TMA descriptors of tiles [64, HEAD_DIM], and k and v of [BLOCK_N, HEAD_DIM]; lse2 and delta come
    from ``hopper_prepare``. ``dslope``, if not None, receives each row's part of the gradient of its ALiBi slope.
    Grid: a program for each work tile of queries (``scheduler.find_work_tile``).

    The loader loads Q and dO of the work tile, and then K and V of each block. Each consumer, for its 64 queries and
    each block:

    1. waits for S = Q Kᵀ, starts dP = dO Vᵀ, and computes P = exp2(S - lse2) with the mask;
    2. computes dS = P (dP - delta), with dropped elements of dP set to 0;
    3. starts dQ += dS K, and S of the next block.
    """
    scheduler = TileScheduler(cu_q, cu_k, n_entries, seqlen_q, seqlen_k, n_heads, heads_at_once)
    q_tiles = gl.allocate_shared_memory(q.dtype, [2] + q.block_shape, q.layout)
    do_tiles = gl.allocate_shared_memory(dout.dtype, [2] + dout.block_shape, dout.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [K_STAGES] + k.block_shape, k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [V_STAGES] + v.block_shape, v.layout)
    q_full = make_barriers(1, 1)
    fences = (make_schedule_fence(), make_schedule_fence())
    smem = SharedMemory(
        q_tiles, do_tiles, q_full, make_pipeline(k_tiles, K_STAGES, 2), make_pipeline(v_tiles, V_STAGES, 2), fences
    )
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consumer, (
                dq, dslope, lse2_ptr, delta_ptr, smem, scheduler, mask, score, dropout, grad_scale, keep_rate,
                padded_rows, BLOCK_N, HEAD_DIM, 0,
            )),
            (_consumer, (
                dq, dslope, lse2_ptr, delta_ptr, smem, scheduler, mask, score, dropout, grad_scale, keep_rate,
                padded_rows, BLOCK_N, HEAD_DIM, 1,
            )),
            (_loader, (q, k, v, dout, smem, scheduler, mask, GROUP, BLOCK_N)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip


@gluon.jit
def _loader(q, k, v, dout, smem, scheduler, mask, GROUP: gl.constexpr, BLOCK_N: gl.constexpr):
    PACKED: gl.constexpr = scheduler.cu_q is not None
    seq, head, start_m, is_valid = find_work_tile(gl.program_id(0), scheduler, BLOCK_M, True, mask.right is not None)
    if is_valid:
        full = smem.q_full.index(0)
        mbarrier.expect(full, 2 * (q.block_type.nbytes + dout.block_type.nbytes))
        for w in gl.static_range(2):
            coords = tma_coords(seq, head, start_m + 64 * w, seq.q_row, seq.len_q, PACKED)
            tma_load(q, coords, full, smem.q_tiles.index(w))
            tma_load(dout, coords, full, smem.do_tiles.index(w))
        visits = key_visits(mask, seq, head.to(gl.int64), start_m, lanes(), BLOCK_M, BLOCK_N)
        for i in range(0, visits.stop - visits.first):
            start_n = key_block_start(visits, mask, seq, i, BLOCK_N)
            coords = tma_coords(seq, head // GROUP, start_n, seq.k_row, seq.len_k, PACKED)
            producer_load(smem.k, i, k, coords)
            producer_load(smem.v, i, v, coords)


@gluon.jit
def _consumer(
    dq, dslope, lse2_ptr, delta_ptr, smem, scheduler, mask, score, dropout, grad_scale, keep_rate, padded_rows,
    BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """dQ of queries 64 W to 64 W + 63 of the work tile."""
    PACKED: gl.constexpr = scheduler.cu_q is not None
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])  # S and dP [64, BLOCK_N]
    D: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])  # dQ [64, HEAD_DIM]
    A: gl.constexpr = gl.DotOperandLayout(0, D, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, S)
    dtype: gl.constexpr = smem.q_tiles.dtype
    k_pipe = smem.k
    v_pipe = smem.v
    seq, head, start_m, is_valid = find_work_tile(gl.program_id(0), scheduler, BLOCK_M, True, mask.right is not None)
    if is_valid:
        head64 = head.to(gl.int64)
        visits = key_visits(mask, seq, head64, start_m, lanes(), BLOCK_M, BLOCK_N)
        steps = visits.stop - visits.first
        slope = load_slope(score, seq, head64)
        first_entry, first_query, first_key = first_element(dropout, seq)
        entry_dropout = Dropout(
            dropout.state, dropout.threshold, first_entry, dropout.head, first_query, first_key, dropout.by_element
        )  # fmt: skip
        generator = make_generator(dropout, BLOCK_N, False)
        start_m += 64 * W
        rows = start_m + gl.arange(0, 64, ROWS)
        offs_m = rows[:, None]
        offs_padded = head64 * padded_rows + first_padded_row(seq, scheduler) + rows
        lse2, delta = gl.load(lse2_ptr + offs_padded), gl.load(delta_ptr + offs_padded)  # [64]
        q_tile = smem.q_tiles.index(W).reshape([64, HEAD_DIM])
        acc = gl.zeros([64, HEAD_DIM], gl.float32, D)
        slope_part = gl.zeros([64], gl.float32, ROWS)
        zero = gl.zeros([64, BLOCK_N], gl.float32, S)

        mbarrier.wait(smem.q_full.index(0), 0)
        if steps > 0:
            consumer_wait(k_pipe, 0)
            s_next = warpgroup_mma(q_tile, tile_of(k_pipe, 0).permute((1, 0)), zero, use_acc=False, is_async=True)
            for i in range(0, steps):
                # Always W. Addresses that depend on a step are computed in it; other addresses stay in registers.
                own = W + (i >> 30)
                q_tile = smem.q_tiles.index(own).reshape([64, HEAD_DIM])
                do_tile = smem.do_tiles.index(own).reshape([64, HEAD_DIM])
                start_n = key_block_start(visits, mask, seq, i, BLOCK_N)
                if dropout.state is not None:  # while the matrix unit works
                    keep_even, keep_odd = draw_keep_flags(
                        entry_dropout, generator, seq.index, head64, start_m, start_n, BLOCK_N, False
                    )
                    schedule_fence(smem.schedule_fences[0])
                qk = warpgroup_mma_wait(0, deps=[s_next])  # [64, BLOCK_N]
                consumer_wait(v_pipe, i)
                dp_next = warpgroup_mma(do_tile, tile_of(v_pipe, i).permute((1, 0)), zero, use_acc=False, is_async=True)
                offs_n = start_n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))[None, :]
                distance = gl.abs(offs_m + (seq.len_k - seq.len_q) - offs_n)
                s = logits(qk, score, slope, distance, False)
                p = gl.exp2(s * score.factor - lse2[:, None])
                if i < count_edges(visits):
                    p = gl.where(visible(mask, seq, head64, once(offs_m), offs_n), p, 0.0)
                schedule_fence(smem.schedule_fences[1])
                dp = warpgroup_mma_wait(0, deps=[dp_next])
                consumer_release(v_pipe, i)
                if dropout.state is not None:
                    dp = apply_dropout(dp, keep_even, keep_odd, S, BLOCK_N, False)
                ds = p * (dp - delta[:, None])
                if dslope is not None:
                    slope_part -= gl.sum(ds * distance.to(gl.float32), 1)
                if score.softcap is not None:
                    ds *= capped_slope(qk, score, False)
                ds16 = gl.convert_layout(ds.to(dtype), A)
                acc_next = warpgroup_mma(ds16, tile_of(k_pipe, i), acc, is_async=True)
                # The next S. The last step computes one from old data and discards it.
                consumer_wait(k_pipe, i + 1, i + 1 < steps)
                s_next = warpgroup_mma(
                    q_tile, tile_of(k_pipe, i + 1).permute((1, 0)), zero, use_acc=False, is_async=True
                )
                acc = warpgroup_mma_wait(1, deps=[acc_next])
                consumer_release(k_pipe, i)
            warpgroup_mma_wait(0, deps=[s_next])

        smem.q_tiles.index(W).reshape([64, HEAD_DIM]).store((acc * grad_scale).to(dtype))
        fence_async_shared()
        coords = tma_coords(seq, head, start_m, seq.q_row, seq.len_q, PACKED)
        tma_store(dq, coords, smem.q_tiles.index(W))
        if dslope is not None:
            slope_ptrs = dslope.ptr + seq.batch * dslope.stride_batch + head64 * dslope.stride_head + seq.q_row + rows
            gl.store(slope_ptrs, slope_part / keep_rate, mask=rows < seq.len_q)
        tma_store_wait(0)
