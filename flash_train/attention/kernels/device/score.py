"""Logits from products of queries and keys: scale, softcap and ALiBi, in base 2."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


class Score(NamedTuple):
    """Scale, softcap and ALiBi slopes of a call; ``softcap`` and ``slopes`` may be None.

    ``factor`` takes the results of ``logits`` to base 2: log₂ e, times the scale if there is neither a softcap nor
    ALiBi. ``slopes`` are fp32 (entries or 1, heads), with ``slope_stride`` between entries.
    """

    scale: Any
    factor: Any
    softcap: Any
    slopes: Any
    slope_stride: Any


@triton.jit
def load_slope(score, seq, head):
    """The head's ALiBi slope; 0 without ALiBi, and for entries without keys: the tail of a packed call has no slope."""
    slope = 0.0
    if score.slopes is not None:
        at = seq.index.to(tl.int64) * score.slope_stride + head
        inside = at * 0 + seq.len_k > 0  # has the shape of `at`: Triton 3.9's interpreter broadcasts no mask
        slope = tl.load(score.slopes + at, mask=inside, other=0.0).to(tl.float32)
    return slope


@triton.jit
def logits(s, score, slope, distance, PRECISE: tl.constexpr):
    """x such that ``x * score.factor`` are the logits in base 2: an exponential takes one fused multiply-add."""
    if score.softcap is not None:
        s = score.softcap * tanh(s * (score.scale / score.softcap), PRECISE)
        if score.slopes is not None:
            s = s - slope * distance.to(tl.float32)
    elif score.slopes is not None:
        s = s * score.scale - slope * distance.to(tl.float32)
    return s


@triton.jit
def capped_slope(s, score, PRECISE: tl.constexpr):
    """The softcap's derivative, 1 - tanh², at the product s. PRECISE: with a small relative error for every product.

    With e = exp(-2|x|), 1 - tanh(x)² is 4e / (1 + e)², which has no cancellation if tanh is nearly 1.
    """
    x = s * (score.scale / score.softcap)
    if PRECISE:
        e = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
        return 4.0 * e / ((1.0 + e) * (1.0 + e))
    t = tanh(x, PRECISE)
    return 1.0 - t * t


@triton.jit
def tanh(x, PRECISE: tl.constexpr):
    """tanh by one exponential: absolute error near 1e-7. PRECISE: the relative error near 0 is as small.

    The polynomial in x² is a Chebyshev fit of (tanh(x) / x - 1) / x² up to 0.56: relative error 7e-8.
    """
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    t = (1.0 - e) / (1.0 + e)
    t = tl.where(x < 0.0, -t, t)
    if PRECISE:
        y = x * x
        fit = -0.33333332 + y * (0.13333087 + y * (-0.05390407 + y * (0.02127643 + y * -0.00654839)))
        t = tl.where(y < 0.3, x + x * (y * fit), t)
    return t
