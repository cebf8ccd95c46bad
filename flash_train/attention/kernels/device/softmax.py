"""The end of a running softmax: sinks, the log-sum-exp, and what an output is divided by."""

import triton
import triton.language as tl

from flash_train.attention.kernels.device.score import LOG2_E

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def add_sink(m_i, l_i, sink):
    """A logit without a value, beside rows whose weights, referred to m_i in units of log2, add up to l_i.

    Returns the factor for their output, and m_i and l_i as they are now.
    """
    sink = sink.to(tl.float32) * LOG2_E
    m_new = tl.maximum(m_i, sink)
    reference = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.exp2(m_i - reference)
    return alpha, m_new, l_i * alpha + tl.exp2(sink - reference)


@triton.jit
def finish_rows(m_i, l_i):
    """The natural log-sum-exp, -inf of rows that saw no key, and what their output is divided by.

    A sum that is not a number is of a row that saw one.
    """
    seen = l_i != 0.0
    return tl.where(seen, (m_i + tl.log2(l_i)) * LN_2, float("-inf")), tl.where(seen, l_i, 1.0)
