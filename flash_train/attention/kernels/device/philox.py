"""Dropout on the device: random bytes of a tile, by the map of ``flash_train.attention.dropout``."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flash_train.attention.dropout import PHILOX_MULTIPLIERS, PHILOX_ROUNDS, PHILOX_WEYL, STREAM_DOMAIN

ROUNDS = tl.constexpr(PHILOX_ROUNDS)
MULTIPLIER0, MULTIPLIER1 = tl.constexpr(PHILOX_MULTIPLIERS[0]), tl.constexpr(PHILOX_MULTIPLIERS[1])
WEYL0, WEYL1 = tl.constexpr(PHILOX_WEYL[0]), tl.constexpr(PHILOX_WEYL[1])
DOMAIN0, DOMAIN1 = tl.constexpr(STREAM_DOMAIN[0]), tl.constexpr(STREAM_DOMAIN[1])


class Dropout(NamedTuple):
    """Dropout of a call.

    ``state`` is int64 (2,), or None without dropout. ``threshold`` of 256 byte values keep an element. The other fields
    are the coordinates of the first element. ``by_element`` is None if a tile draws whole Philox calls, which serve 16
    elements each. ``origins``, int32 (entries, 3), has entry, query and key of each entry's first element; None if the
    call is one part of the mask.
    """

    state: Any
    threshold: Any
    entry: Any
    head: Any
    query: Any
    key: Any
    by_element: Any
    origins: Any = None


@triton.jit
def load_key(dropout):
    """The Philox key of the call; 0, 0 without dropout."""
    key0, key1 = 0, 0
    if dropout.state is not None:
        key0, key1 = stream_key(dropout.state)
    return key0, key1


@triton.jit
def first_element(dropout, seq):
    """(entry, query, key) to be added to the coordinates within an entry of the call.

    The kernels put them into a ``Dropout`` for the entry: in Triton 3.6 no function can return a tuple with None. The
    tail of a packed call has no pairs and no origin.
    """
    entry, query, key = 0, 0, 0
    if dropout.origins is not None:
        first = dropout.origins + seq.index * 3
        inside = seq.index * 0 + tl.minimum(seq.len_q, seq.len_k) > 0
        entry = tl.load(first, mask=inside, other=0) - seq.index
        query = tl.load(first + 1, mask=inside, other=0)
        key = tl.load(first + 2, mask=inside, other=0)
    elif dropout.state is not None:
        entry, query, key = dropout.entry, dropout.query, dropout.key
    return entry, query, key


@triton.jit
def draw_tile(dropout, key0, key1, entry, head, start_m, start_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Random numbers of a tile of S, uint32 [BLOCK_M, BLOCK_N]; the random byte is the most significant.

    Starts and sizes are multiples of 16.
    """
    m, n = dropout.query + start_m, dropout.key + start_n
    entry, head = dropout.entry + entry, dropout.head + head
    if dropout.by_element is None:
        random = _draw_calls(key0, key1, entry, head, m, n, BLOCK_M, BLOCK_N)
    else:
        queries, keys = m + tl.arange(0, BLOCK_M)[:, None], n + tl.arange(0, BLOCK_N)[None, :]
        random = draw_elements(key0, key1, entry, head, queries, keys, BLOCK_M, BLOCK_N)
    return random


@triton.jit
def draw_tile_transposed(
    dropout, key0, key1, entry, head, start_m, start_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Random numbers of a tile of S transposed, uint32 [BLOCK_N, BLOCK_M]."""
    m, n = dropout.query + start_m, dropout.key + start_n
    entry, head = dropout.entry + entry, dropout.head + head
    if dropout.by_element is None:
        random = _draw_calls_transposed(key0, key1, entry, head, m, n, BLOCK_M, BLOCK_N)
    else:
        queries, keys = m + tl.arange(0, BLOCK_M)[None, :], n + tl.arange(0, BLOCK_N)[:, None]
        random = draw_elements(key0, key1, entry, head, queries, keys, BLOCK_N, BLOCK_M)
    return random


@triton.jit
def draw_elements(key0, key1, entry, head, queries, keys, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Random numbers at any positions, by one Philox call for each element: for tiles that are not whole calls.

    ``queries`` and ``keys``, and ``head`` if rows belong to several, broadcast to [ROWS, COLS].
    """
    zero = tl.zeros([ROWS, COLS], tl.uint32)
    w0, w1, w2, w3 = tl.philox_impl(
        zero + (4 * (queries // 16) + queries % 8 // 2).to(tl.uint32),
        zero + (4 * (keys // 16) + keys % 8 // 2).to(tl.uint32),
        zero + head.to(tl.uint32),
        zero + entry.to(tl.uint32),
        key0,
        key1,
        ROUNDS,
    )
    odd_k = (keys % 2 == 1) & (queries >= 0)
    word = tl.where(queries % 2 == 1, tl.where(odd_k, w3, w2), tl.where(odd_k, w1, w0))
    shift = 16 * (queries // 8 % 2) + 8 * (keys // 8 % 2)
    return word << (24 - shift).to(tl.uint32)


@triton.jit
def apply_dropout(x, random, dropout, PRECISION: tl.constexpr):
    """fp32 x where its random byte is below the threshold, else 0.

    On a GPU in two instructions: a Boolean tile would be packed into bytes, and unpacked, to get x's layout.
    """
    limit = tl.cast(dropout.threshold, tl.uint32) << 24
    if PRECISION == "ieee":
        kept = tl.where(random < limit, x, 0.0)
    else:
        kept = tl.inline_asm_elementwise(
            "{ .reg .pred keep; setp.lt.u32 keep, $2, $3; selp.f32 $0, $1, 0f00000000, keep; }",
            "=f,f,r,r", [x, random, limit], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return kept


@triton.jit
def stream_key(state_ptr):
    """The 64-bit Philox key of the call's (seed, offset), as two uint32 scalars."""
    seed = tl.load(state_ptr).to(tl.uint64, bitcast=True)
    offset = tl.load(state_ptr + 1).to(tl.uint64, bitcast=True)
    domain0 = (seed & 0).to(tl.uint32) + DOMAIN0
    domain1 = (seed & 0).to(tl.uint32) + DOMAIN1
    k0, k1, _, _ = tl.philox_impl(
        offset.to(tl.uint32),
        (offset >> 32).to(tl.uint32),
        domain0,
        domain1,
        seed.to(tl.uint32),
        (seed >> 32).to(tl.uint32),
        ROUNDS,
    )
    return k0, k1


@triton.jit
def _draw_calls(k0, k1, entry, head, start_m, start_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    w0, w1, w2, w3 = _call(
        k0, k1, entry, head, _groups(start_m, BLOCK_M)[:, None], _groups(start_n, BLOCK_N)[None, :], BLOCK_M, BLOCK_N
    )
    # words are indexed by (query parity, key parity), bytes by (query + 8, key + 8)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return _spread(words, 0, 8, 16, 24, BLOCK_M, BLOCK_N)


@triton.jit
def _draw_calls_transposed(k0, k1, entry, head, start_m, start_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    w0, w1, w2, w3 = _call(
        k0, k1, entry, head, _groups(start_m, BLOCK_M)[None, :], _groups(start_n, BLOCK_N)[:, None], BLOCK_N, BLOCK_M
    )
    words = tl.join(tl.join(w0, w1), tl.join(w2, w3))
    return _spread(words, 0, 16, 8, 24, BLOCK_N, BLOCK_M)


@triton.jit
def _groups(start, BLOCK: tl.constexpr):
    """The counters 4 * (i // 16) + i % 8 // 2 of the BLOCK positions from ``start``, each once."""
    return start // 4 + tl.arange(0, BLOCK // 4)


@triton.jit
def _call(k0, k1, entry, head, query_group, key_group, ROWS: tl.constexpr, COLS: tl.constexpr):
    zero = tl.zeros([ROWS // 4, COLS // 4], tl.uint32)
    return tl.philox_impl(
        zero + query_group.to(tl.uint32),
        zero + key_group.to(tl.uint32),
        zero + head.to(tl.uint32),
        zero + entry.to(tl.uint32),
        k0,
        k1,
        ROUNDS,
    )


@triton.jit
def _spread(
    words, B00: tl.constexpr, B01: tl.constexpr, B10: tl.constexpr, B11: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Spread words [ROWS / 4, COLS / 4, row parity, column parity] over a tile [ROWS, COLS], each byte on top.

    Row 16 a + 8 b + 2 c + d and column 16 A + 8 B + 2 C + D belong to call (4 a + c, 4 A + C), to its word (d, D), and
    to the byte (b, B) of the word, which begins at bit B00 to B11.
    """
    low = tl.join(words << (24 - B00), words << (24 - B10))
    high = tl.join(words << (24 - B01), words << (24 - B11))
    random = tl.join(low, high)  # [4 a + c, 4 A + C, d, D, b, B]
    random = tl.reshape(random, [ROWS // 16, 4, COLS // 16, 4, 2, 2, 2, 2])
    random = tl.permute(random, [0, 6, 1, 4, 2, 7, 3, 5])  # [a, b, c, d, A, B, C, D]
    return tl.reshape(random, [ROWS, COLS])
