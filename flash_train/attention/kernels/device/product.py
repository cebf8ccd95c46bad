"""Products of tiles [rows, head_dim]."""

import triton
import triton.language as tl


@triton.jit
def dot_transposed(a, b, PRECISION: tl.constexpr):
    """a bᵀ for tiles [M, K] and [N, K], in fp32.

    With ``bf16x6``, a product of fp32 is the sum of six products of bf16, which this function adds in Triton's order.
    It does not leave the split to the compiler: Triton 3.8 splits bᵀ twice, once in registers and once in shared
    memory, and then needs more registers than there are.
    """
    if PRECISION == "bf16x6" and b.dtype == tl.float32:
        a_high, a_middle, a_low = _split(a)
        b_high, b_middle, b_low = _split(b)
        b_high, b_middle = tl.trans(b_high), tl.trans(b_middle)
        product = tl.dot(a_middle, b_middle)
        product = tl.dot(a_low, b_high, product)
        product = tl.dot(a_high, tl.trans(b_low), product)
        product = tl.dot(a_middle, b_high, product)
        product = tl.dot(a_high, b_middle, product)
        product = tl.where(product == product, product, 0.0)  # the remainder of an infinite number is NaN
        product = tl.dot(a_high, b_high, product)
    else:
        product = tl.dot(a, tl.trans(b), input_precision=PRECISION)
    return product


@triton.jit
def _split(x):
    """Three tiles of bf16 that add up to a tile of fp32."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)
