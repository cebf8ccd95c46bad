"""Values of a device function: numpy arrays with Triton's dtypes, promotion and wrap-around."""

from __future__ import annotations

import functools
import math
import operator

import numpy as np
import triton.experimental.gluon.language as gl
import triton.language as tl
from triton.language.semantic import TritonSemantic

# dtype -> (numpy dtype of the values, numpy dtype in memory); bfloat16 is computed as rounded float32
_NUMPY = {
    "int1": (np.bool_, np.uint8),
    "bf16": (np.float32, np.uint16),
    "fp16": (np.float16, np.float16),
    "fp32": (np.float32, np.float32),
    "fp64": (np.float64, np.float64),
    **{name: (getattr(np, name),) * 2 for name in ("int8", "int16", "int32", "int64")},
    **{name: (getattr(np, name),) * 2 for name in ("uint8", "uint16", "uint32", "uint64")},
}
_RULES = TritonSemantic(None)  # its promotion rules need no builder


class EmulationError(RuntimeError):
    """The kernel is wrong, or uses a feature that the emulator lacks."""


def numpy_dtype(dtype):
    return _NUMPY[_known(dtype)][0]


def memory_dtype(dtype):
    return np.dtype(_NUMPY[_known(dtype)][1])


def _known(dtype):
    if dtype.name not in _NUMPY:
        raise NotImplementedError(f"the emulator has no values of {dtype}")
    return dtype.name


def round_bf16(x):
    """float32 to the nearest bfloat16 (ties to even), as float32."""
    x = np.asarray(x, np.float32)
    bits = x.view(np.uint32)
    even = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + np.uint32(0x7FFF) + even) & np.uint32(0xFFFF0000)).view(np.float32)
    return np.where(np.isnan(x), x, rounded)


def to_memory(data, dtype):
    """Convert values to their memory format."""
    if dtype.is_bf16():
        return (np.ascontiguousarray(round_bf16(data)).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return data.astype(memory_dtype(dtype))


def from_memory(data, dtype):
    if dtype.is_bf16():
        return (data.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return data.astype(numpy_dtype(dtype))


def junk(shape, dtype):
    """Contents of uninitialised memory: NaN, or a number that is easy to recognise."""
    fill = np.nan if dtype.is_floating() else True if dtype.is_int1() else 0x5A5A5A5A5A5A5A5A
    return np.full(shape, np.asarray(fill).astype(numpy_dtype(dtype)))


class Value:
    """A scalar (shape ()) or tensor; immutable."""

    __slots__ = ("data", "dtype")
    __hash__ = None

    def __init__(self, data, dtype):
        data = np.asarray(data)
        expected = np.int64 if dtype.is_ptr() else numpy_dtype(dtype)
        assert data.dtype == expected, f"{data.dtype} for {dtype}"
        self.data, self.dtype = data, dtype

    def like(self, data):
        """A value of the same dtype with other data."""
        return Value(data, self.dtype)

    @property
    def shape(self):
        return self.data.shape

    @property
    def numel(self):
        return self.data.size

    @property
    def type(self):
        if not self.shape:
            return self.dtype
        block = tl.block_type(self.dtype, list(self.shape))
        block.layout = gl.AutoLayout()  # some kernels derive a layout from it
        return block

    @property
    def T(self):
        return self.like(self.data.T)

    def __repr__(self):
        return f"Value({self.data}, {self.dtype})"

    def __bool__(self):
        if self.shape:
            raise EmulationError(f"the truth of a tensor {list(self.shape)}: use &, | and ~, or reduce it")
        return bool(self.data)

    def __getitem__(self, index):
        index = index if isinstance(index, tuple) else (index,)
        if any(i is not None and i != slice(None) for i in index):
            raise EmulationError("a tensor is indexed with : and None only")
        if sum(i is not None for i in index) != len(self.shape):
            raise EmulationError(f"an index of {len(self.shape)} dimensions, {list(self.shape)}, has one : for each")
        return self.like(self.data[index])

    def to(self, dtype, fp_downcast_rounding=None, bitcast=False):
        return cast(self, dtype, fp_downcast_rounding, bitcast)

    def __neg__(self):
        if self.dtype.is_ptr() or self.dtype.is_int1():
            raise TypeError(f"minus {self.dtype}")
        return self.like(-self.data)

    def __pos__(self):
        return self

    def __abs__(self):
        return self.like(np.abs(self.data))

    def __invert__(self):
        if not self.dtype.is_int():
            raise TypeError(f"~ of {self.dtype}")
        return self.like(~self.data)


def number_type(x):
    """The dtype of a Python number."""
    if isinstance(x, bool):
        return tl.int1
    if isinstance(x, float):
        normal = 2**-126 <= abs(x) <= (2 - 2**-23) * 2**127
        return tl.float32 if normal or x == 0 or not math.isfinite(x) else tl.float64
    for dtype in (tl.int32, tl.uint32, tl.int64, tl.uint64):
        if dtype.get_int_min_value() <= x <= dtype.get_int_max_value():
            return dtype
    raise ValueError(f"{x} does not fit 64 bits")


def scalar(x, dtype=None):
    """A Python number with the dtype that Triton gives it."""
    dtype = number_type(x) if dtype is None else dtype
    return Value(np.asarray(x).astype(numpy_dtype(dtype)), dtype)


def to_tensor(x):
    if isinstance(x, Value):
        return x
    if isinstance(x, (bool, int, float)):
        return scalar(x)
    raise TypeError(f"{type(x).__name__} where a tensor or number is expected: {x!r}")


def as_int(x):
    """A run-time or constant integer as a Python int."""
    if isinstance(x, Value):
        if x.shape or not x.dtype.is_int():
            raise EmulationError(f"an integer scalar is expected, not {x}")
        return int(x.data)
    return operator.index(x)


def cast(x, dtype, fp_downcast_rounding=None, bitcast=False):
    x = to_tensor(x)
    if fp_downcast_rounding not in (None, "rtne"):
        raise NotImplementedError(f"rounding {fp_downcast_rounding}")
    if x.dtype == dtype:
        return x
    if x.dtype.is_ptr() or dtype.is_ptr():
        return x.retyped(dtype)
    if bitcast:
        if x.dtype.primitive_bitwidth != dtype.primitive_bitwidth:
            raise ValueError(f"cannot bitcast {x.dtype} to {dtype}")
        bits = np.ascontiguousarray(to_memory(x.data, x.dtype)).reshape(x.shape)
        return Value(from_memory(bits.view(memory_dtype(dtype)), dtype), dtype)
    if dtype.is_bf16():
        return Value(round_bf16(x.data.astype(np.float32)), dtype)
    if dtype.is_int1():
        return Value(x.data != 0, dtype)
    return Value(x.data.astype(numpy_dtype(dtype)), dtype)


@functools.cache
def _promoted(a, a_number, b, b_number, division):
    return _RULES.computation_type_impl(a, a_number, b, b_number, division)


def promote(a, b, division=False):
    """Both operands in Triton's common dtype; a Python number does not widen a tensor."""
    a_number, b_number = not isinstance(a, Value), not isinstance(b, Value)
    left, right = to_tensor(a), to_tensor(b)
    if left.dtype.is_ptr() or right.dtype.is_ptr():
        raise TypeError(f"this operation is not for pointers ({left.dtype} and {right.dtype})")
    dtype = _promoted(left.dtype, a_number, right.dtype, b_number, division)
    for number in (a,) * a_number + (b,) * b_number:
        if dtype.is_int() and not dtype.get_int_min_value() <= number <= dtype.get_int_max_value():
            raise ValueError(f"{number} is out of range for {dtype}")
    left = scalar(a, dtype) if a_number else cast(left, dtype)
    right = scalar(b, dtype) if b_number else cast(right, dtype)
    check_ranks(left, right)
    return left, right, dtype


def check_ranks(*values):
    ranks = {len(value.shape) for value in values if value.shape}
    if len(ranks) > 1:
        raise ValueError(
            f"shapes {[list(value.shape) for value in values]} differ in rank: Gluon does not broadcast them"
        )


def rounded(data, dtype):
    """Round the result of an operation that numpy computed in at least the dtype's precision."""
    data = np.asarray(data)
    return Value(round_bf16(data) if dtype.is_bf16() else data.astype(numpy_dtype(dtype), copy=False), dtype)


def _arithmetic(function):
    def apply(a, b):
        a, b, dtype = promote(a, b)
        return rounded(function(a.data, b.data), dtype)

    return apply


def _add(a, b):
    for pointer, offset in ((a, b), (b, a)):
        if isinstance(pointer, Value) and pointer.dtype.is_ptr():
            return pointer.moved(to_tensor(offset))
    return _sum(a, b)


def _sub(a, b):
    if isinstance(a, Value) and a.dtype.is_ptr():
        return a.moved(-cast(to_tensor(b), tl.int64))
    return _difference(a, b)


_sum, _difference = _arithmetic(np.add), _arithmetic(np.subtract)


def _truediv(a, b):
    a, b, dtype = promote(a, b, division=True)
    dtype = tl.float32 if dtype.is_int() else dtype
    return rounded(cast(a, dtype).data / cast(b, dtype).data, dtype)


def _integer_division(a, b, name):
    a, b, dtype = promote(a, b, division=True)
    if not dtype.is_int():
        raise TypeError(f"{name} of {dtype}")
    if not np.all(b.data):
        raise ZeroDivisionError(f"integer {name} by zero")
    quotient = a.data // b.data
    if dtype.is_int_signed():  # as in C, round towards zero
        quotient = quotient + ((a.data % b.data != 0) & ((a.data < 0) != (b.data < 0)))
    return a, b, np.asarray(quotient).astype(numpy_dtype(dtype)), dtype


def _floordiv(a, b):
    *_, quotient, dtype = _integer_division(a, b, "//")
    return Value(quotient, dtype)


def _mod(a, b):
    left, right, dtype = promote(a, b, division=True)
    if dtype.is_floating():
        return rounded(np.fmod(left.data, right.data), dtype)
    left, right, quotient, dtype = _integer_division(a, b, "%")
    return Value(np.asarray(left.data - quotient * right.data), dtype)


def _bitwise(function):
    def apply(a, b):
        a, b, dtype = promote(a, b)
        if not dtype.is_int():
            raise TypeError(f"a bitwise operation on {dtype}")
        return Value(np.asarray(function(a.data, b.data)), dtype)

    return apply


def _shift(function):
    def apply(a, b):
        a, b, dtype = promote(a, b)
        if not dtype.is_int():
            raise TypeError(f"a shift of {dtype}")
        if np.any(b.data < 0) or np.any(b.data >= dtype.int_bitwidth):
            raise EmulationError(f"a shift of {dtype} by less than 0, or by its width or more")
        return Value(np.asarray(function(a.data, b.data)), dtype)

    return apply


def _comparison(function):
    def apply(a, b):
        if isinstance(a, Value) and a.dtype.is_ptr() and isinstance(b, Value) and b.dtype.is_ptr():
            return Value(np.asarray(function(a.data, b.data)), tl.int1)
        if a is None or b is None:
            return function is operator.ne
        a, b, _ = promote(a, b)
        return Value(np.asarray(function(a.data, b.data)), tl.int1)

    return apply


OPERATORS = {
    "add": _add,
    "sub": _sub,
    "mul": _arithmetic(np.multiply),
    "truediv": _truediv,
    "floordiv": _floordiv,
    "mod": _mod,
    "and": _bitwise(np.bitwise_and),
    "or": _bitwise(np.bitwise_or),
    "xor": _bitwise(np.bitwise_xor),
    "lshift": _shift(np.left_shift),
    "rshift": _shift(np.right_shift),
}
for _name, _function in OPERATORS.items():
    setattr(Value, f"__{_name}__", _function)
    setattr(Value, f"__r{_name}__", lambda a, b, function=_function: function(b, a))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Value, f"__{_name}__", _comparison(getattr(operator, _name)))
