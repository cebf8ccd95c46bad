"""Masks in kernels: which blocks a tile visits, and which keys each query sees (``attention.masks``)."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

#: The bits of a column that depend on the thread in the layout of a matrix product. The other bits depend on the
#: register: ``columns & ~THREAD_COLUMNS`` are constants, and ``columns & THREAD_COLUMNS`` is one value for a thread.
THREAD_COLUMNS = tl.constexpr(6)


class MaskRule(NamedTuple):
    """A lowered mask: a band, terms inside it, and lists of tiles.

    Band: ``left`` and ``right`` (None: unbounded). Terms: tuples ``(function, tensors)``; they apply to the last
    ``tail`` keys only (None: to all keys).

    Lists: ``tiles``, int32 (entries or 1, heads or 1, rows, capacity), contiguous, or None. A row serves one block of
    ``row_size`` queries in kernels that loop over keys, and one block of keys in kernels that loop over queries. It
    holds the numbers of the visited tiles in ascending order, each times 2, plus 1 if the tile must evaluate the terms.
    ``counts`` has the number of tiles in each row. Strides count rows; they are 0 if entries or heads share a list.

    The tuple is flat because Triton 3.6 loses constants in nested named tuples. Kernels compare single fields with
    None, because Triton 3.6 cannot compare a tuple that contains None.
    """

    left: Any
    right: Any
    terms: Any
    tail: Any
    tiles: Any = None
    counts: Any = None
    stride_entry: Any = None
    stride_head: Any = None
    n_rows: Any = None
    row_size: Any = None
    capacity: Any = None


class Visits(NamedTuple):
    """The blocks to visit, [first, stop); the blocks [clear_from, clear_to) among them need no mask.

    The numbers count blocks of the sequence, or positions in the list of tiles at ``list`` if there is one.
    """

    first: tl.tensor
    clear_from: tl.tensor
    clear_to: tl.tensor
    stop: tl.tensor
    list: tl.tensor


@triton.jit
def key_visits(mask, seq, head, start_m, lanes, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Blocks of keys for the BLOCK_M queries from ``start_m``.

    ``lanes`` is the range 0, 1, 2, ...; its length is the number of list positions that are read at once.
    """
    shift = seq.len_k - seq.len_q
    low = None if mask.left is None else shift - mask.left
    high = None if mask.right is None else shift + mask.right
    visits = _band(start_m, low, high, seq.len_k, BLOCK_M, BLOCK_N)
    # if no block is clear, the loop begins at the first query's own position
    own = tl.minimum(tl.maximum((start_m + shift) // BLOCK_N, visits.first), visits.stop)
    if len(mask.terms) > 0:
        if mask.tail is not None:
            clear_from = visits.clear_from
            clear_to = tl.maximum(tl.minimum(visits.clear_to, (seq.len_k - mask.tail) // BLOCK_N), clear_from)
            visits = Visits(visits.first, clear_from, clear_to, visits.stop, visits.list)
        elif mask.tiles is None:
            visits = Visits(visits.first, own, own, visits.stop, visits.list)
    return _listed(visits, own, mask, seq, head, start_m, lanes)


@triton.jit
def query_visits(mask, seq, head, start_n, lanes, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Blocks of queries for the BLOCK_N keys from ``start_n``."""
    shift = seq.len_k - seq.len_q
    low = None if mask.right is None else -shift - mask.right
    high = None if mask.left is None else mask.left - shift
    visits = _band(start_n, low, high, seq.len_q, BLOCK_N, BLOCK_M)
    if len(mask.terms) > 0 and (mask.tail is not None or mask.tiles is None):
        clear_to = visits.clear_from
        if mask.tail is not None:
            clear_to = tl.where(start_n + BLOCK_N <= seq.len_k - mask.tail, visits.clear_to, clear_to)
        visits = Visits(visits.first, visits.clear_from, clear_to, visits.stop, visits.list)
    return _listed(visits, visits.clear_from, mask, seq, head, start_n, lanes)


@triton.jit
def edge_block(visits, mask, i):
    """Block i of those that need the mask: first the blocks after the clear ones, then the blocks before them.

    So a loop over keys begins at the diagonal, where every query sees a key, and has a maximum from then on.
    """
    after = visits.stop - visits.clear_to
    return tl.where(i < after, visits.clear_to + i, visits.first + (i - after))


@triton.jit
def count_edges(visits):
    return (visits.clear_from - visits.first) + (visits.stop - visits.clear_to)


@triton.jit
def block_start(visits, mask, block, COLS: tl.constexpr):
    """The first position of a visited block."""
    if mask.tiles is None:
        start = block * COLS
    else:
        start = (tl.load(visits.list + block) >> 1) * COLS
    return start


@triton.jit
def visible(mask, seq, head, offs_m, offs_n, start_m=None, start_n=None):
    """Whether each query sees each key: bool, broadcast from positions [M, 1] and [1, N], or transposed.

    Positions along the columns may be given in two parts, with ``start_m`` or ``start_n`` to be added. The first part
    is compared by itself. If it is constant (``THREAD_COLUMNS``), the comparison needs no addition and no register.
    """
    shift = seq.len_k - seq.len_q
    last = seq.len_k - 1
    if start_m is not None:  # bounds for each key
        if mask.right is None:
            seen = offs_n <= last
        else:
            seen = offs_m >= tl.where(offs_n <= last, offs_n - (shift + mask.right) - start_m, 1 << 30)
        if mask.left is not None:
            seen = seen & (offs_m <= offs_n - (shift - mask.left) - start_m)
        offs_m += start_m
    else:  # bounds for each query
        if mask.right is not None:
            last = tl.minimum(offs_m + (shift + mask.right), last)
        if start_n is not None:
            last -= start_n
        seen = offs_n <= last
        if mask.left is not None:
            low = offs_m + (shift - mask.left)
            if start_n is not None:
                low -= start_n
            seen = seen & (offs_n >= low)
        if start_n is not None:
            offs_n += start_n
    if len(mask.terms) > 0:
        inside_m = tl.minimum(offs_m, seq.len_q - 1)  # terms may load at these positions, so they must exist
        inside_n = tl.minimum(offs_n, seq.len_k - 1)
        for i in tl.static_range(len(mask.terms)):
            seen = seen & mask.terms[i][0](seq, head, inside_m, inside_n, *mask.terms[i][1])
    return seen


@triton.jit
def document(seq, head, q, k, q_ids, stride_q, k_ids, stride_k):
    """``Document``: query and key have the same id."""
    batch = seq.batch.to(tl.int64)
    query_id = tl.load(q_ids + batch * stride_q + seq.q_row + q)
    return query_id == tl.load(k_ids + batch * stride_k + seq.k_row + k)


@triton.jit
def tree(seq, head, q, k, bits, stride_entry, n_nodes, n_words):
    """``Tree``: the key is before the tree, or its bit in the query's words is set."""
    node_q = q + (n_nodes - seq.len_q)
    node_k = k + (n_nodes - seq.len_k)
    both = (node_q >= 0) & (node_k >= 0)
    first_word = seq.index.to(tl.int64) * stride_entry + node_q.to(tl.int64) * n_words  # many nodes pass 2**31 words
    word = tl.load(bits + first_word + node_k // 32, mask=both, other=0)
    return (node_k < 0) | (((word >> (node_k & 31)) & 1) == 1)


@triton.jit
def block_sparse(seq, head, q, k, blocks, stride_entry, stride_head, n_rows, n_columns, block_q, block_k):
    """A block map as a term, for kernels without lists of tiles."""
    row, column = q // block_q, k // block_k
    inside = (row < n_rows) & (column < n_columns)
    at = seq.index.to(tl.int64) * stride_entry + head * stride_head + row.to(tl.int64) * n_columns + column
    return tl.load(blocks + at, mask=inside, other=0) != 0


@triton.jit
def _band(start, low, high, length, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Blocks of columns for ROWS rows from ``start``, where row r sees the columns [r + low, r + high]."""
    end = tl.cdiv(length, COLS)
    if high is None:
        stop = end
        clear_to = length // COLS
    else:
        stop = tl.cdiv(tl.minimum(tl.maximum(start + ROWS + high, 0), length), COLS)
        clear_to = tl.minimum(tl.maximum(start + high + 1, 0), length) // COLS
    if low is None:
        first = end * 0
        clear_from = first
    else:
        first = tl.minimum(tl.maximum(start + low, 0) // COLS, stop)
        clear_from = tl.minimum(tl.cdiv(tl.maximum(start + (ROWS - 1) + low, 0), COLS), stop)
    clear_from = tl.minimum(clear_from, tl.maximum(clear_to, first))  # a narrow band has no clear blocks
    clear_to = tl.maximum(clear_to, clear_from)
    return Visits(first, clear_from, clear_to, stop, first)


@triton.jit
def _listed(visits, own, mask, seq, head, start, lanes):
    """The same blocks as positions in the list of the row that contains ``start``.

    The clear blocks are the first consecutive ones in the list that are clear in the band and have no term to evaluate;
    for a contiguous document these are all. If there are none, the empty range of clear blocks is at ``own``.
    """
    if mask.tiles is not None:
        row = start // mask.row_size
        at = seq.index.to(tl.int64) * mask.stride_entry + head * mask.stride_head + row
        count = tl.load(mask.counts + at, mask=row < mask.n_rows, other=0)
        tiles = mask.tiles + at * mask.capacity
        first = count * 0
        own_position = count * 0
        clear_from = count
        clear_to = count
        stop = count * 0
        for begin in range(0, count, lanes.shape[0]):
            i = begin + lanes
            listed = tl.load(tiles + i, mask=i < count, other=1 << 30)
            tile = listed >> 1
            first += tl.sum((tile < visits.first).to(tl.int32), 0)
            own_position += tl.sum((tile < own).to(tl.int32), 0)
            stop += tl.sum((tile < visits.stop).to(tl.int32), 0)
            clear = (tile >= visits.clear_from) & (tile < visits.clear_to) & ((listed & 1) == 0)
            clear_from = tl.minimum(clear_from, tl.min(tl.where(clear, i, count), 0))
            clear_to = tl.minimum(clear_to, tl.min(tl.where(clear | (i < clear_from), count, i), 0))
        none = clear_from == count
        clear_from = tl.where(none, own_position, clear_from)
        clear_to = tl.where(none, own_position, clear_to)
        visits = Visits(first, clear_from, clear_to, stop, tiles)
    return visits
