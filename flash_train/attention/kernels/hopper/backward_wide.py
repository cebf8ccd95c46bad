"""dK and dV for Hopper where a head has 256 columns: of 64 keys, dV by one consumer and dK by the other.

Of 128 keys both gradients would not fit the registers, and of 64 the sum of dQ in memory would be added to twice as
often as in ``backward``: dQ has a kernel of its own (``backward_dq``). One consumer computes S transposed, its weights
and dV, the other dP transposed, dS and dK; weights pass from the first to the second through shared memory, negative
where dropout takes them. Partitions: dV's consumer, dK's, a loader.
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

from flash_train.attention.kernels.device.mask import query_visits, visible
from flash_train.attention.kernels.device.philox import load_key
from flash_train.attention.kernels.device.score import capped_slope, load_slope, logits
from flash_train.attention.kernels.hopper.backward import load_walk
from flash_train.attention.kernels.hopper.dropout import draw, find_places, keep_wide
from flash_train.attention.kernels.hopper.pipeline import (
    arrive,
    hold,
    make_barriers,
    make_mark,
    make_ring,
    once,
    release,
    stage_of,
    tile_of,
    wait_empty,
    wait_full,
)
from flash_train.attention.kernels.hopper.scheduler import (
    Work,
    at,
    find_task,
    lanes,
    query_tile,
    step_needs_mask,
    walks_back,
)

BLOCK_N = gl.constexpr(64)
P_STAGES = gl.constexpr(2)


@gluon.jit(do_not_specialize=["n_entries", "seqlen_q", "seqlen_k", "heads_at_once", "processors"])
def hopper_backward_wide(
    q, k, v, dout, lse2, delta, dk, dv, cu_q, cu_k, mask, score, dropout, grad_scale, n_entries, seqlen_q, seqlen_k,
    n_kv_heads, heads_at_once, processors, padded,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """q, dout, k, v, dk and dv are descriptors (``descriptors.describe``) of tiles [BLOCK_M, HEAD_DIM] and
    [BLOCK_N, HEAD_DIM]; lse2 and delta of [BLOCK_M] in (heads * padded). Grid: a program for each task
    (``tasks.find_task``)."""
    work = Work(cu_q, cu_k, n_entries, seqlen_q, seqlen_k, n_kv_heads, heads_at_once, processors)
    k_tile = gl.allocate_shared_memory(k.dtype, [1] + k.block_shape, k.layout)
    v_tile = gl.allocate_shared_memory(v.dtype, [1] + v.block_shape, v.layout)
    q_tiles = gl.allocate_shared_memory(q.dtype, [STAGES] + q.block_shape, q.layout)
    do_tiles = gl.allocate_shared_memory(dout.dtype, [STAGES] + dout.block_shape, dout.layout)
    lse_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], lse2.layout)
    delta_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], delta.layout)
    P: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], k.dtype)
    p_tiles = gl.allocate_shared_memory(k.dtype, [P_STAGES, BLOCK_N, BLOCK_M], P)
    q_ring = make_ring(q_tiles, STAGES, 2)  # the log-sum-exp comes and goes with its queries, delta with dout
    do_ring = make_ring(do_tiles, STAGES, 2)
    p_ring = make_ring(p_tiles, P_STAGES, 1)
    kv = make_barriers(1, 2)
    marks = (make_mark(),)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume_for_dv, (
                dv, k_tile, q_ring, do_ring, lse_tiles, p_ring, kv, marks, work, mask, score, dropout, GROUP, BLOCK_M,
                HEAD_DIM,
            )),
            (_consume_for_dk, (
                dk, v_tile, q_ring, do_ring, delta_tiles, p_ring, kv, work, mask, dropout, grad_scale, GROUP, BLOCK_M,
                HEAD_DIM,
            )),
            (load_walk, (
                q, k, v, dout, lse2, delta, k_tile, v_tile, q_ring, do_ring, lse_tiles, delta_tiles, kv, work, mask,
                padded, GROUP, BLOCK_M, BLOCK_N,
            )),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip


@gluon.jit
def _consume_for_dv(
    dv, k_tile, q_ring, do_ring, lse_tiles, p_ring, kv, marks, work, mask, score, dropout,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    PACKED: gl.constexpr = work.cu_q is not None
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])  # of S transposed [64, BLOCK_M]
    D: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])  # of dV [64, HEAD_DIM]
    A: gl.constexpr = gl.DotOperandLayout(0, D, 2)
    COLS: gl.constexpr = gl.SliceLayout(0, S)
    dtype: gl.constexpr = k_tile.dtype
    seq, kv_head, start_n, live = find_task(gl.program_id(0), work, BLOCK_N, False, False)
    if live:
        visits = query_visits(mask, seq, kv_head.to(gl.int64) * GROUP, start_n, lanes(), BLOCK_M, BLOCK_N)
        back = walks_back(gl.program_id(0), work)
        steps = GROUP * (visits.stop - visits.first)
        key0, key1 = load_key(dropout)
        places = find_places(dropout, BLOCK_M)
        partial = start_n + BLOCK_N > seq.len_k  # keys past the end are zeros, of which no weight may come
        acc = gl.zeros([64, HEAD_DIM], gl.float32, D)
        zero = gl.zeros([64, BLOCK_M], gl.float32, S)

        mbarrier.wait(kv.index(0), 0)
        if steps > 0:
            wait_full(q_ring, 0)
            k_own = k_tile.index(0).reshape([BLOCK_N, HEAD_DIM])
            s_next = warpgroup_mma(k_own, tile_of(q_ring, 0).permute((1, 0)), zero, use_acc=False, is_async=True)
            for i in range(0, steps):
                head, start_m = query_tile(visits, mask, kv_head, i, back, GROUP, BLOCK_M)
                head = head.to(gl.int64)
                if dropout.state is not None:  # drawn while the matrix unit works
                    even, odd = draw(dropout, key0, key1, seq.index, head, start_m, start_n, places, BLOCK_M, True)
                    hold(marks[0])
                product = warpgroup_mma_wait(0, deps=[s_next])
                lse_row = lse_tiles.index(stage_of(q_ring, i)).load(COLS)
                release(q_ring, i)
                offs_m = start_m + gl.arange(0, BLOCK_M, COLS)[None, :]
                offs_n = start_n + gl.arange(0, 64, gl.SliceLayout(1, S))[:, None]
                distance = gl.abs(offs_m + (seq.len_k - seq.len_q) - offs_n)
                s = logits(product, score, load_slope(score, seq, head), distance, False)
                p = gl.exp2(s * score.factor - lse_row[None, :])
                if step_needs_mask(visits, i, back, GROUP) | partial:
                    p = gl.where(visible(mask, seq, head, once(offs_m), offs_n), p, 0.0)
                kept = p
                told = p
                if dropout.state is not None:
                    kept = keep_wide(p, even, odd, S, BLOCK_M, True)
                    told = 2.0 * kept - p
                if score.softcap is not None:
                    told *= capped_slope(product, score, False)
                kept16 = kept.to(dtype)
                wait_empty(p_ring, i)
                p_ring.tiles.index(stage_of(p_ring, i)).store(told.to(dtype))
                fence_async_shared()
                arrive(p_ring.full.index(stage_of(p_ring, i)))
                wait_full(do_ring, i)
                acc_next = warpgroup_mma(gl.convert_layout(kept16, A), tile_of(do_ring, i), acc, is_async=True)
                # The next logits; after the last step, of what is there, for nothing.
                wait_full(q_ring, i + 1, i + 1 < steps)
                k_own = k_tile.index(i >> 30).reshape([BLOCK_N, HEAD_DIM])  # always 0: see the README
                s_next = warpgroup_mma(
                    k_own, tile_of(q_ring, i + 1).permute((1, 0)), zero, use_acc=False, is_async=True
                )
                acc = warpgroup_mma_wait(1, deps=[acc_next])
                release(do_ring, i)
            warpgroup_mma_wait(0, deps=[s_next])

        scale = 1.0
        if dropout.state is not None:
            scale = 256.0 / dropout.threshold
        _store(dv, k_tile, acc * scale, seq, kv_head, start_n, PACKED, HEAD_DIM)  # nobody else reads the keys


@gluon.jit
def _consume_for_dk(
    dk, v_tile, q_ring, do_ring, delta_tiles, p_ring, kv, work, mask, dropout, grad_scale,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    PACKED: gl.constexpr = work.cu_q is not None
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])  # of dP transposed [64, BLOCK_M]
    D: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])  # of dK [64, HEAD_DIM]
    A: gl.constexpr = gl.DotOperandLayout(0, D, 2)
    COLS: gl.constexpr = gl.SliceLayout(0, S)
    dtype: gl.constexpr = v_tile.dtype
    seq, kv_head, start_n, live = find_task(gl.program_id(0), work, BLOCK_N, False, False)
    if live:
        visits = query_visits(mask, seq, kv_head.to(gl.int64) * GROUP, start_n, lanes(), BLOCK_M, BLOCK_N)
        steps = GROUP * (visits.stop - visits.first)
        acc = gl.zeros([64, HEAD_DIM], gl.float32, D)
        zero = gl.zeros([64, BLOCK_M], gl.float32, S)

        mbarrier.wait(kv.index(0), 0)
        if steps > 0:
            wait_full(do_ring, 0)
            v_own = v_tile.index(0).reshape([BLOCK_N, HEAD_DIM])
            dp_next = warpgroup_mma(v_own, tile_of(do_ring, 0).permute((1, 0)), zero, use_acc=False, is_async=True)
            for i in range(0, steps):
                dp = warpgroup_mma_wait(0, deps=[dp_next])
                delta_row = delta_tiles.index(stage_of(do_ring, i)).load(COLS)
                release(do_ring, i)
                wait_full(p_ring, i)
                p = p_ring.tiles.index(stage_of(p_ring, i)).load(S).to(gl.float32)
                release(p_ring, i)
                if dropout.state is not None:
                    dp = gl.where(p < 0.0, 0.0, dp)
                    p = gl.abs(p)
                ds16 = (p * (dp - delta_row[None, :])).to(dtype)
                wait_full(q_ring, i)
                acc_next = warpgroup_mma(gl.convert_layout(ds16, A), tile_of(q_ring, i), acc, is_async=True)
                # The next dP; after the last step, of what is there, for nothing.
                wait_full(do_ring, i + 1, i + 1 < steps)
                v_own = v_tile.index(i >> 30).reshape([BLOCK_N, HEAD_DIM])
                dp_next = warpgroup_mma(
                    v_own, tile_of(do_ring, i + 1).permute((1, 0)), zero, use_acc=False, is_async=True
                )
                acc = warpgroup_mma_wait(1, deps=[acc_next])
                release(q_ring, i)
            warpgroup_mma_wait(0, deps=[dp_next])

        _store(dk, v_tile, acc * grad_scale, seq, kv_head, start_n, PACKED, HEAD_DIM)  # nobody else reads the values


@gluon.jit
def _store(desc, tile, x, seq, kv_head, start_n, PACKED: gl.constexpr, HEAD_DIM: gl.constexpr):
    """A gradient to memory, through a tile that is no longer read."""
    tile.index(0).reshape([BLOCK_N, HEAD_DIM]).store(x.to(tile.dtype))
    fence_async_shared()
    where = at(seq, kv_head, start_n, seq.k_row, seq.len_k, PACKED)
    tma.async_copy_shared_to_global(desc, where, tile.index(0))
    tma.store_wait(0)
