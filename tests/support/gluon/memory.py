"""Shared memory: views of one buffer, and for each word the last accesses and the operations in flight."""

from __future__ import annotations

import ast
import functools
import linecache

import numpy as np
import triton.language as tl

from tests.support.gluon.schedule import current, kernel_frames, site
from tests.support.gluon.values import (
    EmulationError,
    Value,
    as_int,
    cast,
    from_memory,
    junk,
    memory_dtype,
    to_memory,
    to_tensor,
)

CAPACITY = 227 * 1024
WORD = 4  # bytes per record of accesses


class Race(EmulationError):
    """An access to shared memory that is not ordered against another."""


class MissingFence(Race):
    """The async proxy accesses memory that the generic proxy wrote, without a fence_async_shared in between."""


class SharedMemory:
    """The shared memory of one program.

    It records for each word: the last write as (component, time) of a vector clock; the last read of every partition;
    how many copies are writing it and how many asynchronous operations are reading it; and the partition (plus one)
    whose write has not been fenced.
    """

    def __init__(self):
        self.bytes = np.full(CAPACITY, 0xFF, np.uint8)
        self.used = 0
        words = CAPACITY // WORD
        self.writer, self.written = np.zeros(words, np.int16), np.zeros(words, np.int32)
        self.write_site, self.unfenced = np.zeros(words, np.int32), np.zeros(words, np.int8)
        self.loading, self.reading = np.zeros(words, np.int16), np.zeros(words, np.int16)
        self.reads = {}  # partition -> (times, sites)
        self.sites, self.words = [], {}
        self.operations = []  # asynchronous operations in flight, for error messages

    def allocate(self, dtype, shape, layout, name):
        kind = memory_dtype(dtype)
        size = int(np.prod(shape)) * kind.itemsize
        start = -(-self.used // 128) * 128 if size >= 128 else -(-self.used // 8) * 8
        if start + size > CAPACITY:
            raise EmulationError(f"{name} needs {size} bytes of shared memory; of {CAPACITY} {start} are in use")
        self.used = start + size
        array = self.bytes[start : start + size].view(kind).reshape(shape)
        array[...] = to_memory(junk(shape, dtype), dtype)
        return SharedView(self, array, dtype, layout, name, start)

    def site(self, text):
        self.sites.append(text)
        return len(self.sites) - 1

    def start(self, operation):
        """Mark the regions of an asynchronous operation as in use."""
        self.operations.append(operation)
        for words in operation.regions:
            self._users(operation)[words] += 1
        return operation

    def end(self, operation):
        self.operations.remove(operation)
        for words in operation.regions:
            self._users(operation)[words] -= 1

    def _users(self, operation):
        return self.loading if operation.kind == "TMA load" else self.reading

    def _culprit(self, words, *kinds):
        """The operation that uses these words."""
        for operation in self.operations:
            shared = (len(np.intersect1d(_listed(words), _listed(region))) for region in operation.regions)
            if operation.kind in kinds and any(shared):
                return f"{operation.kind} ({operation.site})"
        raise AssertionError("a count without an operation")

    def check_read(self, view, what):
        """Raise Race unless all writes of the view happen before this partition's read."""
        words, task = view.words(), current()
        if self.loading[words].any():
            raise Race(f"{what} reads {view.name} while a {self._culprit(words, 'TMA load')} still writes it")
        self._check_written(words, task, f"{what} reads {view.name}")

    def check_fenced(self, view, what):
        """Raise MissingFence if a write of the view through the generic proxy has not been fenced."""
        words = view.words()
        if self.unfenced[words].any():
            which = _listed(words)[np.flatnonzero(self.unfenced[words])[0]]
            raise MissingFence(
                f"no fence_async_shared between {what} of {view.name} and the store to it ({self._site(which)})"
            )

    def check_write(self, view, what):
        words, task = view.words(), current()
        if self.reading[words].any():
            culprit = self._culprit(words, "warpgroup_mma", "TMA store")
            raise Race(f"{view.name} is overwritten by {what} while a {culprit} still reads it")
        if self.loading[words].any():
            raise Race(f"{what} writes {view.name} while a {self._culprit(words, 'TMA load')} still writes it")
        self._check_written(words, task, f"{what} overwrites {view.name}")
        for reader, (times, sites) in self.reads.items():
            if reader is not task and times[words].max() > task.clock[reader.component]:
                late = _listed(words)[np.argmax(times[words])]
                raise Race(
                    f"{view.name} is overwritten by {what} of {task.name}, which has waited for no barrier that says "
                    f"that {reader.name} has read it ({self.sites[sites[late]]})"
                )

    def _check_written(self, words, task, what):
        late = self.written[words] > task.clock[self.writer[words]]
        if late.any():
            which = _listed(words)[np.flatnonzero(late)[0]]
            raise Race(
                f"{what} in {task.name}, which has waited for no barrier that says that it was written "
                f"({self._site(which)})"
            )

    def _site(self, word):
        return self.sites[self.write_site[word]]

    def mark_read(self, operation, task):
        """Record that the operation has read its regions, at the current time of this partition."""
        if task not in self.reads:
            self.reads[task] = np.zeros(CAPACITY // WORD, np.int32), np.zeros(CAPACITY // WORD, np.int32)
        times, sites = self.reads[task]
        where = self.site(f"{operation.kind} in {operation.site}")
        for words in operation.regions:
            times[words], sites[words] = task.clock[task.component], where

    def mark_written(self, words, component, time, where):
        self.writer[words], self.written[words], self.write_site[words] = component, time, self.site(where)

    def fence(self, task):
        self.unfenced[self.unfenced == task.index + 1] = 0


def _listed(words):
    return np.arange(words.start, words.stop) if isinstance(words, slice) else words


class _Load:
    """A read through the generic proxy, which completes at once."""

    kind = "load"

    def __init__(self, view):
        self.regions, self.site = [view.words()], site()


class SharedView:
    """A shared-memory descriptor, as a numpy view of the buffer."""

    def __init__(self, memory, array, dtype, layout, name, address, path=""):
        self._memory, self._array, self._path = memory, array, path
        self.dtype, self.layout, self.address, self._name = dtype, layout, address, name

    def _view(self, array, path="", dtype=None, layout=None):
        address = array.__array_interface__["data"][0] - self._memory.bytes.__array_interface__["data"][0]
        dtype, layout = dtype or self.dtype, layout or self.layout
        return SharedView(self._memory, array, dtype, layout, self._name, address, self._path + path)

    @property
    def name(self):
        return self._name + self._path

    @property
    def shape(self):
        return self._array.shape

    @property
    def rank(self):
        return self._array.ndim

    @property
    def numel(self):
        return self._array.size

    @property
    def nbytes(self):
        return self._array.nbytes

    @property
    def type(self):
        return self

    element_ty = property(lambda self: self.dtype)

    def __repr__(self):
        return f"{self.name} {list(self.shape)} {self.dtype}"

    def index(self, index):
        if to_tensor(index).dtype != tl.int32:
            raise TypeError(f"an index of shared memory is int32, not {index}")
        index = as_int(index)
        if not 0 <= index < self.shape[0]:
            raise IndexError(f"index {index} of {self}")
        return self._view(self._array[index], f"[{index}]")

    def slice(self, start, length, dim=0):
        if any(isinstance(x, Value) for x in (start, length, dim)):
            raise EmulationError(f"a slice of {self} is constant; index takes run-time values")
        if start < 0 or start + length > self.shape[dim]:
            raise IndexError(f"slice {start}:{start + length} of dimension {dim} of {self}")
        where = (slice(None),) * dim + (slice(start, start + length),)
        return self._view(self._array[where], f"[{':, ' * dim}{start}:{start + length}]")

    def permute(self, order):
        return self._view(self._array.transpose([as_int(i) for i in order]))

    def reshape(self, shape):
        array = self._array.view()
        array.shape = tuple(as_int(n) for n in shape)  # raises if numpy would have to copy
        return self._view(array)

    def reinterpret(self, dtype, shape, layout):
        if not self._array.flags.c_contiguous:
            raise EmulationError(f"reinterpret of {self}, which is not contiguous")
        kind = memory_dtype(dtype)
        size = int(np.prod(shape)) * kind.itemsize
        if size > self.nbytes:
            raise EmulationError(f"reinterpret of {self}, {self.nbytes} bytes, as {size} bytes")
        raw = self._memory.bytes[self.address : self.address + size]
        return self._view(raw.view(kind).reshape(shape), dtype=dtype, layout=layout)

    def words(self):
        """The words of the view, as a slice or as indices."""
        key = self.address, self._array.shape, self._array.strides, self._array.itemsize
        found = self._memory.words.get(key)
        if found is None:
            first = np.full((1,) * self._array.ndim, self.address)
            for axis, (size, stride) in enumerate(zip(self._array.shape, self._array.strides, strict=True)):
                shape = [size if i == axis else 1 for i in range(self._array.ndim)]
                first = first + (np.arange(size) * stride).reshape(shape)
            last = first + self._array.itemsize - 1
            found = np.unique(np.concatenate([first.ravel() // WORD, last.ravel() // WORD]))
            if len(found) == found[-1] - found[0] + 1:
                found = slice(int(found[0]), int(found[-1]) + 1)
            self._memory.words[key] = found
        return found

    def raw(self):
        return self._array

    def read(self):
        return from_memory(self._array, self.dtype)

    def load(self, layout=None):
        task = current()
        task.program.point()
        self._memory.check_read(self, "load")
        self._memory.mark_read(_Load(self), task)
        return Value(self.read(), self.dtype)

    def store(self, value):
        task = current()
        task.program.point()
        if tuple(value.shape) != tuple(self.shape):
            raise EmulationError(f"store of {list(value.shape)} to {self}")
        if value.dtype != self.dtype:
            raise TypeError(f"store of {value.dtype} to {self}")
        self.put(value, task)

    def put(self, value, task):
        memory, words = self._memory, self.words()
        memory.check_write(self, "store")
        self._array[...] = to_memory(value.data, self.dtype)
        memory.mark_written(words, task.component, task.clock[task.component], f"store in {site()}")
        memory.unfenced[words] = task.index + 1

    def gather(self, indices, axis):
        everything = self.load()
        return Value(np.take_along_axis(everything.data, indices.data.astype(np.int64), axis), self.dtype)

    def _keep_alive(self):
        pass


def allocate_shared_memory(element_ty, shape, layout, value=None):
    task = current()
    names = [_assigned_name(frame.f_code.co_filename, frame.f_lineno) for frame in kernel_frames()]
    name = ".".join(filter(None, reversed(names))) or f"memory allocated in {site()}"
    shape = [as_int(n) for n in shape]
    view = task.program.shared.allocate(element_ty, shape, layout, name)
    if value is not None:
        view.put(cast(value, element_ty), task)
    return view


def allocate_mbarrier(batch=None, two_ctas=False):
    return allocate_shared_memory(tl.int64, [1] if batch is None else [batch, 1], None)


@functools.cache
def _assigned_name(filename, line):
    """Name of the variable that the statement at this line assigns."""
    for node in ast.walk(_parsed(filename)):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.lineno <= line <= node.end_lineno:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            return ast.unparse(targets[0])
    return None


@functools.cache
def _parsed(filename):
    try:
        return ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return ast.Module([], [])
