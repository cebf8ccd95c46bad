"""The running softmax on accumulator fragments of the matrix unit (FlashAttention-2, algorithm 1).

It differs from the textbook in one point. The reference that is subtracted from logits need not be their running
maximum; it must only be close enough that weights do not overflow. So a block's maximum is computed only if its weights
are too large with the reference so far.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

#: layout of the first 8 columns of a fragment
THREADS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [8, 0]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 8]
    )
)
MAX_WIDTH = gl.constexpr(16)  #: columns of partial maxima of a row; a thread holds four of them
#: 1 if any row sum of a warp (four in each thread) is above 2^15 or not a number
WARP_EXCEEDS = gl.constexpr(
    """{
    .reg .pred all;
    setp.le.f32 all, $4, 0f47000000;
    setp.le.and.f32 all, $5, 0f47000000, all;
    setp.le.and.f32 all, $6, 0f47000000, all;
    setp.le.and.f32 all, $7, 0f47000000, all;
    vote.sync.all.pred all, all, 0xffffffff;
    selp.b32 $0, 0, 1, all;
    mov.b32 $1, $0;
    mov.b32 $2, $0;
    mov.b32 $3, $0;
    }"""
)


@gluon.jit
def row_max(s):
    """The maximum of each row, by several independent chains.

    In a single chain each instruction would wait for the result of the one before it, five times as long as it takes to
    issue.
    """
    parts = gl.max(s.reshape([s.shape[0], s.shape[1] // MAX_WIDTH, MAX_WIDTH]), 1)
    return gl.convert_layout(gl.max(parts, 1), gl.SliceLayout(1, s.type.layout), assert_trivial=True)


@gluon.jit
def thread_row_sums(p):
    """Partial row sums [64, 8], each over the columns of one thread. They are reduced once, after the last block."""
    return gl.convert_layout(gl.sum(p.reshape([64, p.shape[1] // 8, 8]), 1), THREADS, assert_trivial=True)


@gluon.jit
def rescale_sums(sums, alpha):
    """Multiply partial row sums by the alpha of their rows."""
    return sums * gl.convert_layout(alpha, gl.SliceLayout(1, THREADS))[:, None]


@gluon.jit
def rescale(acc, alpha):
    """Multiply the accumulator by the alpha of its rows."""
    return acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]


@gluon.jit
def make_overflow_flags(CONSUMERS: gl.constexpr):
    """Shared memory in which the warps of a consumer exchange the results of ``exceeds_limit``."""
    return gl.allocate_shared_memory(gl.int8, [CONSUMERS, 64, 8], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def exceeds_limit(sums):
    """1 if any row sum of this warp is above 2^15, or not a number because the reference was -inf; else 0.

    A weight of 2^15 in place of 1 loses no precision: rounding is relative, and fp16 reaches 2^16.
    """
    return gl.inline_asm_elementwise(
        WARP_EXCEEDS, "=&r,=&r,=&r,=&r,f,f,f,f", [sums], dtype=gl.int32, is_pure=False, pack=4
    )


@gluon.jit
def any_overflow(flags):
    """Whether any warp of the consumer set its flag. The warps must synchronise before and after the call."""
    ALL: gl.constexpr = gl.BlockedLayout([4, 1, 1], [1, 1, 32], [1, 1, 4], [0, 1, 2])
    by_warp = flags.reshape([4, 16, 8]).slice(0, 1, 1).slice(0, 1, 2).load(ALL)  # a warp's flags are all the same
    return gl.max(gl.max(gl.max(by_warp, 2), 1), 0) > 0
