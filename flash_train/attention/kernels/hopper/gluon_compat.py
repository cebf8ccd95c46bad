"""The Gluon functions that differ between Triton 3.6 and 3.9, under one name each.

Gluon is experimental, and its names change from release to release. Kernels import these functions from here. Among
the kernels' other modules, only ``kernels.compiler_options`` depends on Triton's version.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

tma_store_wait = tma.store_wait

if hasattr(tma, "async_atomic_add"):  # Triton 3.8
    tma_load = tma.async_load
    tma_store = tma.async_store
    tma_add = tma.async_atomic_add
else:
    tma_load = tma.async_copy_global_to_shared
    tma_store = tma.async_copy_shared_to_global

    @builtin
    def tma_add(tensor_desc, coord, src, _semantic=None):
        """Add a tile in shared memory to a tensor in global memory, without an order between tiles."""
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


#: Waits for all warps of the partition. Triton 3.7 renamed it.
sync_warps = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier


@builtin
def reinterpret(view, dtype, shape, layout, _semantic=None):
    """The shared memory of ``view`` as tiles of another dtype, shape and layout. Triton 3.9 made the method public."""
    method = view.reinterpret if hasattr(view, "reinterpret") else view._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)


#: Whether the compiler synchronises the partition's warps before every arrival that Gluon's functions make.
ARRIVAL_SYNCS = gl.constexpr(hasattr(tma, "async_atomic_add"))
#: Whether inline assembly can take the address of a barrier. Triton 3.9 and newer.
ASM_TAKES_BARRIERS = gl.constexpr(hasattr(gl, "inline_asm"))
ARRIVE = gl.constexpr("@$1 mbarrier.arrive.shared::cta.b64 _, [$0];")


@gluon.jit
def arrive_no_sync(barrier, pred=True):
    """Arrive at a barrier with one thread, without a synchronisation of the partition's warps.

    Around ``mbarrier.arrive`` the compiler synchronises all warps: once before it, and up to Triton 3.7 once more
    before the next access to shared memory. Up to Triton 3.7, ``mbarrier.expect`` with 0 bytes is an arrival without
    this synchronisation. Triton 3.8 has no such arrival. From 3.9 on inline assembly provides one.
    """
    if ASM_TAKES_BARRIERS:
        THREADS: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        first = gl.arange(0, 32 * gl.num_warps(), THREADS) == 0
        gl.inline_asm(ARRIVE, "r,b", [barrier, first & pred])
    else:
        mbarrier.expect(barrier, 0, pred)


@gluon.jit
def sync_and_arrive(barrier, pred=True):
    """Arrive at a barrier when all warps of this partition have reached this point."""
    if ARRIVAL_SYNCS:
        mbarrier.expect(barrier, 0, pred)
    else:
        sync_warps()
        arrive_no_sync(barrier, pred)
