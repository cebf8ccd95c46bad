"""Two 16-bit weights in a register, as the matrix unit takes them.

Carried around a loop in 16 bits, numbers are moved by halves; rounded where they are used, they hold up the products.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@triton.constexpr_function
def rounding(dtype):
    kind = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    return f"cvt.rn.{kind}.f32 $0, $2, $1;"


@gluon.jit
def pack(x, dtype: gl.constexpr):
    """fp32 x [rows, columns], rounded: int32 [rows, columns / 2], the even column in the lower half."""
    CODE: gl.constexpr = rounding(dtype)
    even, odd = gl.split(x.reshape([x.shape[0], x.shape[1] // 2, 2]))
    return gl.inline_asm_elementwise(CODE, "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def unpack(pairs, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """The 16-bit numbers [rows, columns] of ``pack``."""
    even, odd = pairs.to(gl.int16).to(dtype, bitcast=True), (pairs >> 16).to(gl.int16).to(dtype, bitcast=True)
    return gl.convert_layout(gl.join(even, odd).reshape([pairs.shape[0], pairs.shape[1] * 2]), LAYOUT)
