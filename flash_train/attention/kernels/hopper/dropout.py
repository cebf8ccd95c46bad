"""Dropout on fragments of the matrix unit: the counter map of ``flash_train.attention.dropout``, a word at a time.

A thread holds rows r and r + 8 of a tile and columns c and c + 1 of every 8: of the 16 elements of a Philox call, the
eight whose row has the parity of r. The other eight lie with the thread four lanes on.
"""

from typing import Any, NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_train.attention.kernels.device.philox import ROUNDS
from flash_train.attention.kernels.hopper.pipeline import once

#: no carry out of bit 7: not the majority of the two bits and the carry into them, which the sum of the lower seven has
BELOW = gl.constexpr(
    "{ .reg .b32 low; and.b32 low, $1, 0x7f7f7f7f; add.u32 low, low, $3; lop3.b32 $0, $1, $2, low, 0x17; }"
)

#: with the thread four lanes on
SWAP = gl.constexpr("shfl.sync.bfly.b32 $0, $1, 4, 0x1f, 0xffffffff;")


@triton.constexpr_function
def fragment(cols):
    """An accumulator [64, cols] as [a, b, c, d, A, B, C, D]: row 16 a + 8 b + 2 c + d, column 16 A + 8 B + 2 C + D."""

    def unit(dim, size=1):
        return [size if i == dim else 0 for i in range(8)]

    registers = [unit(7), unit(1), unit(5)] + [unit(4, 1 << i) for i in range((cols // 16).bit_length() - 1)]
    lanes = [unit(6, 1), unit(6, 2), unit(3), unit(2, 1), unit(2, 2)]
    warps = [unit(0, 1), unit(0, 2)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [4, 2, 4, 2, cols // 16, 2, 4, 2])


@triton.constexpr_function
def calls(cols):
    """The calls [a, c, d, A, C] of a fragment, once for each parity d of the row."""
    return gl.SliceLayout(1, gl.SliceLayout(5, gl.SliceLayout(7, fragment(cols))))


@triton.constexpr_function
def shared_calls(cols):
    """The same calls [a, c, d, A', C], each in one of the two threads that need it: d has those of A = 2 A' + d."""

    def unit(dim, size=1):
        return [size if i == dim else 0 for i in range(5)]

    registers = [unit(3, 1 << i) for i in range((cols // 32).bit_length() - 1)]
    lanes = [unit(4, 1), unit(4, 2), unit(2), unit(1, 1), unit(1, 2)]
    return gl.DistributedLinearLayout(registers, lanes, [unit(0, 1), unit(0, 2)], [], [4, 4, 2, cols // 32, 4])


@triton.constexpr_function
def axis(dim, cols):
    """The layout of a range along one dimension of the shared calls."""
    layout = shared_calls(cols)
    for other in (4, 3, 2, 1, 0):
        if other != dim:
            layout = gl.SliceLayout(other, layout)
    return layout


class Places(NamedTuple):
    """A thread's places in a fragment, in calls: along the rows [a, c, 1, 1, 1], along the columns [1, 1, d, 1, C];
    and the parity of its rows [1, 1, d, 1, 1]."""

    row: Any
    column: Any
    parity: Any


@gluon.jit
def find_places(dropout, COLS: gl.constexpr):
    """To be called before a loop that draws: within it, the compiler would find them anew for every call."""
    places = Places(0, 0, 0)
    if dropout.state is not None:
        a = gl.arange(0, 4, axis(0, COLS))[:, None, None, None, None]
        c = gl.arange(0, 4, axis(1, COLS))[None, :, None, None, None]
        d = gl.arange(0, 2, axis(2, COLS))[None, None, :, None, None]
        C = gl.arange(0, 4, axis(4, COLS))[None, None, None, None, :]
        places = Places(once(4 * a + c), once(4 * d + C), once(d))
    return places


@gluon.jit
def draw(dropout, key0, key1, entry, head, start_m, start_n, places, COLS: gl.constexpr, TRANSPOSED: gl.constexpr):
    """Flags of a tile [64, COLS] of S, or of S transposed: uint32 [a, c, d, A, C], for even and for odd columns.

    Bit 7 of a byte says that its element is kept. Bytes are in the order of the rows' b and the columns' B, but the
    other way round where TRANSPOSED: ``keep`` knows. A thread draws half the calls it needs, and has the words of the
    others that concern its rows from the thread with the other parity.
    """
    A = gl.arange(0, COLS // 32, axis(3, COLS))[None, None, None, :, None]
    zero = gl.zeros([4, 4, 2, COLS // 32, 4], gl.uint32, shared_calls(COLS))
    m, n = dropout.query + start_m, dropout.key + start_n
    row, column = (n, m) if TRANSPOSED else (m, n)
    row_group = zero + (places.row + row // 4).to(gl.uint32)
    column_group = zero + (places.column + column // 4 + 8 * A).to(gl.uint32)
    query, key = (column_group, row_group) if TRANSPOSED else (row_group, column_group)
    w0, w1, w2, w3 = _philox(
        query, key, zero + (dropout.head + head).to(gl.uint32), zero + (dropout.entry + entry).to(gl.uint32), key0, key1
    )
    f0, f1 = _below(w0, dropout.threshold), _below(w1, dropout.threshold)  # words of (query parity, key parity)
    f2, f3 = _below(w2, dropout.threshold), _below(w3, dropout.threshold)
    odd = places.parity == 1
    if TRANSPOSED:
        even_columns = _share(gl.where(odd, f1, f0), gl.where(odd, f0, f1), odd, COLS)
        odd_columns = _share(gl.where(odd, f3, f2), gl.where(odd, f2, f3), odd, COLS)
    else:
        even_columns = _share(gl.where(odd, f2, f0), gl.where(odd, f0, f2), odd, COLS)
        odd_columns = _share(gl.where(odd, f3, f1), gl.where(odd, f1, f3), odd, COLS)
    return even_columns, odd_columns


@gluon.jit
def _share(own, others, odd, COLS: gl.constexpr):
    """A thread's flags of all its calls: those that it drew, and what its partner sends for those that it did not."""
    got = gl.inline_asm_elementwise(SWAP, "=r,r", [others], dtype=gl.uint32, is_pure=True, pack=1)
    flags = gl.join(gl.where(odd, got, own), gl.where(odd, own, got))  # of A = 2 A' and 2 A' + 1
    flags = gl.permute(flags, [0, 1, 2, 3, 5, 4]).reshape([4, 4, 2, COLS // 16, 4])
    return gl.convert_layout(flags, calls(COLS), assert_trivial=True)


@gluon.jit
def _philox(c0, c1, c2, c3, key0, key1):
    """``tl.philox_impl`` with two wide multiplications a round in place of four."""
    for _ in gl.static_range(ROUNDS):
        wide0 = c0.to(gl.uint64) * 0xD2511F53
        wide2 = c2.to(gl.uint64) * 0xCD9E8D57
        c0 = (wide2 >> 32).to(gl.uint32) ^ c1 ^ key0
        c2 = (wide0 >> 32).to(gl.uint32) ^ c3 ^ key1
        c1 = wide2.to(gl.uint32)
        c3 = wide0.to(gl.uint32)
        key0 += 0x9E3779B9
        key1 += 0xBB67AE85
    return c0, c1, c2, c3


@gluon.jit
def _below(words, threshold):
    """Bit 7 of each byte: whether the byte is below the threshold, 1 to 255: adding 256 - threshold carries nothing."""
    added = ((256 - threshold) * 0x01010101).to(gl.uint32)
    return gl.inline_asm_elementwise(
        BELOW, "=r,r,r,r", [words, added, added & 0x7F7F7F7F], dtype=gl.uint32, is_pure=True, pack=1
    )


@gluon.jit
def keep(pairs, even_columns, odd_columns, COLS: gl.constexpr, TRANSPOSED: gl.constexpr):
    """``pairs`` (``pairs.pack``) of [64, COLS], with 0 where an element's flag is not set: two instructions a pair."""
    ASSEMBLY: gl.constexpr = keep_pairs(TRANSPOSED)
    PAIRS: gl.constexpr = gl.SliceLayout(7, fragment(COLS))
    LAYOUT: gl.constexpr = pairs.type.layout
    pairs = gl.convert_layout(pairs.reshape([4, 2, 4, 2, COLS // 16, 2, 4]), PAIRS, assert_trivial=True)
    even = even_columns[:, None, :, :, :, None, :]
    odd = odd_columns[:, None, :, :, :, None, :]
    pairs = gl.inline_asm_elementwise(
        ASSEMBLY, "=r,=r,=r,=r" + ",r" * 12, [pairs, even, odd], dtype=pairs.dtype, is_pure=True, pack=4
    )
    return gl.convert_layout(pairs.reshape([64, COLS // 2]), LAYOUT, assert_trivial=True)


@gluon.jit
def keep_wide(x, even_columns, odd_columns, LAYOUT: gl.constexpr, COLS: gl.constexpr, TRANSPOSED: gl.constexpr):
    """The same of fp32 x: two instructions for each element."""
    ASSEMBLY: gl.constexpr = keep_singles(TRANSPOSED)
    x = gl.convert_layout(x.reshape([4, 2, 4, 2, COLS // 16, 2, 4, 2]), fragment(COLS), assert_trivial=True)
    even = even_columns[:, None, :, :, :, None, :, None]
    odd = odd_columns[:, None, :, :, :, None, :, None]
    x = gl.inline_asm_elementwise(
        ASSEMBLY, "=f" + ",=f" * 7 + ",f" * 8 + ",r" * 16, [x, even, odd], dtype=x.dtype, is_pure=True, pack=8
    )
    return gl.convert_layout(x.reshape([64, COLS]), LAYOUT, assert_trivial=True)


@triton.constexpr_function
def _byte(row, column, transposed):
    """The byte of a call's word for an element, by its row's b and its column's B; bits 8 of its positions."""
    query, key = (column, row) if transposed else (row, column)
    return 2 * query + key


@triton.constexpr_function
def keep_pairs(transposed):
    """A call's pairs in a thread are registers [B, b]; each takes its byte of either word, and their signs."""
    lines = []
    for i in range(4):
        byte = _byte(i % 2, i // 2, transposed)
        signs = f"0x{12 + byte:x}{12 + byte:x}{8 + byte:x}{8 + byte:x}"  # of the even word, then of the odd one
        lines.append(f"prmt.b32 m, $8, $12, {signs}; and.b32 ${i}, ${4 + i}, m;")
    return "{ .reg .b32 m; " + " ".join(lines) + " }"


@triton.constexpr_function
def keep_singles(transposed):
    lines = []
    for i in range(8):
        sign = 4 * f"{8 + _byte(i // 2 % 2, i // 4, transposed):x}"
        lines.append(f"prmt.b32 m, ${16 + 8 * (i % 2)}, 0, 0x{sign}; mov.b32 v, ${8 + i};")
        lines.append(f"and.b32 v, v, m; mov.b32 ${i}, v;")
    return "{ .reg .b32 m, v; " + " ".join(lines) + " }"
