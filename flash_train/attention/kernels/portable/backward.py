"""The backward kernels: row statistics, then dK and dV by tiles of keys, and dQ by tiles of queries.

Each program writes only its own tiles, without atomics, so that gradients are bitwise the same in every run.
"""

import triton
import triton.language as tl

from flash_train.attention.kernels.device.mask import (
    THREAD_COLUMNS,
    block_start,
    count_edges,
    edge_block,
    key_visits,
    query_visits,
    visible,
)
from flash_train.attention.kernels.device.philox import (
    Dropout,
    apply_dropout,
    draw_tile,
    draw_tile_transposed,
    first_element,
    load_key,
)
from flash_train.attention.kernels.device.product import dot_transposed
from flash_train.attention.kernels.device.schedule import find_tile, load_entry
from flash_train.attention.kernels.device.score import LOG2_E, capped_slope, load_slope, logits
from flash_train.attention.kernels.device.tile import load_tile, row_pointers, stat_pointers, store_tile


@triton.jit(do_not_specialize=["n_rows"])
def attention_backward_rows(
    out, dout, lse, dlse, delta, lse2, n_rows, keep_rate,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """For each query: delta = keep_rate * (sum(out * dout) - dlse), and the log-sum-exp in base 2.

    The log-sum-exp of rows that see no key becomes +inf, so that ``exp2(s - lse)`` is 0 without a test in the inner
    loops. Grid (batch x row tiles, heads). Each program loads out, dout, lse and dlse of BLOCK_M rows, and writes delta
    and lse2.
    """
    tiles = tl.cdiv(n_rows, BLOCK_M)
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    start_m = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK_M
    head = tl.program_id(1).to(tl.int64)  # offsets of heads can exceed 2**31
    left = n_rows - start_m
    inside = tl.arange(0, BLOCK_M) < left
    out_ptrs = row_pointers(out, batch, head, start_m, BLOCK_M, BLOCK_D)
    dout_ptrs = row_pointers(dout, batch, head, start_m, BLOCK_M, BLOCK_D)
    out_tile = load_tile(out_ptrs, left, True, BLOCK_M, BLOCK_D, HEAD_DIM)
    dout_tile = load_tile(dout_ptrs, left, True, BLOCK_M, BLOCK_D, HEAD_DIM)
    d = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1)
    if dlse is not None:
        d -= tl.load(stat_pointers(dlse, batch, head, start_m, BLOCK_M), mask=inside, other=0.0)
    lse_tile = tl.load(stat_pointers(lse, batch, head, start_m, BLOCK_M), mask=inside, other=0.0)
    lse_tile = tl.where(lse_tile == float("-inf"), float("inf"), lse_tile * LOG2_E)
    tl.store(stat_pointers(delta, batch, head, start_m, BLOCK_M), d * keep_rate, mask=inside)
    tl.store(stat_pointers(lse2, batch, head, start_m, BLOCK_M), lse_tile, mask=inside)


@triton.jit(do_not_specialize=["n_entries", "seqlen_q", "seqlen_k"])
def attention_backward_dkdv(
    q, k, v, dout, lse2, delta, dk, dv, cu_q, cu_k, mask, score, dropout, grad_scale, n_entries, seqlen_q, seqlen_k,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of keys, over all queries of all heads of its group.

    Either of them may have the address None; if both would not fit the registers, two launches compute one each.
    ``grad_scale`` is the scale over the rate of keeping: the gradients are rescaled for dropout once, at the end. The
    kernel works on Sᵀ, [BLOCK_N, BLOCK_M], so that Pᵀ and dSᵀ enter their products from registers.

    Grid (key tiles of all entries, key heads). Each program:

    1. loads its keys and values;
    2. for each block of queries of each head, adds its part to dK and dV (``_dkdv_step``);
    3. scales and writes dK and dV.
    """
    kv_head = tl.program_id(1).to(tl.int64)  # offsets of heads can exceed 2**31
    entry, tile = find_tile(tl.program_id(0), cu_k, n_entries, seqlen_k, BLOCK_N)
    seq = load_entry(entry, cu_q, cu_k, n_entries, seqlen_q, seqlen_k, WALKS_KEYS=False)
    start_n = tile * BLOCK_N
    left = seq.len_k - start_n
    if left <= 0:
        return
    k_ptrs = row_pointers(k, seq.batch, kv_head, seq.k_row + start_n, BLOCK_N, BLOCK_D)
    v_ptrs = row_pointers(v, seq.batch, kv_head, seq.k_row + start_n, BLOCK_N, BLOCK_DV)
    k_tile = load_tile(k_ptrs, left, True, BLOCK_N, BLOCK_D, HEAD_DIM)  # [BLOCK_N, BLOCK_D]
    v_tile = load_tile(v_ptrs, left, True, BLOCK_N, BLOCK_DV, HEAD_DIM_V)
    dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)  # if unused: 0, without registers
    dv_acc = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    key0, key1 = load_key(dropout)
    first_entry, first_query, first_key = first_element(dropout, seq)
    dropout = Dropout(
        dropout.state, dropout.threshold, first_entry, dropout.head, first_query, first_key, dropout.by_element
    )  # fmt: skip

    if mask.tiles is None:
        # One loop over (head of the group, block): nested loops would drain the pipeline of loads after every head.
        visits = query_visits(mask, seq, kv_head, start_n, tl.arange(0, 128), BLOCK_M, BLOCK_N)
        n_edge = count_edges(visits)
        for i in range(0, GROUP * n_edge):
            g, block = _head_and_block(i, n_edge, 0, GROUP)
            dk_acc, dv_acc = _dkdv_step(
                dk_acc, dv_acc, k_tile, v_tile, q, dout, lse2, delta, dk, dv, mask, score, dropout, key0, key1, seq,
                kv_head * GROUP + g, edge_block(visits, mask, block) * BLOCK_M, start_n,
                HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, PRECISION, MASKED=True,
            )  # fmt: skip
        n_clear = visits.clear_to - visits.clear_from
        first = start_n // BLOCK_M % tl.maximum(n_clear, 1)
        for i in range(0, GROUP * n_clear):
            g, block = _head_and_block(i, n_clear, first, GROUP)
            dk_acc, dv_acc = _dkdv_step(
                dk_acc, dv_acc, k_tile, v_tile, q, dout, lse2, delta, dk, dv, mask, score, dropout, key0, key1, seq,
                kv_head * GROUP + g, (visits.clear_from + block) * BLOCK_M, start_n,
                HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, PRECISION, MASKED=False,
            )  # fmt: skip
    else:
        for g in range(0, GROUP):  # each head may have its own list of tiles
            head = kv_head * GROUP + g
            visits = query_visits(mask, seq, head, start_n, tl.arange(0, 128), BLOCK_M, BLOCK_N)
            for i in range(0, count_edges(visits)):
                dk_acc, dv_acc = _dkdv_step(
                    dk_acc, dv_acc, k_tile, v_tile, q, dout, lse2, delta, dk, dv, mask, score, dropout, key0, key1,
                    seq, head, block_start(visits, mask, edge_block(visits, mask, i), BLOCK_M), start_n,
                    HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, PRECISION, MASKED=True,
                )  # fmt: skip
            for block in range(visits.clear_from, visits.clear_to):
                dk_acc, dv_acc = _dkdv_step(
                    dk_acc, dv_acc, k_tile, v_tile, q, dout, lse2, delta, dk, dv, mask, score, dropout, key0, key1,
                    seq, head, block_start(visits, mask, block, BLOCK_M), start_n,
                    HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, PRECISION, MASKED=False,
                )  # fmt: skip

    if dk.ptr is not None:
        dk_ptrs = row_pointers(dk, seq.batch, kv_head, seq.k_row + start_n, BLOCK_N, BLOCK_D)
        store_tile(dk_ptrs, dk_acc * grad_scale, left, BLOCK_N, BLOCK_D, HEAD_DIM)
    if dv.ptr is not None:
        if dropout.state is not None:
            dv_acc *= 256.0 / dropout.threshold
        dv_ptrs = row_pointers(dv, seq.batch, kv_head, seq.k_row + start_n, BLOCK_N, BLOCK_DV)
        store_tile(dv_ptrs, dv_acc, left, BLOCK_N, BLOCK_DV, HEAD_DIM_V)


@triton.jit
def _head_and_block(i, n, first, GROUP: tl.constexpr):
    """(head of the group, block) of step i out of GROUP times n. With one head, blocks go round from ``first``.

    The block is then no linear function of i, so that the compiler does not keep an address of every load in registers,
    which are full: on an H200, dK and dV of unmasked attention take a sixth less time.

    With n = 0 blocks there is no step, but the pipeline computes the first addresses before the loop. A division by
    n = 0 is undefined there: the compiler may assume n > 0, and load rows that the entry does not have.
    """
    if GROUP == 1:
        g = i * 0
        block = tl.where(i + first < n, i + first, i + first - n)
    else:
        g = i // tl.maximum(n, 1)
        block = i % tl.maximum(n, 1)
    return g, block


@triton.jit
def _dkdv_step(
    dk_acc, dv_acc, k_tile, v_tile, q, dout, lse2, delta, dk, dv, mask, score, dropout, key0, key1,
    seq, head, start_m, start_n,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add one block of queries of one head to dK and dV (FlashAttention-2, algorithm 2).

    1. Load queries and lse2; compute sᵀ = k qᵀ and pᵀ = exp2(logits - lse2), with the mask.
    2. Load dout and delta; compute dpᵀ = v doutᵀ.
    3. dv += (dropped pᵀ) dout; dsᵀ = pᵀ (dropped dpᵀ - delta); dk += dsᵀ q.

    Keys past the sequence's end need no check: they are zeros, and their dK and dV are not stored. Queries past the end
    are checked if MASKED.
    """
    left = seq.len_q - start_m
    row = seq.q_row + start_m
    columns = tl.arange(0, BLOCK_M)[None, :]
    offs_m = columns & ~THREAD_COLUMNS
    first_m = start_m + (columns & THREAD_COLUMNS)
    offs_n = start_n + tl.arange(0, BLOCK_N)[:, None]
    inside = tl.arange(0, BLOCK_M) < left
    q_tile = load_tile(
        row_pointers(q, seq.batch, head, row, BLOCK_M, BLOCK_D), left, MASKED, BLOCK_M, BLOCK_D, HEAD_DIM
    )
    lse2_ptrs = stat_pointers(lse2, seq.batch, head, row, BLOCK_M)
    if MASKED:
        lse2_row = tl.load(lse2_ptrs, mask=inside, other=float("inf"))
    else:
        lse2_row = tl.load(lse2_ptrs)
    slope = load_slope(score, seq, head)
    qk = dot_transposed(k_tile, q_tile, PRECISION)  # [BLOCK_N, BLOCK_M]
    distance = tl.abs(offs_m - (offs_n - (seq.len_k - seq.len_q) - first_m))
    s = logits(qk, score, slope, distance, q_tile.dtype == tl.float32)
    p = tl.exp2(s * score.factor - lse2_row[None, :])
    if MASKED and (mask.left is not None or mask.right is not None or len(mask.terms) > 0):
        if len(mask.terms) > 0:  # with terms, a separate first_m costs registers and saves nothing
            seen = visible(mask, seq, head, start_m + columns, offs_n)
        else:
            seen = visible(mask, seq, head, offs_m, offs_n, start_m=first_m)
        p = tl.where(seen, p, 0.0)
    dout_tile = load_tile(
        row_pointers(dout, seq.batch, head, row, BLOCK_M, BLOCK_DV), left, MASKED, BLOCK_M, BLOCK_DV, HEAD_DIM_V
    )
    if dk.ptr is not None:
        delta_ptrs = stat_pointers(delta, seq.batch, head, row, BLOCK_M)
        dp = dot_transposed(v_tile, dout_tile, PRECISION)
        if MASKED:
            delta_row = tl.load(delta_ptrs, mask=inside, other=0.0)
        else:
            delta_row = tl.load(delta_ptrs)
    p_kept = p
    if dropout.state is not None:
        random = draw_tile_transposed(dropout, key0, key1, seq.index, head, start_m, start_n, BLOCK_M, BLOCK_N)
        p_kept = apply_dropout(p, random, dropout, PRECISION)
    if dv.ptr is not None:
        dv_acc = tl.dot(p_kept.to(dout_tile.dtype), dout_tile, dv_acc, input_precision=PRECISION)
    if dk.ptr is not None:
        if dropout.state is not None:
            dp = apply_dropout(dp, random, dropout, PRECISION)
        ds = p * (dp - delta_row[None, :])
        if score.softcap is not None:
            ds *= capped_slope(qk, score, q_tile.dtype == tl.float32)
        dk_acc = tl.dot(ds.to(q_tile.dtype), q_tile, dk_acc, input_precision=PRECISION)
    return dk_acc, dv_acc


@triton.jit(do_not_specialize=["n_entries", "seqlen_q", "seqlen_k"])
def attention_backward_dq(
    q, k, v, dout, lse2, delta, dq, dslope, cu_q, cu_k, mask, score, dropout, grad_scale, keep_rate,
    n_entries, seqlen_q, seqlen_k,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ of one tile of queries over all its keys; ``grad_scale`` as for dK.

    ``dslope``, if not None, receives each row's part of the gradient of its ALiBi slope. Grid (query tiles of all
    entries, query heads). Each program:

    1. loads its queries, dout, lse2 and delta;
    2. for each block of keys, adds its part to dQ (``_dq_step``);
    3. scales and writes dQ.
    """
    head = tl.program_id(1).to(tl.int64)  # offsets of heads can exceed 2**31
    entry, tile = find_tile(tl.program_id(0), cu_q, n_entries, seqlen_q, BLOCK_M)
    seq = load_entry(entry, cu_q, cu_k, n_entries, seqlen_q, seqlen_k, WALKS_KEYS=True)
    n_tiles = tl.cdiv(seq.len_q, BLOCK_M)
    if tile >= n_tiles:
        return
    if mask.right is not None:
        tile = n_tiles - 1 - tile
    start_m = tile * BLOCK_M
    row = seq.q_row + start_m
    left = seq.len_q - start_m
    inside = tl.arange(0, BLOCK_M) < left
    q_tile = load_tile(row_pointers(q, seq.batch, head, row, BLOCK_M, BLOCK_D), left, True, BLOCK_M, BLOCK_D, HEAD_DIM)
    dout_ptrs = row_pointers(dout, seq.batch, head, row, BLOCK_M, BLOCK_DV)
    dout_tile = load_tile(dout_ptrs, left, True, BLOCK_M, BLOCK_DV, HEAD_DIM_V)
    lse2_col = tl.load(stat_pointers(lse2, seq.batch, head, row, BLOCK_M), mask=inside, other=float("inf"))
    delta_col = tl.load(stat_pointers(delta, seq.batch, head, row, BLOCK_M), mask=inside, other=0.0)
    k_ptrs = row_pointers(k, seq.batch, head // GROUP, seq.k_row, BLOCK_N, BLOCK_D)
    v_ptrs = row_pointers(v, seq.batch, head // GROUP, seq.k_row, BLOCK_N, BLOCK_DV)
    key0, key1 = load_key(dropout)
    first_entry, first_query, first_key = first_element(dropout, seq)
    dropout = Dropout(
        dropout.state, dropout.threshold, first_entry, dropout.head, first_query, first_key, dropout.by_element
    )  # fmt: skip
    slope = load_slope(score, seq, head)
    dq_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    ds_acc = tl.zeros([BLOCK_M], tl.float32)

    visits = key_visits(mask, seq, head, start_m, tl.arange(0, 128), BLOCK_M, BLOCK_N)
    for block in range(visits.clear_from, visits.clear_to):
        dq_acc, ds_acc = _dq_step(
            dq_acc, ds_acc, q_tile, dout_tile, lse2_col, delta_col, k, v, k_ptrs, v_ptrs, dslope, mask, score, slope,
            dropout, key0, key1, seq, head, start_m, block_start(visits, mask, block, BLOCK_N),
            HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, PRECISION, MASKED=False,
        )  # fmt: skip
    for i in range(0, count_edges(visits)):
        dq_acc, ds_acc = _dq_step(
            dq_acc, ds_acc, q_tile, dout_tile, lse2_col, delta_col, k, v, k_ptrs, v_ptrs, dslope, mask, score, slope,
            dropout, key0, key1, seq, head, start_m,
            block_start(visits, mask, edge_block(visits, mask, i), BLOCK_N),
            HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, PRECISION, MASKED=True,
        )  # fmt: skip
    dq_ptrs = row_pointers(dq, seq.batch, head, row, BLOCK_M, BLOCK_D)
    store_tile(dq_ptrs, dq_acc * grad_scale, left, BLOCK_M, BLOCK_D, HEAD_DIM)
    if dslope is not None:
        tl.store(stat_pointers(dslope, seq.batch, head, row, BLOCK_M), ds_acc / keep_rate, mask=inside)


@triton.jit
def _dq_step(
    dq_acc, ds_acc, q_tile, dout_tile, lse2_col, delta_col, k, v, k_ptrs, v_ptrs, dslope, mask, score, slope,
    dropout, key0, key1, seq, head, start_m, start_n,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add one block of keys to dQ.

    1. Load keys; compute s = q kᵀ and p = exp2(logits - lse2), with the mask.
    2. Load values; compute dp = dout vᵀ, with dropout, and ds = p (dp - delta).
    3. dq += ds k.
    """
    start_n64 = tl.cast(start_n, tl.int64)
    offs_m = start_m + tl.arange(0, BLOCK_M)[:, None]
    offs_n = start_n + tl.arange(0, BLOCK_N)[None, :]
    k_tile = load_tile(k_ptrs + start_n64 * k.stride_row, seq.len_k - start_n, MASKED, BLOCK_N, BLOCK_D, HEAD_DIM)
    qk = dot_transposed(q_tile, k_tile, PRECISION)  # [BLOCK_M, BLOCK_N]
    distance = tl.abs(offs_m + (seq.len_k - seq.len_q) - offs_n)
    s = logits(qk, score, slope, distance, k_tile.dtype == tl.float32)
    p = tl.exp2(s * score.factor - lse2_col[:, None])
    if MASKED:
        # keys past the end are zeros: without the mask their exponential could overflow, and Inf * 0 is NaN
        p = tl.where(visible(mask, seq, head, offs_m, offs_n), p, 0.0)
    v_tile = load_tile(v_ptrs + start_n64 * v.stride_row, seq.len_k - start_n, MASKED, BLOCK_N, BLOCK_DV, HEAD_DIM_V)
    dp = dot_transposed(dout_tile, v_tile, PRECISION)
    if dropout.state is not None:
        random = draw_tile(dropout, key0, key1, seq.index, head, start_m, start_n, BLOCK_M, BLOCK_N)
        dp = apply_dropout(dp, random, dropout, PRECISION)
    ds = p * (dp - delta_col[:, None])
    if dslope is not None:
        ds_acc -= tl.sum(ds * distance.to(tl.float32), 1)
    if score.softcap is not None:
        ds *= capped_slope(qk, score, k_tile.dtype == tl.float32)
    return tl.dot(ds.to(k_tile.dtype), k_tile, dq_acc, input_precision=PRECISION), ds_acc
