"""Synchronisation between warps: pipelines of shared memory, and barriers that order the consumers.

A producer fills the stages of a pipeline with TMA or with stores; consumers read and release them. Step i of a kernel
uses stage i % STAGES.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flash_train.attention.kernels.hopper.gluon_compat import arrive_no_sync, sync_and_arrive, sync_warps, tma_load

ONCE = gl.constexpr("mov.b32 $0, $1;")


class Pipeline(NamedTuple):
    """Stages of shared memory, each with a barrier "full" and a barrier "empty".

    Step i uses its stage for the (i // STAGES)-th time; the parity of this number is the phase to wait for.
    """

    tiles: Any
    full: Any
    empty: Any


@gluon.jit
def make_pipeline(tiles, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """A pipeline over ``tiles`` (STAGES, ...). One partition fills a stage, and CONSUMERS partitions release it."""
    return Pipeline(tiles, make_barriers(STAGES, 1), make_barriers(STAGES, CONSUMERS))


@gluon.jit
def make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT barriers; each completes a phase after ARRIVALS arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def stage_of(pipe, i):
    return i % pipe.empty.shape[0]


@gluon.jit
def phase_of(pipe, i):
    return (i // pipe.empty.shape[0]) & 1


@gluon.jit
def tile_of(pipe, i):
    """The tile of step i as a matrix: the leading dimensions of size 1 are dropped."""
    tile = pipe.tiles.index(stage_of(pipe, i))
    return tile.reshape([tile.shape[-2], tile.shape[-1]])


@gluon.jit
def producer_acquire(pipe, i):
    """Wait until the consumers have released the stage of step i. The first use of a stage does not wait."""
    mbarrier.wait(pipe.empty.index(stage_of(pipe, i)), phase_of(pipe, i) ^ 1)


@gluon.jit
def producer_commit(pipe, i):
    """Signal that the partition has stored the tile of step i. TMA loads complete the barrier without a commit."""
    sync_and_arrive(pipe.full.index(stage_of(pipe, i)))


@gluon.jit
def producer_load(pipe, i, desc, coords):
    """Acquire the stage of step i, and load the descriptor's tile at ``coords`` into it."""
    producer_acquire(pipe, i)
    full = pipe.full.index(stage_of(pipe, i))
    mbarrier.expect(full, desc.block_type.nbytes)
    tma_load(desc, coords, full, pipe.tiles.index(stage_of(pipe, i)))


@gluon.jit
def consumer_wait(pipe, i, pred=True):
    """Wait until the stage of step i is full."""
    mbarrier.wait(pipe.full.index(stage_of(pipe, i)), phase_of(pipe, i), pred=pred)


@gluon.jit
def consumer_release(pipe, i, pred=True):
    """Signal that this partition has read the stage of step i."""
    sync_and_arrive(pipe.empty.index(stage_of(pipe, i)), pred)


@gluon.jit
def consumer_release_no_sync(pipe, i, pred=True):
    """``consumer_release`` directly after another synchronisation of the partition's warps."""
    arrive_no_sync(pipe.empty.index(stage_of(pipe, i)), pred)


@gluon.jit
def make_schedule_fence():
    """A barrier whose first phase is complete, for ``schedule_fence``."""
    fence = make_barriers(1, 1)
    arrive_no_sync(fence.index(0))
    sync_warps()
    return fence


@gluon.jit
def schedule_fence(fence):
    """Keep the assembler from moving a wait for matrix products across this point.

    The wait returns at once, but the assembler moves nothing across it. Each place needs a fence of its own: before a
    second wait for the same barrier the compiler synchronises all warps.
    """
    mbarrier.wait(fence.index(0), 0)


@gluon.jit
def make_scheduler_barriers():
    """Two barriers for each of up to three consumers, for ``warp_scheduler_sync``. Consumer 0 goes first."""
    barriers = (make_barriers(2, 1), make_barriers(2, 1), make_barriers(2, 1))
    arrive_no_sync(barriers[0].index(0))
    sync_warps()  # without it the compiler synchronises all warps at every use
    return barriers


@gluon.jit
def warp_scheduler_sync(barriers, step, W: gl.constexpr, PINGPONG: gl.constexpr):
    """Wait until consumer W may issue its matrix products.

    Consumers take turns (ping-pong scheduling), so that the exponentials of one overlap with the products of another.
    """
    if PINGPONG:
        mbarrier.wait(barriers[W].index(step & 1), (step >> 1) & 1)


@gluon.jit
def warp_scheduler_arrive(barriers, step, W: gl.constexpr, CONSUMERS: gl.constexpr, PINGPONG: gl.constexpr):
    """Let the consumer after W issue its products.

    A warp of this consumer may still be waiting for its own turn here. It cannot miss it: the barrier is used again
    only after a synchronisation of all warps.
    """
    if PINGPONG:
        arrive_no_sync(barriers[(W + 1) % CONSUMERS].index((step + (W + 1) // CONSUMERS) & 1))


@gluon.jit
def make_shared_scalars(COUNT: gl.constexpr):
    """COUNT int32 scalars in shared memory, one for each stage of a pipeline.

    The producer stores a scalar before it fills the stage; the consumers load it before they release the stage.
    """
    return gl.allocate_shared_memory(gl.int32, [COUNT, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def store_scalar(scalars, i, x):
    """Store x as scalar i. Every thread stores it, so that the thread that fills the stage has done so."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    scalars.index(i).store(gl.zeros([1], gl.int32, ONE) + x)


@gluon.jit
def load_scalar(scalars, i):
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(scalars.index(i).load(ONE), 0)


@gluon.jit
def uniform(x):
    """x, which has the same value in all threads, in a form that the assembler recognises as uniform.

    After a warp's reduction the assembler keeps x in one uniform register for the warp, and an instruction can read it
    in addition to two registers of the thread.
    """
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(gl.zeros([32], gl.int32, LANES) + x.to(gl.int32, bitcast=True), 0).to(x.dtype, bitcast=True)


@gluon.jit
def once(x):
    """x, by an instruction that the compiler does not move: code that depends on it stays in its branch."""
    return gl.inline_asm_elementwise(ONCE, "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)
