"""The running softmax in base 2: one step of the maximum, sinks, and the log-sum-exp at the end."""

import triton
import triton.language as tl

from flash_train.attention.kernels.device.score import LOG2_E

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def advance_max(m_i, block_max, factor, MAY_BE_EMPTY: tl.constexpr):
    """Include a block's maximum in the running maximum m_i. m_i is in units of log2; ``factor`` converts to them.

    Returns alpha, the factor for everything summed before; the reference to subtract from the block's logits; and the
    new maximum. With MAY_BE_EMPTY, rows that have seen no key (m = -inf) get the reference 0: exp2(-inf - 0) is 0,
    where exp2(-inf + inf) would be NaN.
    """
    m_new = tl.maximum(m_i, block_max * factor)
    if MAY_BE_EMPTY:
        reference = tl.where(m_new == float("-inf"), 0.0, m_new)
    else:
        reference = m_new
    return tl.exp2(m_i - reference), reference, m_new


@triton.jit
def softmax_step(s, m_i, l_i, score, MAY_BE_EMPTY: tl.constexpr):
    """One block of the running softmax (FlashAttention-2, algorithm 1).

    Args: logits s [BLOCK_M, BLOCK_N], which ``score.factor`` takes to base 2; running maximum m_i and sum l_i
    [BLOCK_M]. Returns the weights p [BLOCK_M, BLOCK_N], the factor alpha for the accumulator, and the new m_i and l_i.
    """
    alpha, reference, m_i = advance_max(m_i, tl.max(s, 1), score.factor, MAY_BE_EMPTY)
    p = tl.exp2(s * score.factor - reference[:, None])
    l_i = l_i * alpha + tl.sum(p, 1)
    return p, alpha, m_i, l_i


@triton.jit
def add_sink(m_i, l_i, sink):
    """Include a sink, a logit without a value, in rows with maximum m_i (units of log2) and sum l_i.

    Returns the factor for the rows' output, and the new m_i and l_i.
    """
    sink = sink.to(tl.float32) * LOG2_E
    m_new = tl.maximum(m_i, sink)
    reference = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.exp2(m_i - reference)
    return alpha, m_new, l_i * alpha + tl.exp2(sink - reference)


@triton.jit
def finish_rows(m_i, l_i):
    """The natural log-sum-exp, and the divisor of the output.

    Rows that saw no key (l_i = 0) get -inf and 1. A NaN in l_i counts as seen, and stays.
    """
    seen = l_i != 0.0
    return tl.where(seen, (m_i + tl.log2(l_i)) * LN_2, float("-inf")), tl.where(seen, l_i, 1.0)
