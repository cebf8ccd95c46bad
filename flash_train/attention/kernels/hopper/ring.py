"""Between warps: ring buffers, whose stages producers fill, by TMA or by stores, and consumers empty; and turns."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

ONCE = gl.constexpr("mov.b32 $0, $1;")


class Ring(NamedTuple):
    """Stages of shared memory, and for each a barrier that says "filled" and one that says "emptied".

    Step i of a kernel uses stage i % STAGES for the (i // STAGES)-th time: whose parity is the phase to wait for.
    """

    tiles: Any
    full: Any
    empty: Any


@gluon.jit
def make_ring(tiles, STAGES: gl.constexpr, READERS: gl.constexpr, WRITERS: gl.constexpr = 1):
    """A ring over ``tiles`` (STAGES, ...), each of which WRITERS partitions fill and READERS empty."""
    full = make_barriers(STAGES, WRITERS)
    empty = make_barriers(STAGES, READERS)
    return Ring(tiles, full, empty)


@gluon.jit
def make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT barriers, each of which completes a phase with ARRIVALS arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def tile_of(ring, i, STAGES: gl.constexpr):
    """Step i's tile, without the dimensions of one."""
    tile = ring.tiles.index(i % STAGES)
    return tile.reshape([tile.shape[-2], tile.shape[-1]])


@gluon.jit
def wait_full(ring, i, STAGES: gl.constexpr):
    """Wait until step i's stage is filled."""
    mbarrier.wait(ring.full.index(i % STAGES), (i // STAGES) & 1)


@gluon.jit
def wait_empty(ring, i, STAGES: gl.constexpr):
    """Wait until step i's stage is emptied of what it held before; at once the first time."""
    mbarrier.wait(ring.empty.index(i % STAGES), ((i // STAGES) & 1) ^ 1)


@gluon.jit
def release(ring, i, STAGES: gl.constexpr):
    """This partition has read step i's stage."""
    mbarrier.arrive(ring.empty.index(i % STAGES), count=1)


@gluon.jit
def make_turns(CONSUMERS: gl.constexpr):
    """A barrier for each consumer, by which it is given its turn. The first has the first."""
    turns = make_barriers(CONSUMERS, 1)
    mbarrier.arrive(turns.index(0), count=1)
    return turns


@gluon.jit
def take_turn(turns, step, W: gl.constexpr, PINGPONG: gl.constexpr):
    """Consumers give the matrix unit work in turns: one's exponentials then coincide with another's products."""
    if PINGPONG:
        mbarrier.wait(turns.index(W), step & 1)


@gluon.jit
def pass_turn(turns, W: gl.constexpr, CONSUMERS: gl.constexpr, PINGPONG: gl.constexpr):
    if PINGPONG:
        mbarrier.arrive(turns.index((W + 1) % CONSUMERS), count=1)


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
