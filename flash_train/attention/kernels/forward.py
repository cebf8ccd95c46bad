"""The forward kernel: one program computes one tile of queries of one head against all its keys."""

import triton
import triton.language as tl

from flash_train.attention.kernels.device.mask import key_range, visible_keys
from flash_train.attention.kernels.device.philox import keep_tile, stream_key
from flash_train.attention.kernels.device.schedule import attended_length, find_tile, load_entry
from flash_train.attention.kernels.device.tile import load_tile, row_pointers, store_tile

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["n_entries", "seqlen_q", "seqlen_k"])
def attention_forward(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, cu_q_ptr, cu_k_ptr, rng_ptr,
    stride_qb, stride_qm, stride_qh,
    stride_kb, stride_kn, stride_kh,
    stride_vb, stride_vn, stride_vh,
    stride_ob, stride_om, stride_oh,
    stride_lb, stride_lh,
    n_entries, seqlen_q, seqlen_k, scale_log2, keep_threshold,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PACKED: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (query tiles of all entries, query heads); lse is natural and fp32."""
    head = tl.program_id(1).to(tl.int64)  # head strides, too, can pass 2**31
    entry, tile = find_tile(tl.program_id(0), cu_q_ptr, n_entries, seqlen_q, BLOCK_M, PACKED)
    seq = load_entry(entry, cu_q_ptr, cu_k_ptr, n_entries, seqlen_q, seqlen_k, PACKED)
    len_k = attended_length(entry, seq.len_k, n_entries, PACKED)
    n_tiles = tl.cdiv(seq.len_q, BLOCK_M)
    if tile >= n_tiles:
        return
    if CAUSAL:  # the longest rows first, so that no long program starts last
        tile = n_tiles - 1 - tile
    start_m = tile * BLOCK_M

    q_base = q_ptr + seq.batch.to(tl.int64) * stride_qb + head * stride_qh
    k_base = k_ptr + seq.batch.to(tl.int64) * stride_kb + (head // GROUP) * stride_kh
    v_base = v_ptr + seq.batch.to(tl.int64) * stride_vb + (head // GROUP) * stride_vh
    q = load_tile(
        row_pointers(q_base, seq.q_row + start_m, stride_qm, BLOCK_M, BLOCK_D),
        seq.len_q - start_m, True, BLOCK_M, BLOCK_D, HEAD_DIM,
    )  # [BLOCK_M, BLOCK_D]  # fmt: skip
    k_ptrs = row_pointers(k_base, seq.k_row, stride_kn, BLOCK_N, BLOCK_D)
    v_ptrs = row_pointers(v_base, seq.k_row, stride_vn, BLOCK_N, BLOCK_D)

    key0 = 0
    key1 = 0
    if DROPOUT:
        key0, key1 = stream_key(rng_ptr)

    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)  # running maximum, in units of log2
    l_i = tl.zeros([BLOCK_M], tl.float32)  # running sum of exponentials
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    shift = len_k - seq.len_q  # causal: query i sees keys up to i + shift
    whole, stop = key_range(start_m, shift, len_k, BLOCK_M, BLOCK_N, CAUSAL)
    for start_n in range(0, whole, BLOCK_N):
        acc, l_i, m_i = _step(
            acc, l_i, m_i, q, k_ptrs, v_ptrs, stride_kn, stride_vn, start_m, start_n, seq.index, head, shift, len_k,
            key0, key1, scale_log2, keep_threshold,
            HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, CAUSAL, DROPOUT, PRECISION, MASKED=False,
        )  # fmt: skip
    for start_n in range(whole, stop, BLOCK_N):
        acc, l_i, m_i = _step(
            acc, l_i, m_i, q, k_ptrs, v_ptrs, stride_kn, stride_vn, start_m, start_n, seq.index, head, shift, len_k,
            key0, key1, scale_log2, keep_threshold,
            HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, CAUSAL, DROPOUT, PRECISION, MASKED=True,
        )  # fmt: skip

    seen = l_i > 0.0
    lse = tl.where(seen, (m_i + tl.log2(l_i)) * LN_2, float("-inf"))
    norm = tl.where(seen, l_i, 1.0)
    if DROPOUT:
        norm *= keep_threshold * (1.0 / 256.0)
    acc = acc / norm[:, None]
    o_base = out_ptr + seq.batch.to(tl.int64) * stride_ob + head * stride_oh
    store_tile(
        row_pointers(o_base, seq.q_row + start_m, stride_om, BLOCK_M, BLOCK_D),
        acc, seq.len_q - start_m, BLOCK_M, BLOCK_D, HEAD_DIM,
    )  # fmt: skip
    rows = tl.arange(0, BLOCK_M)
    lse_ptrs = lse_ptr + seq.batch.to(tl.int64) * stride_lb + head * stride_lh + seq.q_row + start_m + rows
    tl.store(lse_ptrs, lse, mask=rows < seq.len_q - start_m)


@triton.jit
def _step(
    acc, l_i, m_i, q, k_ptrs, v_ptrs, stride_kn, stride_vn, start_m, start_n, entry, head, shift, len_k,
    key0, key1, scale_log2, keep_threshold,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Fold one block of keys into the running softmax (FlashAttention-2, algorithm 1), in base 2."""
    start_n64 = tl.cast(start_n, tl.int64)
    k = load_tile(k_ptrs + start_n64 * stride_kn, len_k - start_n, MASKED, BLOCK_N, BLOCK_D, HEAD_DIM)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
    if MASKED:
        visible = visible_keys(start_m, start_n, shift, len_k, BLOCK_M, BLOCK_N, CAUSAL)
        s = tl.where(visible, s, float("-inf"))
    m_new = tl.maximum(m_i, tl.max(s, 1) * scale_log2)
    if MASKED:  # a row that has seen nothing yet: exp2(-inf - 0) is 0 where exp2(-inf + inf) would be NaN
        reference = tl.where(m_new == float("-inf"), 0.0, m_new)
    else:
        reference = m_new
    alpha = tl.exp2(m_i - reference)
    p = tl.exp2(s * scale_log2 - reference[:, None])
    l_i = l_i * alpha + tl.sum(p, 1)
    if DROPOUT:
        keep = keep_tile(key0, key1, entry, head, start_m, start_n, keep_threshold, BLOCK_M, BLOCK_N)
        p = tl.where(keep, p, 0.0)
    acc = acc * alpha[:, None]
    v = load_tile(v_ptrs + start_n64 * stride_vn, len_k - start_n, MASKED, BLOCK_N, BLOCK_D, HEAD_DIM)
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, l_i, m_new
