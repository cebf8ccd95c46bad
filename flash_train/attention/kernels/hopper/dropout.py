"""Dropout on accumulator fragments of the matrix unit.

The map from coordinates to random bytes is the one of ``flash_train.attention.dropout``. In an accumulator, a thread
holds rows r and r + 8 of a tile, and columns c and c + 1 of every 8. These are eight of the 16 elements of a Philox
call: those whose row has the parity of r. The thread four lanes away holds the other eight.
"""

from typing import Any, NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_train.attention.kernels.device.philox import (
    MULTIPLIER0,
    MULTIPLIER1,
    ROUNDS,
    WEYL0,
    WEYL1,
    load_key,
)
from flash_train.attention.kernels.hopper.pipeline import once, uniform

#: Bit 7 of each byte: whether byte + added has no carry out of bit 7. The carry is the majority of the bytes' two top
#: bits and of the carry into them, which bit 7 of the sum of the lower seven bits holds.
BELOW = gl.constexpr(
    "{ .reg .b32 low; and.b32 low, $1, 0x7f7f7f7f; add.u32 low, low, $3; lop3.b32 $0, $1, $2, low, 0x17; }"
)

#: Exchanges a register with the thread four lanes away.
SWAP = gl.constexpr("shfl.sync.bfly.b32 $0, $1, 4, 0x1f, 0xffffffff;")


@triton.constexpr_function
def fragment_layout(cols):
    """An accumulator [64, cols] as [a, b, c, d, A, B, C, D]: row 16 a + 8 b + 2 c + d, column 16 A + 8 B + 2 C + D."""

    def unit(dim, size=1):
        return [size if i == dim else 0 for i in range(8)]

    registers = [unit(7), unit(1), unit(5)] + [unit(4, 1 << i) for i in range((cols // 16).bit_length() - 1)]
    lanes = [unit(6, 1), unit(6, 2), unit(3), unit(2, 1), unit(2, 2)]
    warps = [unit(0, 1), unit(0, 2)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [4, 2, 4, 2, cols // 16, 2, 4, 2])


@triton.constexpr_function
def call_layout(cols):
    """The Philox calls [a, c, d, A, C] of a fragment, once for each parity d of the row."""
    return gl.SliceLayout(1, gl.SliceLayout(5, gl.SliceLayout(7, fragment_layout(cols))))


@triton.constexpr_function
def drawn_call_layout(cols):
    """The same calls [a, c, d, A', C], each in one of the two threads that need it.

    The thread with row parity d draws the calls with A = 2 A' + d.
    """

    def unit(dim, size=1):
        return [size if i == dim else 0 for i in range(5)]

    registers = [unit(3, 1 << i) for i in range((cols // 32).bit_length() - 1)]
    lanes = [unit(4, 1), unit(4, 2), unit(2), unit(1, 1), unit(1, 2)]
    return gl.DistributedLinearLayout(registers, lanes, [unit(0, 1), unit(0, 2)], [], [4, 4, 2, cols // 32, 4])


@triton.constexpr_function
def axis_layout(dim, cols):
    """The layout of a range along one dimension of ``drawn_call_layout``."""
    layout = drawn_call_layout(cols)
    for other in (4, 3, 2, 1, 0):
        if other != dim:
            layout = gl.SliceLayout(other, layout)
    return layout


class Generator(NamedTuple):
    """The Philox key, and the coordinates of a thread's calls within a tile.

    ``row`` [a, c, 1, 1, 1] and ``column`` [1, 1, d, 1, C] count calls; ``parity`` [1, 1, d, 1, 1] is the rows' parity.
    """

    key0: Any
    key1: Any
    row: Any
    column: Any
    parity: Any


@gluon.jit
def make_generator(dropout, COLS: gl.constexpr, UNIFORM: gl.constexpr):
    """Prepare draws for tiles [64, COLS].

    Call it before the loop: inside it the compiler would repeat the computation for each call.
    UNIFORM: keep the key in registers of the warp.
    """
    key0, key1 = load_key(dropout)
    generator = Generator(key0, key1, 0, 0, 0)
    if dropout.state is not None:
        if UNIFORM:
            key0, key1 = uniform(key0), uniform(key1)
        a = gl.arange(0, 4, axis_layout(0, COLS))[:, None, None, None, None]
        c = gl.arange(0, 4, axis_layout(1, COLS))[None, :, None, None, None]
        d = gl.arange(0, 2, axis_layout(2, COLS))[None, None, :, None, None]
        C = gl.arange(0, 4, axis_layout(4, COLS))[None, None, None, None, :]
        generator = Generator(key0, key1, once(4 * a + c), once(4 * d + C), once(d))
    return generator


@gluon.jit
def draw_keep_flags(
    dropout, generator, entry, head, start_m, start_n, COLS: gl.constexpr, TRANSPOSED: gl.constexpr
):  # fmt: skip
    """Flags of a tile [64, COLS] of S or, if TRANSPOSED, of S transposed.

    Returns uint32 [a, c, d, A, C] for the even columns and for the odd ones. Bit 7 of a byte is set if its element is
    kept. Bytes are in the order of the rows' b and the columns' B; transposed, in the order of B and b.

    1. Each thread draws half of the calls that it needs.
    2. It compares their bytes with the threshold.
    3. It exchanges the words of the other row parity with the thread four lanes away.
    """
    A = gl.arange(0, COLS // 32, axis_layout(3, COLS))[None, None, None, :, None]
    zero = gl.zeros([4, 4, 2, COLS // 32, 4], gl.uint32, drawn_call_layout(COLS))
    m, n = dropout.query + start_m, dropout.key + start_n
    row, column = (n, m) if TRANSPOSED else (m, n)
    row_group = zero + (generator.row + row // 4).to(gl.uint32)
    column_group = zero + (generator.column + column // 4 + 8 * A).to(gl.uint32)
    query, key = (column_group, row_group) if TRANSPOSED else (row_group, column_group)
    w0, w1, w2, w3 = _philox(
        query, key, zero + (dropout.head + head).to(gl.uint32), zero + (dropout.entry + entry).to(gl.uint32),
        generator.key0, generator.key1,
    )  # fmt: skip
    f0, f1 = _below(w0, dropout.threshold), _below(w1, dropout.threshold)  # words of (query parity, key parity)
    f2, f3 = _below(w2, dropout.threshold), _below(w3, dropout.threshold)
    odd = generator.parity == 1
    if TRANSPOSED:
        even_columns = _exchange_flags(gl.where(odd, f1, f0), gl.where(odd, f0, f1), odd, COLS)
        odd_columns = _exchange_flags(gl.where(odd, f3, f2), gl.where(odd, f2, f3), odd, COLS)
    else:
        even_columns = _exchange_flags(gl.where(odd, f2, f0), gl.where(odd, f0, f2), odd, COLS)
        odd_columns = _exchange_flags(gl.where(odd, f3, f1), gl.where(odd, f1, f3), odd, COLS)
    return even_columns, odd_columns


@gluon.jit
def _exchange_flags(own, others, odd, COLS: gl.constexpr):
    """Flags of all calls of a thread: ``own``, which it drew, and those that it gets in exchange for ``others``."""
    received = gl.inline_asm_elementwise(SWAP, "=r,r", [others], dtype=gl.uint32, is_pure=True, pack=1)
    flags = gl.join(gl.where(odd, received, own), gl.where(odd, own, received))  # A = 2 A' and A = 2 A' + 1
    flags = gl.permute(flags, [0, 1, 2, 3, 5, 4]).reshape([4, 4, 2, COLS // 16, 4])
    return gl.convert_layout(flags, call_layout(COLS), assert_trivial=True)


@gluon.jit
def _philox(c0, c1, c2, c3, key0, key1):
    """``tl.philox_impl`` with two wide multiplications in each round, where that has four."""
    for _ in gl.static_range(ROUNDS):
        wide0 = c0.to(gl.uint64) * MULTIPLIER0
        wide2 = c2.to(gl.uint64) * MULTIPLIER1
        c0 = (wide2 >> 32).to(gl.uint32) ^ c1 ^ key0
        c2 = (wide0 >> 32).to(gl.uint32) ^ c3 ^ key1
        c1 = wide2.to(gl.uint32)
        c3 = wide0.to(gl.uint32)
        key0 += WEYL0
        key1 += WEYL1
    return c0, c1, c2, c3


@gluon.jit
def _below(words, threshold):
    """Bit 7 of each byte: whether the byte is below the threshold (1 to 255), so that byte + 256 - threshold < 256."""
    added = ((256 - threshold) * 0x01010101).to(gl.uint32)
    return gl.inline_asm_elementwise(
        BELOW, "=r,r,r,r", [words, added, added & 0x7F7F7F7F], dtype=gl.uint32, is_pure=True, pack=1
    )


@gluon.jit
def apply_dropout_packed(packed, even_columns, odd_columns, COLS: gl.constexpr, TRANSPOSED: gl.constexpr):
    """Set the dropped elements of a packed tile [64, COLS] (``packed16.pack``) to 0, with two instructions a pair."""
    ASSEMBLY: gl.constexpr = select_packed(TRANSPOSED)
    PAIRS: gl.constexpr = gl.SliceLayout(7, fragment_layout(COLS))
    LAYOUT: gl.constexpr = packed.type.layout
    packed = gl.convert_layout(packed.reshape([4, 2, 4, 2, COLS // 16, 2, 4]), PAIRS, assert_trivial=True)
    even = even_columns[:, None, :, :, :, None, :]
    odd = odd_columns[:, None, :, :, :, None, :]
    packed = gl.inline_asm_elementwise(
        ASSEMBLY, "=r,=r,=r,=r" + ",r" * 12, [packed, even, odd], dtype=packed.dtype, is_pure=True, pack=4
    )
    return gl.convert_layout(packed.reshape([64, COLS // 2]), LAYOUT, assert_trivial=True)


@gluon.jit
def apply_dropout(x, even_columns, odd_columns, LAYOUT: gl.constexpr, COLS: gl.constexpr, TRANSPOSED: gl.constexpr):
    """Set the dropped elements of fp32 x [64, COLS] to 0, with two instructions for each element."""
    ASSEMBLY: gl.constexpr = select_fp32(TRANSPOSED)
    x = gl.convert_layout(x.reshape([4, 2, 4, 2, COLS // 16, 2, 4, 2]), fragment_layout(COLS), assert_trivial=True)
    even = even_columns[:, None, :, :, :, None, :, None]
    odd = odd_columns[:, None, :, :, :, None, :, None]
    x = gl.inline_asm_elementwise(
        ASSEMBLY, "=f" + ",=f" * 7 + ",f" * 8 + ",r" * 16, [x, even, odd], dtype=x.dtype, is_pure=True, pack=8
    )
    return gl.convert_layout(x.reshape([64, COLS]), LAYOUT, assert_trivial=True)


@triton.constexpr_function
def _byte(row, column, transposed):
    """The byte of a call's word for an element, by bit 3 of its row (b) and of its column (B)."""
    query, key = (column, row) if transposed else (row, column)
    return 2 * query + key


@triton.constexpr_function
def select_packed(transposed):
    """Assembly for the four pairs [B, b] of a call in a thread.

    For each pair, ``prmt`` spreads the signs of its byte in the even and in the odd word over 16 bits each.
    """
    lines = []
    for i in range(4):
        byte = _byte(i % 2, i // 2, transposed)
        signs = f"0x{12 + byte:x}{12 + byte:x}{8 + byte:x}{8 + byte:x}"  # lower half: even word; upper half: odd word
        lines.append(f"prmt.b32 m, $8, $12, {signs}; and.b32 ${i}, ${4 + i}, m;")
    return "{ .reg .b32 m; " + " ".join(lines) + " }"


@triton.constexpr_function
def select_fp32(transposed):
    """Assembly for the eight fp32 elements [B, b, D] of a call in a thread."""
    lines = []
    for i in range(8):
        sign = 4 * f"{8 + _byte(i // 2 % 2, i // 4, transposed):x}"
        lines.append(f"prmt.b32 m, ${16 + 8 * (i % 2)}, 0, 0x{sign}; mov.b32 v, ${8 + i};")
        lines.append(f"and.b32 v, v, m; mov.b32 ${i}, v;")
    return "{ .reg .b32 m, v; " + " ".join(lines) + " }"
