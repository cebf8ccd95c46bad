"""Decoding: few queries against a long cache, split over its keys (flash-decoding), then one merge of the parts.

The query heads of a group share a program, so that each tile of keys and values is loaded once for all of them: row r
of a tile is query r // GROUP of head r % GROUP of the group.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flash_train.attention.kernels.device.mask import key_visits, visible
from flash_train.attention.kernels.device.philox import draw_elements, load_key, thin
from flash_train.attention.kernels.device.score import LOG2_E, load_slope, logits
from flash_train.attention.kernels.device.softmax import finish_rows
from flash_train.attention.packing import Entry


class Cache(NamedTuple):
    """Keys or values (row of the cache or page, position, head, column) and how a sequence finds its own.

    ``batch_idx``: int32 (batch,), the row of each sequence; ``leftpad``: int32 (batch,), positions to skip; ``pages``:
    int32 (batch, pages) of ``page_size`` positions each, in place of rows. None where there is no such thing.
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
    q, k, v, part, part_lse, seqlens, mask, score, dropout, len_q, n_splits,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (batch x row tiles x splits, key heads). ``part`` (splits, batch, query, head, column) and ``part_lse``
    (splits, batch, query, head) are contiguous fp32; a split that sees nothing leaves 0 and -inf.
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
    left = tl.load(k.leftpad + index) if k.leftpad is not None else index * 0
    len_k = _count_keys(k, seqlens, index, left)
    seq = Entry(index, index.to(tl.int64), (index * 0).to(tl.int64), left.to(tl.int64), len_q, len_k)

    # Blocks of keys that any row of the tile sees, in equal parts for the splits
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
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for block in range(begin, end):
        keys = block * BLOCK_N + tl.arange(0, BLOCK_N)
        k_tile = _load_keys(k, index, kv_head, left, keys, seq.len_k, BLOCK_D, HEAD_DIM)
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        distance = tl.abs(query + (seq.len_k - len_q) - keys[None, :])
        s = logits(s, score, slope, distance, k_tile.dtype == tl.float32)
        s = tl.where(visible(mask, seq, head, query, keys[None, :]), s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1) * score.factor)
        reference = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m_i - reference)
        p = tl.exp2(s * score.factor - reference[:, None])
        l_i = l_i * alpha + tl.sum(p, 1)
        if dropout.state is not None:
            draws = draw_elements(
                key0, key1, dropout.entry + index, dropout.head + head, dropout.query + query,
                dropout.key + keys[None, :], BLOCK_M, BLOCK_N,
            )  # fmt: skip
            p = thin(p, draws, dropout, PRECISION)
        v_tile = _load_keys(v, index, kv_head, left, keys, seq.len_k, BLOCK_DV, HEAD_DIM_V)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision=PRECISION)
        m_i = m_new

    lse, norm = finish_rows(m_i, l_i)
    if dropout.state is not None:
        norm *= dropout.threshold * (1.0 / 256.0)
    acc = acc / norm[:, None]
    batch = tl.num_programs(0) // (n_splits * row_tiles)
    place = ((split.to(tl.int64) * batch + index) * len_q + query) * n_heads + head
    columns = tl.arange(0, BLOCK_DV)[None, :]
    tl.store(part + place * HEAD_DIM_V + columns, acc, mask=(rows < len_q * GROUP) & (columns < HEAD_DIM_V))
    tl.store(part_lse + place, lse[:, None], mask=rows < len_q * GROUP)


@triton.jit
def _count_keys(x, seqlens, index, left):
    """Keys of a sequence; 0 for padding, as in ``CacheRows``: a negative length, or a last key in a negative page."""
    length = tl.load(seqlens + index)
    if x.pages is not None:
        column = tl.maximum(length - 1, 0) // x.page_size
        page = tl.load(x.pages + index.to(tl.int64) * x.stride_pages + column, mask=length > 0, other=-1)
        length = tl.where(page < 0, 0, length)
    return tl.where(length > 0, tl.maximum(length - left, 0), 0)


@triton.jit
def _load_keys(x, index, kv_head, left, keys, len_k, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr):
    """[BLOCK_N, BLOCK_D] of a cache at these positions of the sequence, 0 past its end."""
    positions = left + keys
    if x.pages is not None:
        pages = x.pages + index.to(tl.int64) * x.stride_pages
        page = tl.load(pages + positions // x.page_size, mask=keys < len_k, other=0)
        base = page.to(tl.int64) * x.stride_batch + (positions % x.page_size).to(tl.int64) * x.stride_row
    else:
        row = tl.load(x.batch_idx + index) if x.batch_idx is not None else index
        base = row.to(tl.int64) * x.stride_batch + positions.to(tl.int64) * x.stride_row
    columns = tl.arange(0, BLOCK_D)[None, :]
    ptrs = x.ptr + kv_head * x.stride_head + base[:, None] + columns
    if BLOCK_D == HEAD_DIM:
        tile = tl.load(ptrs, mask=(keys < len_k)[:, None], other=0.0)
    else:
        tile = tl.load(ptrs, mask=(keys < len_k)[:, None] & (columns < HEAD_DIM), other=0.0)
    return tile


@triton.jit(do_not_specialize=["n_rows", "n_splits"])
def attention_decode_merge(
    part, part_lse, sinks, out, lse, n_rows, n_splits, n_heads, len_q,
    HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Grid (rows): a row is (batch, query, head). ``out`` is like q, ``lse`` (batch, head, query)."""
    row = tl.program_id(0).to(tl.int64)
    head = row % n_heads
    query = row // n_heads % len_q
    batch = row // n_heads // len_q
    splits = tl.arange(0, BLOCK_S)
    part_lses = tl.load(part_lse + splits.to(tl.int64) * n_rows + row, mask=splits < n_splits, other=float("-inf"))
    top = tl.max(part_lses, 0)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32)
        top = tl.maximum(top, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2((part_lses - top) * LOG2_E), 0)
    if sinks is not None:
        total += tl.exp2((sink - top) * LOG2_E)
    columns = tl.arange(0, BLOCK_DV)
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for s in range(0, n_splits):
        place = tl.cast(s, tl.int64) * n_rows + row
        weight = tl.exp2((tl.load(part_lse + place) - top) * LOG2_E)
        acc += weight * tl.load(part + place * HEAD_DIM_V + columns, mask=columns < HEAD_DIM_V, other=0.0)
    rest, norm = finish_rows(0.0, total)
    acc = acc / norm
    tl.store(out + row * HEAD_DIM_V + columns, acc.to(out.dtype.element_ty), mask=columns < HEAD_DIM_V)
    tl.store(lse + (batch * n_heads + head) * len_q + query, top + rest)
