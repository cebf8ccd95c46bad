"""Decoding: few queries against a long cache. The keys are split over programs (flash-decoding), then merged.

The query heads of a group share a program, which loads each tile of keys and values once for all of them. Row r of a
tile is query r // GROUP of head r % GROUP of the group.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flash_train.attention.kernels.device.mask import key_visits, visible
from flash_train.attention.kernels.device.philox import apply_dropout, draw_elements, load_key
from flash_train.attention.kernels.device.product import dot_transposed
from flash_train.attention.kernels.device.score import LOG2_E, load_slope, logits
from flash_train.attention.kernels.device.softmax import finish_rows, softmax_step
from flash_train.attention.packing import Entry


class Cache(NamedTuple):
    """A cache of keys or values (row or page, position, head, column), and where each sequence lies in it.

    ``batch_idx``: int32 (batch,), the row of each sequence. ``leftpad``: int32 (batch,), positions to skip. ``pages``:
    int32 (batch, pages), pages of ``page_size`` positions, in place of rows. Each of them may be None.
    """

    ptr: Any
    stride_batch: Any
    stride_row: Any
    stride_head: Any
    batch_idx: Any
    leftpad: Any
    pages: Any
    stride_pages: Any
    page_size: Any


@triton.jit(do_not_specialize=["len_q", "n_splits"])
def attention_decode(
    q, k, v, part_ptr, part_lse_ptr, seqlens_ptr, mask, score, dropout, len_q, n_splits,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of each part of the keys.

    Writes ``part`` (splits, batch, query, head, column) and ``part_lse`` (splits, batch, query, head), contiguous fp32;
    a split that sees no key writes 0 and -inf. Grid (batch x row tiles x splits, key heads). Each program:

    1. finds its sequence and its part of the visible blocks of keys;
    2. loads the queries of all heads of the group;
    3. for each block: loads keys, computes the logits, updates the running softmax, loads values and adds them;
    4. divides by the row sums, and writes its part.
    """
    row_tiles = tl.cdiv(len_q * GROUP, BLOCK_M)
    split = tl.program_id(0) % n_splits
    start = tl.program_id(0) // n_splits % row_tiles * BLOCK_M
    index = tl.program_id(0) // (n_splits * row_tiles)
    kv_head = tl.program_id(1).to(tl.int64)
    n_heads = tl.num_programs(1) * GROUP
    rows = start + tl.arange(0, BLOCK_M)[:, None]
    query = rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    leftpad = tl.load(k.leftpad + index) if k.leftpad is not None else index * 0
    len_k = _count_keys(k, seqlens_ptr, index, leftpad)
    seq = Entry(index, index.to(tl.int64), (index * 0).to(tl.int64), leftpad.to(tl.int64), len_q, len_k)

    # the blocks that any row of the tile sees, in equal parts
    QUERIES: tl.constexpr = (BLOCK_M - 1) // GROUP + 2
    visits = key_visits(mask, seq, kv_head * GROUP, start // GROUP, tl.arange(0, 128), QUERIES, BLOCK_N)
    per_split = tl.cdiv(visits.stop - visits.first, n_splits)
    begin = visits.first + split * per_split
    end = tl.minimum(begin + per_split, visits.stop)

    inside = (rows < len_q * GROUP) & (tl.arange(0, BLOCK_D)[None, :] < HEAD_DIM)
    q_ptrs = q.ptr + index.to(tl.int64) * q.stride_batch + query.to(tl.int64) * q.stride_row + head * q.stride_head
    q_tile = tl.load(q_ptrs + tl.arange(0, BLOCK_D)[None, :], mask=inside, other=0.0)  # [BLOCK_M, BLOCK_D]
    slope = load_slope(score, seq, head)
    key0, key1 = load_key(dropout)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)  # the output before its division
    for block in range(begin, end):
        offs_n = block * BLOCK_N + tl.arange(0, BLOCK_N)
        k_tile = _load_keys(k, index, kv_head, leftpad, offs_n, seq.len_k, BLOCK_D, HEAD_DIM)
        s = dot_transposed(q_tile, k_tile, PRECISION)  # [BLOCK_M, BLOCK_N]
        distance = tl.abs(query + (seq.len_k - len_q) - offs_n[None, :])
        s = logits(s, score, slope, distance, k_tile.dtype == tl.float32)
        s = tl.where(visible(mask, seq, head, query, offs_n[None, :]), s, float("-inf"))
        p, alpha, m_i, l_i = softmax_step(s, m_i, l_i, score, True)
        if dropout.state is not None:
            random = draw_elements(
                key0, key1, dropout.entry + index, dropout.head + head, dropout.query + query,
                dropout.key + offs_n[None, :], BLOCK_M, BLOCK_N,
            )  # fmt: skip
            p = apply_dropout(p, random, dropout, PRECISION)
        v_tile = _load_keys(v, index, kv_head, leftpad, offs_n, seq.len_k, BLOCK_DV, HEAD_DIM_V)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision=PRECISION)

    lse, norm = finish_rows(m_i, l_i)
    if dropout.state is not None:
        norm *= dropout.threshold * (1.0 / 256.0)
    acc = acc / norm[:, None]
    batch = tl.num_programs(0) // (n_splits * row_tiles)
    row = ((split.to(tl.int64) * batch + index) * len_q + query) * n_heads + head
    columns = tl.arange(0, BLOCK_DV)[None, :]
    tl.store(part_ptr + row * HEAD_DIM_V + columns, acc, mask=(rows < len_q * GROUP) & (columns < HEAD_DIM_V))
    tl.store(part_lse_ptr + row, lse[:, None], mask=rows < len_q * GROUP)


@triton.jit
def _count_keys(x, seqlens_ptr, index, leftpad):
    """Keys of a sequence. As in ``CacheRows``, 0 if its length or the page of its last key is negative: padding."""
    length = tl.load(seqlens_ptr + index)
    if x.pages is not None:
        column = tl.maximum(length - 1, 0) // x.page_size
        page = tl.load(x.pages + index.to(tl.int64) * x.stride_pages + column, mask=length > 0, other=-1)
        length = tl.where(page < 0, 0, length)
    return tl.where(length > 0, tl.maximum(length - leftpad, 0), 0)


@triton.jit
def _load_keys(x, index, kv_head, leftpad, offs_n, len_k, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr):
    """A tile [BLOCK_N, BLOCK_D] of a cache at positions offs_n of the sequence, with zeros past its end."""
    positions = leftpad + offs_n
    if x.pages is not None:
        pages = x.pages + index.to(tl.int64) * x.stride_pages
        page = tl.load(pages + positions // x.page_size, mask=offs_n < len_k, other=0)
        base = page.to(tl.int64) * x.stride_batch + (positions % x.page_size).to(tl.int64) * x.stride_row
    else:
        row = tl.load(x.batch_idx + index) if x.batch_idx is not None else index
        base = row.to(tl.int64) * x.stride_batch + positions.to(tl.int64) * x.stride_row
    columns = tl.arange(0, BLOCK_D)[None, :]
    ptrs = x.ptr + kv_head * x.stride_head + base[:, None] + columns
    if BLOCK_D == HEAD_DIM:
        tile = tl.load(ptrs, mask=(offs_n < len_k)[:, None], other=0.0)
    else:
        tile = tl.load(ptrs, mask=(offs_n < len_k)[:, None] & (columns < HEAD_DIM), other=0.0)
    return tile


@triton.jit(do_not_specialize=["n_rows", "n_splits"])
def attention_decode_merge(
    part_ptr, part_lse_ptr, sinks_ptr, out_ptr, lse_ptr, n_rows, n_splits, n_heads, len_q,
    HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Merge the parts of ``attention_decode``, weighted by exp(lse of the part - maximum).

    Writes out, like q, and lse (batch, head, query). Grid (rows): a row is (batch, query, head). Each program loads the
    log-sum-exp of every part, adds the sink, sums the weighted parts, divides, and writes its row.
    """
    row = tl.program_id(0).to(tl.int64)
    head = row % n_heads
    query = row // n_heads % len_q
    batch = row // n_heads // len_q
    splits = tl.arange(0, BLOCK_S)
    part_lses = tl.load(part_lse_ptr + splits.to(tl.int64) * n_rows + row, mask=splits < n_splits, other=float("-inf"))
    lse_max = tl.max(part_lses, 0)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        lse_max = tl.maximum(lse_max, sink)
    lse_max = tl.where(lse_max == float("-inf"), 0.0, lse_max)
    total = tl.sum(tl.exp2((part_lses - lse_max) * LOG2_E), 0)
    if sinks_ptr is not None:
        total += tl.exp2((sink - lse_max) * LOG2_E)
    columns = tl.arange(0, BLOCK_DV)
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for s in range(0, n_splits):
        part_row = tl.cast(s, tl.int64) * n_rows + row
        weight = tl.exp2((tl.load(part_lse_ptr + part_row) - lse_max) * LOG2_E)
        acc += weight * tl.load(part_ptr + part_row * HEAD_DIM_V + columns, mask=columns < HEAD_DIM_V, other=0.0)
    rest, norm = finish_rows(0.0, total)
    acc = acc / norm
    tl.store(out_ptr + row * HEAD_DIM_V + columns, acc.to(out_ptr.dtype.element_ty), mask=columns < HEAD_DIM_V)
    tl.store(lse_ptr + (batch * n_heads + head) * len_q + query, lse_max + rest)
