"""The backward kernels: row statistics, then dK and dV by tiles of keys, and dQ by tiles of queries.

No kernel adds to memory that another program writes, so gradients are bitwise the same at every run.
"""

import triton
import triton.language as tl

from flash_train.attention.kernels.device.mask import key_range, visible_keys
from flash_train.attention.kernels.device.philox import keep_tile, keep_tile_transposed, stream_key
from flash_train.attention.kernels.device.schedule import attended_length, find_tile, load_entry
from flash_train.attention.kernels.device.tile import load_tile, row_pointers, store_tile

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["n_rows"])
def attention_backward_rows(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, delta_ptr, lse2_ptr,
    stride_ob, stride_om, stride_oh,
    stride_db, stride_dm, stride_dh,
    stride_lb, stride_lh,
    n_rows, keep_rate,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, HAS_DLSE: tl.constexpr,
):  # fmt: skip
    """Per query row: delta = keep_rate * (sum(out * dout) - dlse), and the log-sum-exp in base 2.

    Rows that see no key get +inf, so that ``exp2(s - lse)`` is 0 for them without a test in the inner loops.
    Grid (row tiles, heads, batch).
    """
    start_m = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1).to(tl.int64)  # head strides, too, can pass 2**31
    batch = tl.program_id(2).to(tl.int64)
    rows = tl.arange(0, BLOCK_M)
    inside = rows < n_rows - start_m
    out = load_tile(
        row_pointers(out_ptr + batch * stride_ob + head * stride_oh, start_m, stride_om, BLOCK_M, BLOCK_D),
        n_rows - start_m, True, BLOCK_M, BLOCK_D, HEAD_DIM,
    )  # fmt: skip
    dout = load_tile(
        row_pointers(dout_ptr + batch * stride_db + head * stride_dh, start_m, stride_dm, BLOCK_M, BLOCK_D),
        n_rows - start_m, True, BLOCK_M, BLOCK_D, HEAD_DIM,
    )  # fmt: skip
    offs = batch * stride_lb + head * stride_lh + start_m + rows
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + offs, mask=inside, other=0.0)
    lse = tl.load(lse_ptr + offs, mask=inside, other=0.0)
    tl.store(delta_ptr + offs, delta * keep_rate, mask=inside)
    tl.store(lse2_ptr + offs, tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E), mask=inside)


@triton.jit(do_not_specialize=["n_entries", "seqlen_q", "seqlen_k"])
def attention_backward_dkdv(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, dk_ptr, dv_ptr, cu_q_ptr, cu_k_ptr, rng_ptr,
    stride_qb, stride_qm, stride_qh,
    stride_kb, stride_kn, stride_kh,
    stride_vb, stride_vn, stride_vh,
    stride_db, stride_dm, stride_dh,
    stride_dkb, stride_dkn, stride_dkh,
    stride_dvb, stride_dvn, stride_dvh,
    stride_lb, stride_lh,
    n_entries, seqlen_q, seqlen_k, grad_scale, scale_log2, keep_threshold,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PACKED: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (key tiles of all entries, key heads): dK and dV of one tile, over every query of every head of the group.

    Works on Sᵀ, [BLOCK_N, BLOCK_M], so that Pᵀ and dSᵀ enter their products from registers. ``grad_scale`` is the scale
    over the rate of keeping: what survives dropout is scaled once, here, and not per weight.
    """
    kv_head = tl.program_id(1).to(tl.int64)  # head strides, too, can pass 2**31
    entry, tile = find_tile(tl.program_id(0), cu_k_ptr, n_entries, seqlen_k, BLOCK_N, PACKED)
    seq = load_entry(entry, cu_q_ptr, cu_k_ptr, n_entries, seqlen_q, seqlen_k, PACKED)
    len_q = attended_length(entry, seq.len_q, n_entries, PACKED)
    start_n = tile * BLOCK_N
    if start_n >= seq.len_k:
        return
    batch = seq.batch.to(tl.int64)
    k = load_tile(
        row_pointers(k_ptr + batch * stride_kb + kv_head * stride_kh, seq.k_row + start_n, stride_kn, BLOCK_N, BLOCK_D),
        seq.len_k - start_n, True, BLOCK_N, BLOCK_D, HEAD_DIM,
    )  # [BLOCK_N, BLOCK_D]  # fmt: skip
    v = load_tile(
        row_pointers(v_ptr + batch * stride_vb + kv_head * stride_vh, seq.k_row + start_n, stride_vn, BLOCK_N, BLOCK_D),
        seq.len_k - start_n, True, BLOCK_N, BLOCK_D, HEAD_DIM,
    )  # fmt: skip
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)

    key0 = 0
    key1 = 0
    if DROPOUT:
        key0, key1 = stream_key(rng_ptr)

    shift = seq.len_k - len_q
    if CAUSAL:  # queries before `first` see none of these keys; those from `clear` on see all of them
        first = tl.maximum(start_n - shift, 0) // BLOCK_M * BLOCK_M
        clear = tl.cdiv(tl.maximum(start_n + BLOCK_N - 1 - shift, 0), BLOCK_M) * BLOCK_M
        clear = tl.maximum(tl.minimum(clear, tl.cdiv(len_q, BLOCK_M) * BLOCK_M), first)
    else:
        first = 0
        clear = 0
    # Keys past the entry's end are zeros whose dK and dV are not stored: only the queries' end needs a check.
    whole = tl.maximum(len_q // BLOCK_M * BLOCK_M, clear)
    n_diagonal = (clear - first) // BLOCK_M
    n_edge = n_diagonal + tl.maximum(tl.cdiv(len_q - whole, BLOCK_M), 0)
    n_clear = (whole - clear) // BLOCK_M

    q_base = q_ptr + batch * stride_qb
    d_base = dout_ptr + batch * stride_db
    stats_base = batch * stride_lb + seq.q_row
    # One flat loop over (head of the group, block): nested loops would keep the loads from being pipelined.
    for i in range(0, GROUP * n_edge):
        block = i % n_edge
        start_m = tl.where(block < n_diagonal, first + block * BLOCK_M, whole + (block - n_diagonal) * BLOCK_M)
        dk, dv = _dkdv_step(
            dk, dv, k, v, q_base, d_base, lse2_ptr + stats_base, delta_ptr + stats_base,
            stride_qm, stride_qh, stride_dm, stride_dh, stride_lh, seq.q_row, start_m, start_n,
            seq.index, kv_head * GROUP + i // n_edge, shift, len_q, key0, key1, scale_log2, keep_threshold,
            HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, DROPOUT, PRECISION, CAUSAL=CAUSAL, CHECK=True,
        )  # fmt: skip
    for i in range(0, GROUP * n_clear):
        dk, dv = _dkdv_step(
            dk, dv, k, v, q_base, d_base, lse2_ptr + stats_base, delta_ptr + stats_base,
            stride_qm, stride_qh, stride_dm, stride_dh, stride_lh, seq.q_row, clear + i % n_clear * BLOCK_M, start_n,
            seq.index, kv_head * GROUP + i // n_clear, shift, len_q, key0, key1, scale_log2, keep_threshold,
            HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, DROPOUT, PRECISION, CAUSAL=False, CHECK=False,
        )  # fmt: skip

    if DROPOUT:
        dv *= 256.0 / keep_threshold
    dk_ptrs = row_pointers(
        dk_ptr + batch * stride_dkb + kv_head * stride_dkh, seq.k_row + start_n, stride_dkn, BLOCK_N, BLOCK_D
    )
    dv_ptrs = row_pointers(
        dv_ptr + batch * stride_dvb + kv_head * stride_dvh, seq.k_row + start_n, stride_dvn, BLOCK_N, BLOCK_D
    )
    store_tile(dk_ptrs, dk * grad_scale, seq.len_k - start_n, BLOCK_N, BLOCK_D, HEAD_DIM)
    store_tile(dv_ptrs, dv, seq.len_k - start_n, BLOCK_N, BLOCK_D, HEAD_DIM)


@triton.jit
def _dkdv_step(
    dk, dv, k, v, q_base, d_base, lse2_ptr, delta_ptr,
    stride_qm, stride_qh, stride_dm, stride_dh, stride_lh, q_row, start_m, start_n,
    entry, head, shift, len_q, key0, key1, scale_log2, keep_threshold,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, CAUSAL: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Add one block of queries of one head to dK and dV (FlashAttention-2, algorithm 2)."""
    rows = tl.arange(0, BLOCK_M)
    row = q_row + start_m
    stats = head * stride_lh + start_m + rows
    q_ptrs = row_pointers(q_base + head * stride_qh, row, stride_qm, BLOCK_M, BLOCK_D)
    q = load_tile(q_ptrs, len_q - start_m, CHECK, BLOCK_M, BLOCK_D, HEAD_DIM)
    if CHECK:
        lse2 = tl.load(lse2_ptr + stats, mask=rows < len_q - start_m, other=float("inf"))
    else:
        lse2 = tl.load(lse2_ptr + stats)
    s = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
    p = tl.exp2(s * scale_log2 - lse2[None, :])
    if CAUSAL:
        visible = start_n + tl.arange(0, BLOCK_N)[:, None] <= start_m + rows[None, :] + shift
        p = tl.where(visible, p, 0.0)
    d_ptrs = row_pointers(d_base + head * stride_dh, row, stride_dm, BLOCK_M, BLOCK_D)
    dout = load_tile(d_ptrs, len_q - start_m, CHECK, BLOCK_M, BLOCK_D, HEAD_DIM)
    dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
    if CHECK:
        delta = tl.load(delta_ptr + stats, mask=rows < len_q - start_m, other=0.0)
    else:
        delta = tl.load(delta_ptr + stats)
    if DROPOUT:
        keep = keep_tile_transposed(key0, key1, entry, head, start_m, start_n, keep_threshold, BLOCK_M, BLOCK_N)
        kept = tl.where(keep, p, 0.0)
        dp = tl.where(keep, dp, 0.0)
    else:
        kept = p
    dv = tl.dot(kept.to(dout.dtype), dout, dv, input_precision=PRECISION)
    ds = p * (dp - delta[None, :])
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["n_entries", "seqlen_q", "seqlen_k"])
def attention_backward_dq(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, dq_ptr, cu_q_ptr, cu_k_ptr, rng_ptr,
    stride_qb, stride_qm, stride_qh,
    stride_kb, stride_kn, stride_kh,
    stride_vb, stride_vn, stride_vh,
    stride_db, stride_dm, stride_dh,
    stride_dqb, stride_dqm, stride_dqh,
    stride_lb, stride_lh,
    n_entries, seqlen_q, seqlen_k, grad_scale, scale_log2, keep_threshold,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PACKED: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (query tiles of all entries, query heads): dQ of one tile over all its keys; ``grad_scale`` as for dK."""
    head = tl.program_id(1).to(tl.int64)  # head strides, too, can pass 2**31
    entry, tile = find_tile(tl.program_id(0), cu_q_ptr, n_entries, seqlen_q, BLOCK_M, PACKED)
    seq = load_entry(entry, cu_q_ptr, cu_k_ptr, n_entries, seqlen_q, seqlen_k, PACKED)
    len_k = attended_length(entry, seq.len_k, n_entries, PACKED)
    n_tiles = tl.cdiv(seq.len_q, BLOCK_M)
    if tile >= n_tiles:
        return
    if CAUSAL:
        tile = n_tiles - 1 - tile
    start_m = tile * BLOCK_M
    batch = seq.batch.to(tl.int64)
    kv_head = head // GROUP
    rows = tl.arange(0, BLOCK_M)
    left = seq.len_q - start_m
    q_ptrs = row_pointers(
        q_ptr + batch * stride_qb + head * stride_qh, seq.q_row + start_m, stride_qm, BLOCK_M, BLOCK_D
    )
    d_ptrs = row_pointers(
        dout_ptr + batch * stride_db + head * stride_dh, seq.q_row + start_m, stride_dm, BLOCK_M, BLOCK_D
    )
    q = load_tile(q_ptrs, left, True, BLOCK_M, BLOCK_D, HEAD_DIM)
    dout = load_tile(d_ptrs, left, True, BLOCK_M, BLOCK_D, HEAD_DIM)
    stats = batch * stride_lb + head * stride_lh + seq.q_row + start_m + rows
    lse2 = tl.load(lse2_ptr + stats, mask=rows < left, other=float("inf"))
    delta = tl.load(delta_ptr + stats, mask=rows < left, other=0.0)
    k_ptrs = row_pointers(k_ptr + batch * stride_kb + kv_head * stride_kh, seq.k_row, stride_kn, BLOCK_N, BLOCK_D)
    v_ptrs = row_pointers(v_ptr + batch * stride_vb + kv_head * stride_vh, seq.k_row, stride_vn, BLOCK_N, BLOCK_D)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    key0 = 0
    key1 = 0
    if DROPOUT:
        key0, key1 = stream_key(rng_ptr)

    shift = len_k - seq.len_q
    whole, stop = key_range(start_m, shift, len_k, BLOCK_M, BLOCK_N, CAUSAL)
    for start_n in range(0, whole, BLOCK_N):
        dq = _dq_step(
            dq, q, dout, lse2, delta, k_ptrs, v_ptrs, stride_kn, stride_vn, start_m, start_n,
            seq.index, head, shift, len_k, key0, key1, scale_log2, keep_threshold,
            HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, CAUSAL, DROPOUT, PRECISION, MASKED=False,
        )  # fmt: skip
    for start_n in range(whole, stop, BLOCK_N):
        dq = _dq_step(
            dq, q, dout, lse2, delta, k_ptrs, v_ptrs, stride_kn, stride_vn, start_m, start_n,
            seq.index, head, shift, len_k, key0, key1, scale_log2, keep_threshold,
            HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, CAUSAL, DROPOUT, PRECISION, MASKED=True,
        )  # fmt: skip
    dq_base = dq_ptr + batch * stride_dqb + head * stride_dqh
    store_tile(
        row_pointers(dq_base, seq.q_row + start_m, stride_dqm, BLOCK_M, BLOCK_D),
        dq * grad_scale, left, BLOCK_M, BLOCK_D, HEAD_DIM,
    )  # fmt: skip


@triton.jit
def _dq_step(
    dq, q, dout, lse2, delta, k_ptrs, v_ptrs, stride_kn, stride_vn, start_m, start_n, entry, head, shift, len_k,
    key0, key1, scale_log2, keep_threshold,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    start_n64 = tl.cast(start_n, tl.int64)
    k = load_tile(k_ptrs + start_n64 * stride_kn, len_k - start_n, MASKED, BLOCK_N, BLOCK_D, HEAD_DIM)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
    p = tl.exp2(s * scale_log2 - lse2[:, None])
    if MASKED:
        # keys past the end are zeros: without the mask their exponential could overflow and Inf * 0 poison dQ
        visible = visible_keys(start_m, start_n, shift, len_k, BLOCK_M, BLOCK_N, CAUSAL)
        p = tl.where(visible, p, 0.0)
    v = load_tile(v_ptrs + start_n64 * stride_vn, len_k - start_n, MASKED, BLOCK_N, BLOCK_D, HEAD_DIM)
    dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
    if DROPOUT:
        keep = keep_tile(key0, key1, entry, head, start_m, start_n, keep_threshold, BLOCK_M, BLOCK_N)
        dp = tl.where(keep, dp, 0.0)
    ds = p * (dp - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
