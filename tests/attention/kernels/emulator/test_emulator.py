"""The emulator runs correct kernels and names the fault of incorrect ones."""

import re
import traceback

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flash_train.attention.kernels.hopper.gluon_compat import reinterpret, tma_add, tma_load, tma_store, tma_store_wait
from tests.support.gluon import (
    BarrierError,
    Deadlock,
    EmulationError,
    MissingFence,
    OutOfBounds,
    Race,
    launch,
)

SEEDS = range(3)
ROWS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
TILE = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0]))
BARRIER = gl.constexpr(mbarrier.MBarrierLayout())


def describe(tensor, *block):
    dtype = {torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}[tensor.dtype]
    return TensorDescriptor.from_tensor(tensor, list(block), gl.NVMMASharedLayout.get_default_for(list(block), dtype))


def randn(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


# a pipelined product of matrices, and everything that can be wrong with it


@gluon.jit
def load_tiles(a_desc, b_desc, a_bufs, b_bufs, full, empty, row, col, steps, STAGES: gl.constexpr, FAULT: gl.constexpr):
    for i in range(steps):
        s = i % STAGES
        phase = (i // STAGES) & 1
        if FAULT == "parity of a free slot":
            mbarrier.wait(empty.index(s), phase)
        elif FAULT != "no wait for a free slot":
            mbarrier.wait(empty.index(s), phase ^ 1)
        nbytes: gl.constexpr = a_desc.block_type.nbytes + b_desc.block_type.nbytes
        if FAULT == "too many bytes":
            mbarrier.expect(full.index(s), nbytes + 16)
        elif FAULT == "too few bytes":
            mbarrier.expect(full.index(s), nbytes // 2)
        else:
            mbarrier.expect(full.index(s), nbytes)
        tma_load(a_desc, [row, i * 64], full.index(s), a_bufs.index(s))
        tma_load(b_desc, [col, i * 64], full.index(s), b_bufs.index(s))


@gluon.jit
def multiply(c_desc, a_bufs, b_bufs, out, full, empty, row, col, steps, STAGES: gl.constexpr, FAULT: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    acc = warpgroup_mma_init(gl.zeros([64, 64], gl.float32, layout))
    for i in range(steps):
        s = i % STAGES
        phase = (i // STAGES) & 1
        if FAULT == "one parity":
            mbarrier.wait(full.index(s), 0)
        elif FAULT != "no wait for data":
            mbarrier.wait(full.index(s), phase)
        acc = warpgroup_mma(a_bufs.index(s), b_bufs.index(s).permute((1, 0)), acc, is_async=True)
        # the product before this one has been read
        acc = warpgroup_mma_wait(2 if FAULT == "free too early" else 1, deps=[acc])
        if FAULT != "no slot is freed":
            mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), pred=i > 0)
        if FAULT == "freed twice":
            mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), pred=i > 0)
    if FAULT != "no wait for the sum":
        acc = warpgroup_mma_wait(0, deps=[acc])
    out.store(acc.to(gl.bfloat16))
    if FAULT != "no fence":
        fence_async_shared()
    tma_store(c_desc, [row, col], out)
    if FAULT == "overwritten":
        out.store(gl.zeros([64, 64], gl.bfloat16, layout))
    if FAULT != "no wait for the store":
        tma_store_wait(0)


@gluon.jit
def product(a_desc, b_desc, c_desc, K, STAGES: gl.constexpr, FAULT: gl.constexpr):
    row = gl.program_id(0) * 64
    col = gl.program_id(1) * 64
    a_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], b_desc.layout)
    out = gl.allocate_shared_memory(gl.bfloat16, [64, 64], c_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (multiply, (c_desc, a_bufs, b_bufs, out, full, empty, row, col, K // 64, STAGES, FAULT)),
            (load_tiles, (a_desc, b_desc, a_bufs, b_bufs, full, empty, row, col, K // 64, STAGES, FAULT)),
        ],
        [1],
        [24],
    )


def multiplied(fault, seed, stages=2):
    a, b, c = randn(128, 384), randn(64, 384), torch.full((128, 64), float("nan"), dtype=torch.bfloat16)
    blocks = [describe(x, 64, 64) for x in (a, b, c)]
    launch(product, (2, 1), *blocks, 384, stages, fault, seed=seed)
    return c.float(), a.float() @ b.float().T


@pytest.mark.parametrize("stages", (1, 2, 3))
def test_product(stages):
    for seed in SEEDS:
        if stages == 1:  # the slot is freed one step late
            with pytest.raises(Deadlock):
                multiplied("", seed, stages)
        else:
            got, wanted = multiplied("", seed, stages)
            torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-2)


FAULTS = {
    "no wait for a free slot": (EmulationError, r"a_bufs\[\d\]|lacks 0 "),
    "parity of a free slot": (Deadlock, r"load_tiles \(partition 1\) waits for parity 0 of empty\[0\]"),
    "too many bytes": (Deadlock, r"multiply \(partition 0\) waits for parity 0 of full\[0\].*16 bytes"),
    "too few bytes": (EmulationError, "_bufs|full"),
    "one parity": (EmulationError, "_bufs|full|empty"),
    "no wait for data": (EmulationError, "which has waited for no barrier|still writes it|still reads it|empty"),
    "no slot is freed": (Deadlock, r"load_tiles \(partition 1\) waits for parity 0 of empty\[0\]"),
    "freed twice": (EmulationError, "a_bufs|empty"),
    "free too early": (Race, "overwritten by a TMA load while a warpgroup_mma .*multiply.* still reads it"),
    "no wait for the sum": (EmulationError, "used before a warpgroup_mma_wait that retires it"),
    "no fence": (MissingFence, "no fence_async_shared between a TMA store of out and the store to it .*multiply"),
    "overwritten": (Race, "out is overwritten by store while a TMA store .*multiply.* still reads it"),
    "no wait for the store": (EmulationError, "ends while a TMA store may still read shared memory"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault(fault):
    kind, message = FAULTS[fault]
    for seed in SEEDS:
        with pytest.raises(kind, match=message) as caught:
            multiplied(fault, seed)
        text = "".join(traceback.format_exception(caught.value))
        assert re.search(r"(multiply|load_tiles), test_emulator.py:\d+|in (multiply|load_tiles)\n", text)


# two partitions and memory that no asynchronous operation touches


@gluon.jit
def write(memory, ready, done, SYNC: gl.constexpr):
    memory.store(gl.full([128], 7, gl.int32, ROWS))
    if SYNC != "nothing":
        mbarrier.arrive(ready)
    if SYNC == "both":
        mbarrier.wait(done, 0)
    memory.store(gl.full([128], 8, gl.int32, ROWS))


@gluon.jit
def read(out, memory, ready, done, SYNC: gl.constexpr):
    if SYNC != "nothing":
        mbarrier.wait(ready, 0)
    found = memory.load(ROWS)
    mbarrier.arrive(done)
    gl.store(out + gl.arange(0, 128, ROWS), found)


@gluon.jit
def exchange(out, SYNC: gl.constexpr):
    memory = gl.allocate_shared_memory(gl.int32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    done = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    mbarrier.init(ready, count=1)
    mbarrier.init(done, count=1)
    gl.warp_specialize([(read, (out, memory, ready, done, SYNC)), (write, (memory, ready, done, SYNC))], [4], [24])


def test_exchange():
    for seed in range(10):
        out = torch.zeros(128, dtype=torch.int32)
        launch(exchange, 1, out, "both", seed=seed)
        assert out.eq(7).all()
        for sync in ("one", "nothing"):  # found whichever of the two comes first
            with pytest.raises(Race, match="memory"):
                launch(exchange, 1, out, sync, seed=seed)


@gluon.jit
def peek(x_desc, out, WAIT: gl.constexpr, FRESH: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    buffer = gl.allocate_shared_memory(gl.float32, [2, 16, 32], x_desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, x_desc.block_type.nbytes)
    tma_load(x_desc, [0, 0], bar, buffer.index(0))
    if WAIT == "before":
        mbarrier.wait(bar, 0)
    x = buffer.index(FRESH).load(layout)
    if WAIT == "after":
        mbarrier.wait(bar, 0)
    offsets = gl.arange(0, 16, gl.SliceLayout(1, layout))[:, None] * 32
    gl.store(out + offsets + gl.arange(0, 32, gl.SliceLayout(0, layout))[None, :], x)


def test_memory_is_junk_until_it_is_written():
    x, out = randn(16, 32, dtype=torch.float32), torch.zeros(16, 32)
    launch(peek, 1, describe(x, 16, 32), out, "before", 0)
    assert torch.equal(x, out)
    launch(peek, 1, describe(x, 16, 32), out, "before", 1)
    assert out.isnan().all()
    for seed in range(10):
        with pytest.raises(Race, match=r"load reads buffer\[0\]"):
            launch(peek, 1, describe(x, 16, 32), out, "after", 0, seed=seed)
        with pytest.raises(BarrierError, match="nobody waits for phase 0 of bar"):
            launch(peek, 1, describe(x, 16, 32), out, "never", 1, seed=seed)


@gluon.jit
def views(out, TOO_MUCH: gl.constexpr):
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    a = gl.allocate_shared_memory(gl.int32, [64, 32], layout)
    if TOO_MUCH:
        gl.allocate_shared_memory(gl.int32, [64, 1024], layout)
    rows = gl.arange(0, 64, gl.SliceLayout(1, TILE))[:, None]
    a.store(rows * 32 + gl.arange(0, 32, gl.SliceLayout(0, TILE))[None, :])
    part = a.slice(32, 32, 0).slice(16, 16, 1)
    part.store(part.load(TILE) * 0 - 1)
    flipped = a.permute((1, 0)).load(TILE)
    bits = reinterpret(a, gl.uint32, [2048], gl.SwizzledSharedLayout(1, 1, 1, [0])).load(ROWS)
    gl.store(out + gl.arange(0, 32, ROWS)[:, None] * 64 + gl.arange(0, 64, ROWS)[None, :], flipped)
    gl.store(out + 2048 + gl.arange(0, 2048, ROWS), bits.to(gl.int32, bitcast=True))
    a._keep_alive()


def test_views_share_memory():
    out = torch.zeros(2, 2048, dtype=torch.int32)
    launch(views, 1, out, False)
    wanted = torch.arange(2048, dtype=torch.int32).view(64, 32)
    wanted[32:, 16:] = -1
    assert torch.equal(out[1].view(64, 32), wanted) and torch.equal(out[0].view(32, 64), wanted.T)
    with pytest.raises(EmulationError, match="262144 bytes of shared memory; of 232448"):
        launch(views, 1, out, True)


# descriptors


@gluon.jit
def move(x_desc, y_desc, at, to, SHAPE: gl.constexpr, ADD: gl.constexpr):
    buffer = gl.allocate_shared_memory(x_desc.dtype, SHAPE, x_desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, x_desc.block_type.nbytes)
    tma_load(x_desc, at, bar, buffer)
    mbarrier.wait(bar, 0)
    if ADD:
        tma_add(y_desc, to, buffer)
    else:
        tma_store(y_desc, to, buffer)
    tma_store_wait(0)


def moved(x_desc, y_desc, at, to, add=False, grid=1):
    shape = [n for n in x_desc.block_shape if n > 1]
    launch(move, grid, x_desc, y_desc, at, to, shape, add)


def test_descriptor_bounds():
    x, y = randn(40, 64), torch.full((40, 64), 9, dtype=torch.bfloat16)
    moved(describe(x, 32, 64), describe(y, 32, 64), (-8, 0), (16, 0))
    assert y[:16].eq(9).all() and y[16:24].eq(0).all() and torch.equal(y[24:], x[:16])
    moved(describe(x, 32, 64), describe(y, 32, 64), (24, 8), (-16, 0))
    assert y[:16].eq(0).all()
    with pytest.raises(EmulationError, match="not a multiple of 16 bytes"):
        moved(describe(x, 32, 64), describe(y, 32, 64), (0, 4), (0, 0))
    wrong = describe(x, 32, 64)
    wrong.shape = [64, 64]
    with pytest.raises(OutOfBounds, match="x_desc"):
        moved(wrong, describe(y, 32, 64), (32, 0), (0, 0))


def ragged(tensor, *block):
    """A descriptor like triton.tools.ragged_tma's: addresses wrap around 2**64."""
    rows, width = tensor.stride(0), tensor.shape[1]
    shape, strides = [0x7FFF0000, 0x7FFF0000, 2**30, width], [2**34 - rows, rows, rows, 1]
    layout = gl.NVMMASharedLayout.get_default_for([1, 1, *block], gl.bfloat16)
    return TensorDescriptor(tensor, shape, strides, [1, 1, *block], layout)


def test_ragged_descriptor():
    x, y = randn(100, 64), torch.full((100, 64), 9, dtype=torch.bfloat16)
    start, size, row = 30, 41, 16  # rows 46 to 71 of the tensor are the last 25 of the piece
    at = (2**30, start + size, 2**30 - size + row, 0)
    moved(ragged(x, 32, 64), ragged(y, 32, 64), at, at)
    assert torch.equal(y[46:71], x[46:71]) and y[:46].eq(9).all() and y[71:].eq(9).all()
    moved(ragged(x, 32, 64), describe(y, 32, 64), at, (0, 0))
    assert torch.equal(y[:25], x[46:71]) and y[25:32].eq(0).all()


def test_reduction():
    x, y = randn(32, 64, dtype=torch.float32), torch.ones(32, 64)
    moved(describe(x, 32, 64), describe(y, 32, 64), (0, 0), (0, 0), add=True, grid=3)
    torch.testing.assert_close(y, 1 + 3 * x)
