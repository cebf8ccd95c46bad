"""Between warps: ring buffers, whose stages producers fill, by TMA or by stores, and consumers empty; and turns."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

ONCE = gl.constexpr("mov.b32 $0, $1;")
#: of a partition; by its name before Triton 3.7, and since
sync_warps = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier


class Ring(NamedTuple):
    """Stages of shared memory, and for each a barrier that says "filled" and one that says "emptied".

    Step i of a kernel uses stage i % STAGES for the (i // STAGES)-th time: whose parity is the phase to wait for.
    """

    tiles: Any
    full: Any
    empty: Any


@gluon.jit
def stage_of(ring, i):
    return i % ring.empty.shape[0]


@gluon.jit
def phase_of(ring, i):
    return (i // ring.empty.shape[0]) & 1


@gluon.jit
def make_ring(tiles, STAGES: gl.constexpr, READERS: gl.constexpr):
    """A ring over ``tiles`` (STAGES, ...), each of which one partition fills and READERS empty."""
    return Ring(tiles, make_barriers(STAGES, 1), make_barriers(STAGES, READERS))


@gluon.jit
def make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT barriers, each of which completes a phase with ARRIVALS arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def tile_of(ring, i):
    """Step i's tile, without the dimensions of one."""
    tile = ring.tiles.index(stage_of(ring, i))
    return tile.reshape([tile.shape[-2], tile.shape[-1]])


@gluon.jit
def wait_full(ring, i, pred=True):
    """Wait until step i's stage is filled."""
    mbarrier.wait(ring.full.index(stage_of(ring, i)), phase_of(ring, i), pred=pred)


@gluon.jit
def wait_empty(ring, i):
    """Wait until step i's stage is emptied of what it held before; at once the first time."""
    mbarrier.wait(ring.empty.index(stage_of(ring, i)), phase_of(ring, i) ^ 1)


@gluon.jit
def fill(ring, i, source, where):
    """Load step i's stage with the tile at ``where`` of a descriptor, once it is emptied."""
    wait_empty(ring, i)
    full = ring.full.index(stage_of(ring, i))
    mbarrier.expect(full, source.block_type.nbytes)
    tma.async_copy_global_to_shared(source, where, full, ring.tiles.index(stage_of(ring, i)))


@gluon.jit
def arrive(barrier, pred=True):
    """All warps of this partition have come here."""
    sync_warps()
    signal(barrier, pred)


@gluon.jit
def signal(barrier, pred=True):
    """One thread of this partition has: in step with the others only behind ``arrive``.

    As the announcement of 0 bytes: around an arrival by name the compiler has all warps wait for each other, once
    before it, and once more before whatever touches shared memory next.
    """
    mbarrier.expect(barrier, 0, pred)


@gluon.jit
def release(ring, i, pred=True):
    """This partition has read step i's stage."""
    sync_warps()
    release_too(ring, i, pred)


@gluon.jit
def release_too(ring, i, pred=True):
    """As ``release``, behind another or an ``arrive``."""
    signal(ring.empty.index(stage_of(ring, i)), pred)


@gluon.jit
def make_mark():
    """A barrier that is passed: for ``hold``."""
    mark = make_barriers(1, 1)
    signal(mark.index(0))
    sync_warps()
    return mark


@gluon.jit
def hold(mark):
    """Nothing is done here, but the assembler moves no wait for products across it, as across any wait for a barrier.

    Each place needs a mark of its own: at a barrier that was waited for before, the compiler has all warps meet.
    """
    mbarrier.wait(mark.index(0), 0)


@gluon.jit
def make_turns():
    """Two barriers for each of up to three consumers, by which it is given its turn. The first has the first."""
    turns = (make_barriers(2, 1), make_barriers(2, 1), make_barriers(2, 1))
    signal(turns[0].index(0))
    sync_warps()  # here, or the compiler has them meet at every turn
    return turns


@gluon.jit
def take_turn(turns, step, W: gl.constexpr, PINGPONG: gl.constexpr):
    """Consumers give the matrix unit work in turns: one's exponentials then coincide with another's products."""
    if PINGPONG:
        mbarrier.wait(turns[W].index(step & 1), (step >> 1) & 1)


@gluon.jit
def pass_turn(turns, step, W: gl.constexpr, CONSUMERS: gl.constexpr, PINGPONG: gl.constexpr):
    """A warp may still wait for this turn: it misses it only if the same barrier comes round once more, before which
    all warps have met."""
    if PINGPONG:
        signal(turns[(W + 1) % CONSUMERS].index((step + (W + 1) // CONSUMERS) & 1))


@gluon.jit
def make_words(COUNT: gl.constexpr):
    """COUNT places for an int32 that travels with a stage: written before the stage is filled, read before emptied."""
    return gl.allocate_shared_memory(gl.int32, [COUNT, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def write_word(words, i, x):
    """x, a scalar, to the i-th place; every thread writes it, also the one that fills the stage."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    words.index(i).store(gl.zeros([1], gl.int32, ONE) + x)


@gluon.jit
def read_word(words, i):
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(words.index(i).load(ONE), 0)


@gluon.jit
def uniform(x):
    """x, which is the same in all threads. After a warp's reduction the assembler knows it, too, and takes one register
    for the warp, which an instruction reads beside two of a thread's own."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(gl.zeros([32], gl.int32, LANES) + x.to(gl.int32, bitcast=True), 0).to(x.dtype, bitcast=True)


@gluon.jit
def once(x):
    """x, by an instruction that the compiler does not move: what depends on it stays in its branch."""
    return gl.inline_asm_elementwise(ONCE, "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)
