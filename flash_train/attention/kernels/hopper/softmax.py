"""The running softmax of rows that lie in fragments of the matrix unit (FlashAttention-2, algorithm 1)."""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

#: of a fragment's first 8 columns
THREADS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [8, 0]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 8]
    )
)
WAYS = gl.constexpr(16)  #: columns in which a maximum is taken side by side, four of them a thread's
SLACK = gl.constexpr(8.0)  #: how far, in powers of 2, logits may come to lie above what is subtracted from them


@gluon.jit
def new_maximum(s, m_i, score, LAZY: gl.constexpr):
    """The factor for what was summed before, and what is subtracted from the logits s, as it is subtracted and as it is
    carried on (-inf: nothing was seen yet).

    That is the running maximum; LAZY, a number up to SLACK below it: weights of 256 for 1 lose nothing, and what was
    summed before is then mostly left as it is.
    """
    if LAZY:
        m_new = gl.maximum(m_i, _row_maximum(s) * score.factor)
        m_new = gl.where(m_new - m_i > SLACK, m_new, m_i)
    else:
        m_new = gl.maximum(m_i, gl.max(s, 1) * score.factor)
    reference = gl.where(m_new == float("-inf"), 0.0, m_new)
    return gl.exp2(m_i - reference), reference, m_new


@gluon.jit
def _row_maximum(s):
    """In several chains: an instruction waits for the one before it in its chain, five times as long as it takes."""
    parts = gl.max(s.reshape([s.shape[0], s.shape[1] // WAYS, WAYS]), 1)
    return gl.convert_layout(gl.max(parts, 1), gl.SliceLayout(1, s.type.layout), assert_trivial=True)


@gluon.jit
def sum_by_thread(p):
    """Sums of rows, [64, 8], as far as a thread has them: the threads of a row meet once, at the end."""
    return gl.convert_layout(gl.sum(p.reshape([64, p.shape[1] // 8, 8]), 1), THREADS, assert_trivial=True)


@gluon.jit
def rescale_sums(sums, alpha):
    return sums * gl.convert_layout(alpha, gl.SliceLayout(1, THREADS))[:, None]


@gluon.jit
def rescale(acc, alpha, LAZY: gl.constexpr):
    """acc times its rows' alpha; LAZY, a warp whose rows all have 1 passes by."""
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
    if LAZY:
        NUMBERS: gl.constexpr = acc.shape[1] // 2  # of a thread, in two rows
        CODE: gl.constexpr = multiply_unless_one(NUMBERS)
        OPERANDS: gl.constexpr = _in_place(NUMBERS)
        factors = gl.zeros_like(acc) + alpha
        acc = gl.inline_asm_elementwise(CODE, OPERANDS, [acc, factors], dtype=gl.float32, is_pure=True, pack=NUMBERS)
    else:
        acc = acc * alpha
    return acc


@triton.constexpr_function
def multiply_unless_one(count):
    """``count`` numbers in place, by as many factors: of one row and of the other in turn, two at a time."""
    first, other = 2 * count, 2 * count + 2
    lines = [
        ".reg .pred any;",
        f"setp.neu.f32 any, ${first}, 0f3F800000;",
        f"setp.neu.or.f32 any, ${other}, 0f3F800000, any;",
        "vote.sync.any.pred any, any, 0xffffffff;",
        "@!any bra DONE;",
        *(f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count)),
        "DONE:",
    ]
    return "{ " + " ".join(lines) + " }"


@triton.constexpr_function
def _in_place(count):
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)
