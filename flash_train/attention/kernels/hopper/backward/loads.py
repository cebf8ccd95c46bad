"""The loader of the backward kernels: the tiles of a work tile of keys, and of the queries that see them."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flash_train.attention.kernels.device.mask import query_visits
from flash_train.attention.kernels.hopper.gluon_compat import tma_load
from flash_train.attention.kernels.hopper.pipeline import producer_acquire, stage_of
from flash_train.attention.kernels.hopper.scheduler import (
    find_work_tile,
    first_padded_row,
    is_reversed,
    lanes,
    query_tile,
    tma_coords,
)

#: barriers of ``Operands.kv``: the tiles are loaded, they are read for the last time, the gradients are in their place
KV_LOADED = gl.constexpr(0)
KV_READ = gl.constexpr(1)
KV_STORED = gl.constexpr(2)


class Descriptors(NamedTuple):
    """TMA descriptors of the inputs."""

    q: Any  #: tiles [BLOCK_M, HEAD_DIM]
    k: Any  #: tiles [BLOCK_N, HEAD_DIM]
    v: Any
    dout: Any  #: tiles [BLOCK_M, HEAD_DIM]
    lse2: Any  #: tiles [BLOCK_M]
    delta: Any


class Operands(NamedTuple):
    """Shared memory that the loader fills. The log-sum-exp arrives and leaves with its queries, and delta with dO."""

    k_tile: Any  #: [BLOCK_N, HEAD_DIM]
    v_tile: Any
    q: Any  #: Pipeline of tiles [BLOCK_M, HEAD_DIM]
    do: Any
    lse_tiles: Any  #: [BLOCK_M], for each stage of q
    delta_tiles: Any  #: [BLOCK_M], for each stage of do
    kv: Any  #: barriers


@gluon.jit
def load_tiles(
    descs, operands, scheduler, mask, padded_rows,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Load K and V of the program's work tile; then, for each step, Q with its lse2, and dO with its delta.

    Returns the number of steps.
    """
    PACKED: gl.constexpr = scheduler.cu_q is not None
    seq, kv_head, start_n, is_valid = find_work_tile(gl.program_id(0), scheduler, BLOCK_N, False, False)
    steps = gl.to_tensor(0)
    if is_valid:
        loaded = operands.kv.index(KV_LOADED)
        coords = tma_coords(seq, kv_head, start_n, seq.k_row, seq.len_k, PACKED)
        mbarrier.arrive(loaded, count=1)
        mbarrier.expect(loaded, descs.k.block_type.nbytes + descs.v.block_type.nbytes)
        tma_load(descs.k, coords, loaded, operands.k_tile.index(0))
        tma_load(descs.v, coords, loaded, operands.v_tile.index(0))
        visits = query_visits(mask, seq, kv_head.to(gl.int64) * GROUP, start_n, lanes(), BLOCK_M, BLOCK_N)
        reverse = is_reversed(gl.program_id(0), scheduler)
        first = first_padded_row(seq, scheduler)
        steps = GROUP * (visits.stop - visits.first)
        for i in range(0, steps):
            head, start_m = query_tile(visits, mask, kv_head, i, reverse, GROUP, BLOCK_M)
            coords = tma_coords(seq, head, start_m, seq.q_row, seq.len_q, PACKED)
            row = [head * padded_rows + first + start_m]
            stage = stage_of(operands.q, i)
            producer_acquire(operands.q, i)
            q_full = operands.q.full.index(stage)
            mbarrier.expect(q_full, descs.q.block_type.nbytes + 4 * BLOCK_M)
            tma_load(descs.q, coords, q_full, operands.q.tiles.index(stage))
            tma_load(descs.lse2, row, q_full, operands.lse_tiles.index(stage))
            producer_acquire(operands.do, i)
            do_full = operands.do.full.index(stage)
            mbarrier.expect(do_full, descs.dout.block_type.nbytes + 4 * BLOCK_M)
            tma_load(descs.dout, coords, do_full, operands.do.tiles.index(stage))
            tma_load(descs.delta, row, do_full, operands.delta_tiles.index(stage))
    return steps
