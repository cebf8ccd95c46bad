"""Global memory: bounds-checked pointers into CPU tensors, and TMA descriptors."""

from __future__ import annotations

import numpy as np
import torch
import triton.language as tl

from tests.support.gluon.schedule import current, site
from tests.support.gluon.values import (
    EmulationError,
    Value,
    cast,
    check_ranks,
    from_memory,
    junk,
    memory_dtype,
    numpy_dtype,
    round_bf16,
    scalar,
    to_memory,
    to_tensor,
)

_DTYPES = {
    torch.bool: tl.int1,
    torch.int8: tl.int8,
    torch.int16: tl.int16,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
    torch.uint8: tl.uint8,
    torch.uint16: tl.uint16,
    torch.uint32: tl.uint32,
    torch.uint64: tl.uint64,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


class OutOfBounds(EmulationError, IndexError):
    """An access outside the tensor."""


class GlobalMemory:
    """The bytes of a tensor's storage; pointers may access those from the tensor's first to its last element."""

    def __init__(self, tensor, name):
        if tensor.device.type != "cpu":
            raise EmulationError(f"{name} is on {tensor.device}: the emulator works on CPU tensors")
        self.name, self.dtype = name, _DTYPES[tensor.dtype]
        size = tensor.element_size()
        self.bytes = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
        self.base = tensor.storage_offset() * size
        last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        self.extent = (last + 1) * size if tensor.numel() else 0

    def typed(self, dtype):
        kind = memory_dtype(dtype)
        return self.bytes[: self.bytes.size // kind.itemsize * kind.itemsize].view(kind)

    def elements(self, offsets, dtype):
        """Convert byte offsets from the tensor's first element to indices into ``typed(dtype)``."""
        size = memory_dtype(dtype).itemsize
        outside = (offsets < 0) | (offsets + size > self.extent)
        if np.any(outside):
            first = int(np.asarray(offsets)[outside].flat[0])
            raise OutOfBounds(
                f"{np.count_nonzero(outside)} of {offsets.size} elements lie outside {self.name}, which has "
                f"{self.extent // size} elements of {dtype}; the first is element {first / size:g} ({site()})"
            )
        if np.any((self.base + offsets) % size):
            raise EmulationError(f"misaligned access to {self.name} as {dtype}")
        return (self.base + offsets) // size


class Pointer(Value):
    """Byte offsets from the first element of a tensor."""

    __slots__ = ("memory",)

    def __init__(self, memory, data, dtype):
        super().__init__(np.asarray(data, np.int64), dtype)
        self.memory = memory

    def like(self, data):
        return Pointer(self.memory, data, self.dtype)

    def moved(self, offset):
        if not offset.dtype.is_int():
            raise TypeError(f"a pointer moves by integers, not {offset.dtype}")
        check_ranks(self, offset)
        size = memory_dtype(self.dtype.element_ty).itemsize
        return self.like(self.data + offset.data.astype(np.int64) * size)

    def retyped(self, dtype):
        if not dtype.is_ptr():
            raise NotImplementedError(f"a pointer as {dtype}")
        return Pointer(self.memory, self.data, dtype)


def pointer(tensor, name):
    memory = GlobalMemory(tensor, name)
    return Pointer(memory, 0, tl.pointer_type(memory.dtype))


def _target(pointer):
    if not isinstance(pointer, Pointer):
        raise TypeError(f"an access through {pointer}, which is no pointer")
    return pointer.memory, pointer.dtype.element_ty


def _masked(pointer, mask):
    """The pointer's offsets and the mask, broadcast to the shape of the access."""
    if mask is None:
        return pointer.data, np.ones(pointer.shape, np.bool_)
    mask = cast(to_tensor(mask), tl.int1)
    check_ranks(pointer, mask)
    return np.broadcast_arrays(pointer.data, mask.data)


def load(pointer, mask=None, other=None, **_):
    memory, dtype = _target(pointer)
    offsets, mask = _masked(pointer, mask)
    if other is None:
        result = np.array(junk(offsets.shape, dtype))  # undefined values
    else:
        result = np.broadcast_to(cast(_number(other, dtype), dtype).data, offsets.shape).copy()
    places = memory.elements(offsets[mask], dtype)
    result[mask] = from_memory(memory.typed(dtype)[places], dtype)
    return Value(result, dtype)


def _number(x, dtype):
    return x if isinstance(x, Value) else scalar(x, dtype)


def store(pointer, value, mask=None, **_):
    memory, dtype = _target(pointer)
    offsets, mask = _masked(pointer, mask)
    value = cast(_number(value, dtype), dtype)
    check_ranks(pointer, value)
    data = np.broadcast_to(value.data, offsets.shape)
    memory.typed(dtype)[memory.elements(offsets[mask], dtype)] = to_memory(data[mask], dtype)


def _atomic(update):
    def apply(pointer, val, mask=None, sem=None, scope=None):
        current().program.point()
        memory, dtype = _target(pointer)
        offsets, mask = _masked(pointer, mask)
        data = np.broadcast_to(cast(_number(val, dtype), dtype).data, offsets.shape)
        before = junk(offsets.shape, dtype)
        cells = memory.typed(dtype)
        for index, place in zip(np.argwhere(mask), memory.elements(offsets[mask], dtype), strict=True):
            index, place = tuple(index), slice(place, place + 1)
            before[index] = from_memory(cells[place], dtype)[0]
            after = np.asarray(update(before[index], data[index]))
            cells[place] = to_memory(after.reshape(1).astype(numpy_dtype(dtype)), dtype)
        return Value(before, dtype)

    return apply


atomic_add = _atomic(np.add)
atomic_max = _atomic(np.maximum)
atomic_min = _atomic(np.minimum)
atomic_and = _atomic(np.bitwise_and)
atomic_or = _atomic(np.bitwise_or)
atomic_xor = _atomic(np.bitwise_xor)
atomic_xchg = _atomic(lambda _, new: new)


def atomic_cas(pointer, cmp, val, sem=None, scope=None):
    dtype = _target(pointer)[1]
    expected = cast(_number(cmp, dtype), dtype).data
    return _atomic(lambda old, new: np.where(old == expected, new, old))(pointer, val)


class Descriptor:
    """A TMA descriptor; like the hardware, it computes addresses modulo 2**64."""

    def __init__(self, host, name):
        self.memory, self.name, self.layout = GlobalMemory(host.base, name), name, host.layout
        self.padding = host.padding
        self.sizes = [int(n) for n in host.shape]
        self.steps = [int(n) for n in host.strides]
        self.dtype = self.memory.dtype
        self.block_shape = [int(n) for n in host.block_shape]
        self.block_type = tl.block_type(self.dtype, self.block_shape)
        self.shape = tuple(scalar(n, tl.int32) for n in self.sizes)
        self.strides = tuple(scalar(n if n < 2**63 else n - 2**64, tl.int64) for n in self.steps)

    @property
    def nbytes_per_cta(self):
        return self.block_type.nbytes

    def box(self, coord):
        """Indices of the elements of the block at ``coord``, and which of them are inside the shape."""
        if len(coord) != len(self.sizes):
            raise EmulationError(f"{len(coord)} coordinates for {self.name}, which has {len(self.sizes)} dimensions")
        itemsize = memory_dtype(self.dtype).itemsize
        if coord[-1] * itemsize % 16:
            raise EmulationError(f"{self.name}: the last coordinate, {coord[-1]}, is not a multiple of 16 bytes")
        rank = len(coord)
        offset, inside = np.zeros((1,) * rank, np.uint64), np.ones((1,) * rank, np.bool_)
        for axis, (start, size, stride, block) in enumerate(
            zip(coord, self.sizes, self.steps, self.block_shape, strict=True)
        ):
            shape = [block if i == axis else 1 for i in range(rank)]
            position = (start + np.arange(block, dtype=np.int64)).reshape(shape)
            inside = inside & (position >= 0) & (position < size)
            offset = offset + position.view(np.uint64) * np.uint64(stride * itemsize % 2**64)
        return self._places(offset.view(np.int64)[inside], coord), inside

    def _places(self, offsets, coord):
        itemsize = memory_dtype(self.dtype).itemsize
        places = self.memory.base + offsets
        outside = (places < 0) | (places + itemsize > self.memory.bytes.size)
        if np.any(outside):
            raise OutOfBounds(
                f"{np.count_nonzero(outside)} elements of the block of {self.name} at {list(coord)} lie inside its "
                f"shape but outside its tensor; the first is {offsets[outside][0] // itemsize} elements from the base "
                f"({site()})"
            )
        return places // itemsize

    def read(self, coord):
        """The block in its memory format."""
        places, inside = self.box(coord)
        fill = np.nan if self.padding == "nan" else 0
        block = to_memory(np.full(self.block_shape, fill).astype(numpy_dtype(self.dtype)), self.dtype)
        block[inside] = self.memory.typed(self.dtype)[places]
        return block

    def write(self, coord, block, add=False):
        places, inside = self.box(coord)
        cells, new = self.memory.typed(self.dtype), block.reshape(self.block_shape)[inside]
        if add:
            total = from_memory(cells[places], self.dtype) + from_memory(new, self.dtype)
            new = to_memory(round_bf16(total) if self.dtype.is_bf16() else total, self.dtype)
        cells[places] = new
