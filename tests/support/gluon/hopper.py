"""Hopper's asynchronous operations: TMA copies, warpgroup_mma, and the fence between generic and async proxy."""

from __future__ import annotations

import numpy as np
import triton.language as tl

from tests.support.gluon.barriers import find, predicated
from tests.support.gluon.memory import SharedView
from tests.support.gluon.pointers import Descriptor
from tests.support.gluon.schedule import current, site
from tests.support.gluon.values import EmulationError, Value, as_int, junk, to_memory


class Load:
    """A TMA load from its issue to its completion."""

    kind = "TMA load"

    def __init__(self, descriptor, coord, barrier, view):
        self.descriptor, self.coord, self.barrier, self.view = descriptor, coord, barrier, view
        self.regions, self.site = [view.words()], site()
        self.memory = view._memory

    def complete(self):
        raw = self.view.raw()
        raw[...] = self.descriptor.read(self.coord).reshape(raw.shape)
        self.memory.end(self)
        self.barrier.transfer(self.view.nbytes)


class Store:
    """A TMA store or reduction, from its issue until the wait after which shared memory may be reused."""

    kind = "TMA store"

    def __init__(self, descriptor, coord, view, add):
        self.descriptor, self.coord, self.add = descriptor, coord, add
        self.regions, self.site, self.done = [view.words()], site(), False
        self.block = view.raw().copy()  # the source must not change before the operation ends
        self.memory = view._memory

    def complete(self):
        self.descriptor.write(self.coord, self.block, self.add)
        self.done = True


class Matmul:
    """A warpgroup_mma from its issue until the wait that retires it."""

    kind = "warpgroup_mma"

    def __init__(self, views):
        self.views, self.site = views, site()
        self.memory = views[0]._memory
        self.regions = [view.words() for view in views]
        self.retired = False


class Accumulator:
    """The result of an asynchronous warpgroup_mma, which becomes a tensor by the wait that retires the operation."""

    __hash__ = None

    def __init__(self, value, operation):
        self._value, self._operation = value, operation

    def _refuse(self, *_, **__):
        where = f" ({self._operation.site})" if self._operation else ""
        raise EmulationError(f"a warpgroup_mma's result{where} is used before a warpgroup_mma_wait that retires it")

    __getattr__ = _refuse


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift"):
    setattr(Accumulator, f"__{_name}__", Accumulator._refuse)
    setattr(Accumulator, f"__r{_name}__", Accumulator._refuse)
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "invert", "getitem", "bool"):
    setattr(Accumulator, f"__{_name}__", Accumulator._refuse)


def _block(descriptor, view, what):
    if not isinstance(descriptor, Descriptor):
        raise TypeError(f"{what} with {descriptor}, which is no TMA descriptor")
    if descriptor.dtype != view.dtype:
        raise TypeError(f"{what} between {descriptor.name}, {descriptor.dtype}, and {view}")
    if [n for n in descriptor.block_shape if n != 1] != [n for n in view.shape if n != 1]:
        raise EmulationError(f"{what} of a block {descriptor.block_shape} of {descriptor.name} and {view}")


def async_load(tensor_desc, coord, barrier, result, pred=True, multicast=False):
    task = current()
    task.program.point()
    if not predicated(pred):
        return
    _block(tensor_desc, result, "TMA load")
    memory = result._memory
    memory.check_write(result, "a TMA load")
    memory.check_fenced(result, "a TMA load")
    barrier = find(barrier)
    coord = [as_int(c) for c in coord]
    tensor_desc.box(coord)  # report an address out of bounds at the issue, not at the completion
    load = memory.start(Load(tensor_desc, coord, barrier, result))
    barrier.loads.append((barrier.phase, load.site))
    result.raw()[...] = to_memory(junk(result.shape, result.dtype), result.dtype)
    memory.mark_written(load.regions[0], barrier.component, barrier.phase + 1, f"TMA load in {load.site}")
    task.program.start(load)
    task.program.point()


def _copy_out(descriptor, coord, view, add):
    task = current()
    task.program.point()
    _block(descriptor, view, "TMA store")
    memory = view._memory
    memory.check_read(view, "a TMA store")
    memory.check_fenced(view, "a TMA store")
    coord = [as_int(c) for c in coord]
    descriptor.box(coord)
    store = memory.start(Store(descriptor, coord, view, add))
    task.stores.append(store)
    task.program.start(store)
    task.program.point()


def async_store(tensor_desc, coord, src):
    _copy_out(tensor_desc, coord, src, add=False)


def async_atomic_add(tensor_desc, coord, src):
    _copy_out(tensor_desc, coord, src, add=True)


def store_wait(pendings):
    """Wait until at most ``pendings`` of this partition's stores still read shared memory."""
    task = current()
    task.program.point()
    oldest = task.stores[: max(0, len(task.stores) - pendings)]
    if not all(store.done for store in oldest):
        task.program.wait(lambda: all(store.done for store in oldest), lambda: "TMA stores")
    for store in oldest:
        store.memory.mark_read(store, task)
        store.memory.end(store)
    del task.stores[: len(oldest)]


def make_tensor_descriptor(*_, **__):
    raise NotImplementedError("the emulator has no descriptors made on the device")


def fence_async_shared(cluster=False):
    task = current()
    task.program.point()
    task.program.shared.fence(task)


def warpgroup_mma_init(value):
    return Accumulator(value, None)


def _operand(x, what):
    if isinstance(x, Accumulator):
        x._refuse()
    if isinstance(x, SharedView):
        x._memory.check_read(x, f"{what} of a warpgroup_mma")
        x._memory.check_fenced(x, f"{what} of a warpgroup_mma")
        data = x.read()
    else:
        data = x.data
    if x.dtype not in (tl.bfloat16, tl.float16):
        raise NotImplementedError(f"a warpgroup_mma of {x.dtype}")
    return data.astype(np.float32)


def warpgroup_mma(a, b, acc, *, use_acc=True, precision=None, max_num_imprecise_acc=None, is_async=False):
    task = current()
    task.program.point()
    if not isinstance(b, SharedView):
        raise TypeError("the second operand of a warpgroup_mma lies in shared memory")
    left, right = _operand(a, "operand a"), _operand(b, "operand b")
    before = acc._value if isinstance(acc, Accumulator) else acc
    m, n = left.shape[0], right.shape[1]
    if a.dtype != b.dtype or left.shape[1] != right.shape[0] or before.shape != (m, n):
        raise EmulationError(f"warpgroup_mma of {list(left.shape)} {a.dtype}, {b} into {list(before.shape)}")
    if before.dtype != tl.float32:
        raise NotImplementedError(f"a warpgroup_mma that accumulates in {before.dtype}")
    if m % 64 or n % 8 or left.shape[1] % 16 or task.num_warps % 4:
        raise EmulationError(f"no warpgroup_mma of {m} x {n} x {left.shape[1]} by {task.num_warps} warps")
    data = left @ right
    if bool(use_acc):
        data = data + before.data
    # a write to an operand before the operation retires raises, so the values can be read now
    operation = Matmul([x for x in (a, b) if isinstance(x, SharedView)])
    operation.memory.start(operation)
    task.matmuls.append(operation)
    result = Value(data, tl.float32)
    if is_async:
        task.program.point()
        return Accumulator(result, operation)
    _retire(task, 0)
    return result


def _retire(task, outstanding):
    done = task.matmuls[: max(0, len(task.matmuls) - outstanding)]
    for operation in done:
        operation.memory.mark_read(operation, task)
        operation.memory.end(operation)
        operation.retired = True
    del task.matmuls[: len(done)]


def warpgroup_mma_wait(num_outstanding=0, deps=None):
    if deps is None:
        raise ValueError("warpgroup_mma_wait deps must be given")
    task = current()
    task.program.point()
    _retire(task, num_outstanding)
    results = tuple(_settled(dep) for dep in deps)
    return results[0] if len(results) == 1 else results


def _settled(dep):
    if isinstance(dep, Accumulator) and (dep._operation is None or dep._operation.retired):
        return dep._value
    return dep
