"""The forward kernel: a program computes one tile of queries of one head against all its keys."""

import triton
import triton.language as tl

from flash_train.attention.kernels.device.mask import block_start, count_edges, edge_block, key_visits, visible
from flash_train.attention.kernels.device.philox import Dropout, apply_dropout, draw_tile, first_element, load_key
from flash_train.attention.kernels.device.product import dot_transposed
from flash_train.attention.kernels.device.schedule import find_tile, load_entry
from flash_train.attention.kernels.device.score import load_slope, logits
from flash_train.attention.kernels.device.softmax import add_sink, finish_rows, softmax_step
from flash_train.attention.kernels.device.tile import load_tile, row_pointers, stat_pointers, store_tile


@triton.jit(do_not_specialize=["n_entries", "seqlen_q", "seqlen_k"])
def attention_forward(
    q, k, v, out, lse, cu_q, cu_k, mask, score, sinks_ptr, dropout, n_entries, seqlen_q, seqlen_k,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out = softmax(logits) v, and the natural log-sum-exp of the logits in fp32.

    Grid (query tiles of all entries, query heads). Each program:

    1. finds its tile, and loads its queries;
    2. for each block of keys that the mask leaves, first those without hidden pairs: updates the running softmax and
       the accumulator (``_step``);
    3. adds the sink, divides by the row sums, and writes out and lse.
    """
    head = tl.program_id(1).to(tl.int64)  # offsets of heads can exceed 2**31
    entry, tile = find_tile(tl.program_id(0), cu_q, n_entries, seqlen_q, BLOCK_M)
    seq = load_entry(entry, cu_q, cu_k, n_entries, seqlen_q, seqlen_k, WALKS_KEYS=True)
    n_tiles = tl.cdiv(seq.len_q, BLOCK_M)
    if tile >= n_tiles:
        return
    if mask.right is not None:  # the longest programs first, so that none of them starts last
        tile = n_tiles - 1 - tile
    start_m = tile * BLOCK_M
    left = seq.len_q - start_m

    q_ptrs = row_pointers(q, seq.batch, head, seq.q_row + start_m, BLOCK_M, BLOCK_D)
    q_tile = load_tile(q_ptrs, left, True, BLOCK_M, BLOCK_D, HEAD_DIM)  # [BLOCK_M, BLOCK_D]
    k_ptrs = row_pointers(k, seq.batch, head // GROUP, seq.k_row, BLOCK_N, BLOCK_D)
    v_ptrs = row_pointers(v, seq.batch, head // GROUP, seq.k_row, BLOCK_N, BLOCK_DV)
    key0, key1 = load_key(dropout)
    first_entry, first_query, first_key = first_element(dropout, seq)
    dropout = Dropout(
        dropout.state, dropout.threshold, first_entry, dropout.head, first_query, first_key, dropout.by_element
    )  # fmt: skip
    slope = load_slope(score, seq, head)

    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)  # running maximum, in units of log2
    l_i = tl.zeros([BLOCK_M], tl.float32)  # running sum of exponentials
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)  # the output before its division

    visits = key_visits(mask, seq, head, start_m, tl.arange(0, 128), BLOCK_M, BLOCK_N)
    for block in range(visits.clear_from, visits.clear_to):
        acc, l_i, m_i = _step(
            acc, l_i, m_i, q_tile, k, v, k_ptrs, v_ptrs, mask, score, slope, dropout, key0, key1, seq, head, start_m,
            block_start(visits, mask, block, BLOCK_N),
            HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, PRECISION, MASKED=False,
        )  # fmt: skip
    for i in range(0, count_edges(visits)):
        acc, l_i, m_i = _step(
            acc, l_i, m_i, q_tile, k, v, k_ptrs, v_ptrs, mask, score, slope, dropout, key0, key1, seq, head, start_m,
            block_start(visits, mask, edge_block(visits, mask, i), BLOCK_N),
            HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, PRECISION, MASKED=True,
        )  # fmt: skip

    if sinks_ptr is not None:
        alpha, m_i, l_i = add_sink(m_i, l_i, tl.load(sinks_ptr + head))
        acc = acc * alpha[:, None]
    lse_tile, norm = finish_rows(m_i, l_i)
    if cu_q is not None:
        lse_tile = tl.where(entry < n_entries, lse_tile, float("-inf"))  # rows past the last boundary have no sink
    if dropout.state is not None:
        norm *= dropout.threshold * (1.0 / 256.0)
    acc = acc / norm[:, None]
    out_ptrs = row_pointers(out, seq.batch, head, seq.q_row + start_m, BLOCK_M, BLOCK_DV)
    store_tile(out_ptrs, acc, left, BLOCK_M, BLOCK_DV, HEAD_DIM_V)
    tl.store(
        stat_pointers(lse, seq.batch, head, seq.q_row + start_m, BLOCK_M), lse_tile, mask=tl.arange(0, BLOCK_M) < left
    )


@triton.jit
def _step(
    acc, l_i, m_i, q_tile, k, v, k_ptrs, v_ptrs, mask, score, slope, dropout, key0, key1, seq, head, start_m, start_n,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Process one block of keys.

    1. Load the keys, compute s = q kᵀ, and turn it into logits with the mask.
    2. Update the running softmax.
    3. Apply dropout to the weights, rescale the accumulator, and add the weights times the values.
    """
    start_n64 = tl.cast(start_n, tl.int64)
    offs_m = start_m + tl.arange(0, BLOCK_M)[:, None]
    offs_n = start_n + tl.arange(0, BLOCK_N)[None, :]
    if dropout.state is not None:
        random = draw_tile(dropout, key0, key1, seq.index, head, start_m, start_n, BLOCK_M, BLOCK_N)
    k_tile = load_tile(k_ptrs + start_n64 * k.stride_row, seq.len_k - start_n, MASKED, BLOCK_N, BLOCK_D, HEAD_DIM)
    s = dot_transposed(q_tile, k_tile, PRECISION)  # [BLOCK_M, BLOCK_N]
    distance = tl.abs(offs_m + (seq.len_k - seq.len_q) - offs_n)
    s = logits(s, score, slope, distance, k_tile.dtype == tl.float32)
    if MASKED:
        s = tl.where(visible(mask, seq, head, offs_m, offs_n), s, float("-inf"))
    p, alpha, m_i, l_i = softmax_step(s, m_i, l_i, score, MASKED)
    if dropout.state is not None:
        p = apply_dropout(p, random, dropout, PRECISION)
    acc = acc * alpha[:, None]
    v_tile = load_tile(v_ptrs + start_n64 * v.stride_row, seq.len_k - start_n, MASKED, BLOCK_N, BLOCK_DV, HEAD_DIM_V)
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
    return acc, l_i, m_i
