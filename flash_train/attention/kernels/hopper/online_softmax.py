"""The running softmax of rows that lie in fragments of the matrix unit (FlashAttention-2, algorithm 1).

With one difference: what is subtracted from logits need not be their maximum so far, only near enough that weights do
not overflow. So a block's maximum is looked for only where, by what was subtracted before, weights became too large.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

#: of a fragment's first 8 columns
THREADS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [8, 0]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 8]
    )
)
WAYS = gl.constexpr(16)  #: columns in which a maximum is taken side by side, four of them a thread's
#: 1 where any of a warp's sums, four a thread, is above 2^15, or no number
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
def new_maximum(s, m_i, score):
    """The factor for what was summed before, and what is subtracted from the logits s, as it is subtracted and as it is
    carried on (-inf: nothing was seen yet): the running maximum."""
    m_new = gl.maximum(m_i, _row_maximum(s) * score.factor)
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
    """Sums by thread times their rows' alpha."""
    return sums * gl.convert_layout(alpha, gl.SliceLayout(1, THREADS))[:, None]


@gluon.jit
def rescale(acc, alpha):
    """acc times its rows' alpha."""
    return acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]


@gluon.jit
def make_notes(CONSUMERS: gl.constexpr):
    """A consumer's warps tell each other by them whether weights are too large: ``exceed``."""
    return gl.allocate_shared_memory(gl.int8, [CONSUMERS, 64, 8], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def exceed(sums):
    """Whether some sums of this warp's rows are too large: more than 2^15, or, where -inf was subtracted, no number.

    Weights of 2^15 for 1 lose nothing: their rounding is relative, and fp16 reaches to 2^16.
    """
    return gl.inline_asm_elementwise(
        WARP_EXCEEDS, "=&r,=&r,=&r,=&r,f,f,f,f", [sums], dtype=gl.int32, is_pure=False, pack=4
    )


@gluon.jit
def read_notes(note):
    """Whether any warp's note says so. Behind a meeting of the warps, and before another."""
    ALL: gl.constexpr = gl.BlockedLayout([4, 1, 1], [1, 1, 32], [1, 1, 4], [0, 1, 2])
    notes = note.reshape([4, 16, 8]).slice(0, 1, 1).slice(0, 1, 2).load(ALL)  # one of each warp's, which are the same
    return gl.max(gl.max(gl.max(notes, 2), 1), 0) > 0
