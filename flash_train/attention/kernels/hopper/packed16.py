"""Pairs of 16-bit weights in 32-bit registers, in the order in which the matrix unit reads them.

Without packing, the compiler moves loop-carried 16-bit tensors in halves of registers. The other way, to carry fp32
weights and round them where they are used, would delay the matrix products.
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
    """Round fp32 x [rows, columns] to int32 [rows, columns / 2], with the even column in the lower half."""
    CODE: gl.constexpr = rounding(dtype)
    even, odd = gl.split(x.reshape([x.shape[0], x.shape[1] // 2, 2]))
    return gl.inline_asm_elementwise(CODE, "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def unpack(packed, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """The 16-bit weights [rows, columns] that ``pack`` packed."""
    even, odd = packed.to(gl.int16).to(dtype, bitcast=True), (packed >> 16).to(gl.int16).to(dtype, bitcast=True)
    return gl.convert_layout(gl.join(even, odd).reshape([packed.shape[0], packed.shape[1] * 2]), LAYOUT)
