"""dQ by itself, for Hopper: a tile of queries is one program's, so that gradients are bitwise the same at every run.

A loader and two consumers of 64 queries, like the forward: a block enters dQ while the next logits are computed.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flash_train.attention.kernels.device.mask import count_edges, key_visits, visible
from flash_train.attention.kernels.device.philox import load_key
from flash_train.attention.kernels.device.score import capped_slope, load_slope, logits
from flash_train.attention.kernels.hopper.dropout import draw, find_places, keep_wide
from flash_train.attention.kernels.hopper.pipeline import (
    fill,
    hold,
    make_barriers,
    make_mark,
    make_ring,
    once,
    release,
    tile_of,
    wait_full,
)
from flash_train.attention.kernels.hopper.scheduler import Work, at, find_task, lanes, padded_row, start_of_block

BLOCK_M = gl.constexpr(128)


@gluon.jit(do_not_specialize=["n_entries", "seqlen_q", "seqlen_k", "heads_at_once"])
def hopper_backward_dq(
    q, k, v, dout, lse2_ptr, delta_ptr, dq, dslope, cu_q, cu_k, mask, score, dropout, grad_scale, keep_rate, n_entries,
    seqlen_q, seqlen_k, n_heads, heads_at_once, padded,
    GROUP: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """q, dout and dq are descriptors of tiles [64, HEAD_DIM], k and v of [BLOCK_N, HEAD_DIM]; lse2 and delta are those
    of ``rows``. ``dslope``, where it is not None, takes each row's part of the gradient of its ALiBi slope. Grid: a
    program for each task (``tasks.find_task``)."""
    work = Work(cu_q, cu_k, n_entries, seqlen_q, seqlen_k, n_heads, heads_at_once)
    q_tiles = gl.allocate_shared_memory(q.dtype, [2] + q.block_shape, q.layout)
    do_tiles = gl.allocate_shared_memory(dout.dtype, [2] + dout.block_shape, dout.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [K_STAGES] + k.block_shape, k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [V_STAGES] + v.block_shape, v.layout)
    queries = make_barriers(1, 1)
    marks = (make_mark(), make_mark())
    k_ring = make_ring(k_tiles, K_STAGES, 2)
    v_ring = make_ring(v_tiles, V_STAGES, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (
                dq, dslope, lse2_ptr, delta_ptr, q_tiles, do_tiles, queries, k_ring, v_ring, marks, work, mask, score,
                dropout, grad_scale, keep_rate, padded, BLOCK_N, HEAD_DIM, 0,
            )),
            (_consume, (
                dq, dslope, lse2_ptr, delta_ptr, q_tiles, do_tiles, queries, k_ring, v_ring, marks, work, mask, score,
                dropout, grad_scale, keep_rate, padded, BLOCK_N, HEAD_DIM, 1,
            )),
            (_load, (
                q, k, v, dout, q_tiles, do_tiles, queries, k_ring, v_ring, work, mask, GROUP, BLOCK_N,
            )),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip


@gluon.jit
def _load(
    q, k, v, dout, q_tiles, do_tiles, queries, k_ring, v_ring, work, mask,
    GROUP: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    PACKED: gl.constexpr = work.cu_q is not None
    seq, head, start_m, live = find_task(gl.program_id(0), work, BLOCK_M, True, mask.right is not None)
    if live:
        filled = queries.index(0)
        mbarrier.expect(filled, 2 * (q.block_type.nbytes + dout.block_type.nbytes))
        for w in gl.static_range(2):
            where = at(seq, head, start_m + 64 * w, seq.q_row, seq.len_q, PACKED)
            tma.async_copy_global_to_shared(q, where, filled, q_tiles.index(w))
            tma.async_copy_global_to_shared(dout, where, filled, do_tiles.index(w))
        visits = key_visits(mask, seq, head.to(gl.int64), start_m, lanes(), BLOCK_M, BLOCK_N)
        for i in range(0, visits.stop - visits.first):
            start_n = start_of_block(visits, mask, seq, i, BLOCK_N)
            where = at(seq, head // GROUP, start_n, seq.k_row, seq.len_k, PACKED)
            fill(k_ring, i, k, where)
            fill(v_ring, i, v, where)


@gluon.jit
def _consume(
    dq, dslope, lse2_ptr, delta_ptr, q_tiles, do_tiles, queries, k_ring, v_ring, marks, work, mask, score, dropout,
    grad_scale, keep_rate, padded,
    BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """dQ of the W-th 64 queries."""
    PACKED: gl.constexpr = work.cu_q is not None
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])  # of S and dP [64, BLOCK_N]
    D: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])  # of dQ [64, HEAD_DIM]
    A: gl.constexpr = gl.DotOperandLayout(0, D, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, S)
    dtype: gl.constexpr = q_tiles.dtype
    seq, head, start_m, live = find_task(gl.program_id(0), work, BLOCK_M, True, mask.right is not None)
    if live:
        head64 = head.to(gl.int64)
        visits = key_visits(mask, seq, head64, start_m, lanes(), BLOCK_M, BLOCK_N)
        steps = visits.stop - visits.first
        slope = load_slope(score, seq, head64)
        key0, key1 = load_key(dropout)
        places = find_places(dropout, BLOCK_N)
        first_m = start_m + 64 * W
        rows = first_m + gl.arange(0, 64, ROWS)
        offs_m = rows[:, None]
        at_rows = head64 * padded + padded_row(seq, work) + rows
        lse2, delta = gl.load(lse2_ptr + at_rows), gl.load(delta_ptr + at_rows)
        q_tile = q_tiles.index(W).reshape([64, HEAD_DIM])
        acc = gl.zeros([64, HEAD_DIM], gl.float32, D)
        slope_part = gl.zeros([64], gl.float32, ROWS)
        zero = gl.zeros([64, BLOCK_N], gl.float32, S)

        mbarrier.wait(queries.index(0), 0)
        if steps > 0:
            wait_full(k_ring, 0)
            s_next = warpgroup_mma(q_tile, tile_of(k_ring, 0).permute((1, 0)), zero, use_acc=False, is_async=True)
            for i in range(0, steps):
                own = W + (i >> 30)  # always W, of which the compiler keeps no addresses: see the README
                q_tile = q_tiles.index(own).reshape([64, HEAD_DIM])
                do_tile = do_tiles.index(own).reshape([64, HEAD_DIM])
                start_n = start_of_block(visits, mask, seq, i, BLOCK_N)
                if dropout.state is not None:  # drawn while the matrix unit works
                    even, odd = draw(dropout, key0, key1, seq.index, head64, first_m, start_n, places, BLOCK_N, False)
                    hold(marks[0])
                product = warpgroup_mma_wait(0, deps=[s_next])
                wait_full(v_ring, i)
                dp_next = warpgroup_mma(do_tile, tile_of(v_ring, i).permute((1, 0)), zero, use_acc=False, is_async=True)
                offs_n = start_n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))[None, :]
                distance = gl.abs(offs_m + (seq.len_k - seq.len_q) - offs_n)
                s = logits(product, score, slope, distance, False)
                p = gl.exp2(s * score.factor - lse2[:, None])
                if i < count_edges(visits):
                    p = gl.where(visible(mask, seq, head64, once(offs_m), offs_n), p, 0.0)
                hold(marks[1])
                dp = warpgroup_mma_wait(0, deps=[dp_next])
                release(v_ring, i)
                if dropout.state is not None:
                    dp = keep_wide(dp, even, odd, S, BLOCK_N, False)
                ds = p * (dp - delta[:, None])
                if dslope is not None:
                    slope_part -= gl.sum(ds * distance.to(gl.float32), 1)
                if score.softcap is not None:
                    ds *= capped_slope(product, score, False)
                ds16 = gl.convert_layout(ds.to(dtype), A)
                acc_next = warpgroup_mma(ds16, tile_of(k_ring, i), acc, is_async=True)
                # The next logits; after the last block, of what is there, for nothing.
                wait_full(k_ring, i + 1, i + 1 < steps)
                s_next = warpgroup_mma(
                    q_tile, tile_of(k_ring, i + 1).permute((1, 0)), zero, use_acc=False, is_async=True
                )
                acc = warpgroup_mma_wait(1, deps=[acc_next])
                release(k_ring, i)
            warpgroup_mma_wait(0, deps=[s_next])

        q_tiles.index(W).reshape([64, HEAD_DIM]).store((acc * grad_scale).to(dtype))
        fence_async_shared()
        where = at(seq, head, first_m, seq.q_row, seq.len_q, PACKED)
        tma.async_copy_shared_to_global(dq, where, q_tiles.index(W))
        if dslope is not None:
            slope_ptrs = dslope.ptr + seq.batch * dslope.stride_batch + head64 * dslope.stride_head + seq.q_row + rows
            gl.store(slope_ptrs, slope_part / keep_rate, mask=rows < seq.len_q)
        tma.store_wait(0)
