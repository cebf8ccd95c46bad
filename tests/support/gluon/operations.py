"""Functions of triton.language and gluon.language on values: elementwise, on shapes, and about the program."""

from __future__ import annotations

import functools
import math

import numpy as np
import triton.language as tl

from tests.support.gluon.schedule import current
from tests.support.gluon.values import (
    OPERATORS,
    EmulationError,
    Value,
    as_int,
    cast,
    check_ranks,
    numpy_dtype,
    promote,
    rounded,
    scalar,
    to_tensor,
)


def _shape(shape):
    return tuple(as_int(n) for n in (shape if isinstance(shape, (tuple, list)) else (shape,)))


def arange(start, end, layout=None):
    if not isinstance(start, int) or not isinstance(end, int):
        raise EmulationError("the bounds of arange are constants")
    if end <= start or (end - start) & (end - start - 1):
        raise EmulationError(f"arange({start}, {end}): the length is a power of 2")
    return Value(np.arange(start, end, dtype=np.int32), tl.int32)


def full(shape, value, dtype, layout=None):
    value = cast(value, dtype) if isinstance(value, Value) else scalar(value, dtype)
    return value.like(np.full(_shape(shape), value.data))


def zeros(shape, dtype, layout=None):
    return full(shape, 0, dtype)


def full_like(input, value, shape=None, dtype=None, layout=None):
    return full(input.shape if shape is None else shape, value, dtype or input.dtype)


def zeros_like(input, shape=None, dtype=None, layout=None):
    return full_like(input, 0, shape, dtype)


def where(condition, x, y):
    condition = cast(condition, tl.int1)
    if getattr(x, "dtype", tl.void).is_ptr():
        if x.memory is not y.memory:
            raise NotImplementedError("where of pointers into two tensors")
        return x.like(np.where(condition.data, x.data, y.data))
    x, y, _ = promote(x, y)
    check_ranks(condition, x, y)
    return x.like(np.where(condition.data, x.data, y.data))


def _widened(x):
    """Convert a number to a tensor, and bfloat16 to float32."""
    x = to_tensor(x)
    return cast(x, tl.float32) if x.dtype.is_bf16() else x


def _binary(function, propagating=None):
    def apply(x, y, propagate_nan=tl.PropagateNan.NONE, **_):
        x, y, dtype = promote(_widened(x), _widened(y))
        chosen = propagating if propagate_nan == tl.PropagateNan.ALL else function
        return rounded(chosen(x.data, y.data), dtype)

    return apply


minimum, maximum = _binary(np.fmin, np.minimum), _binary(np.fmax, np.maximum)


def clamp(x, min, max, propagate_nan=tl.PropagateNan.NONE):
    return minimum(maximum(x, min, propagate_nan), max, propagate_nan)


def _of_constants(function, python):
    """Python's own min and max, which keep constants constant."""

    def apply(*args):
        return functools.reduce(function, args) if any(isinstance(x, Value) for x in args) else python(*args)

    return apply


builtin_min, builtin_max = _of_constants(minimum, min), _of_constants(maximum, max)


def _operator(name):
    def apply(x, y, sanitize_overflow=True):
        return OPERATORS[name](x, y)

    return apply


add, sub, mul = _operator("add"), _operator("sub"), _operator("mul")


def fdiv(x, y, ieee_rounding=False):
    return OPERATORS["truediv"](x, y)


div_rn = fdiv


def cdiv(x, div):
    if not isinstance(x, Value) and not isinstance(div, Value):
        return -(-x // div)
    return (x + div - 1) // div


def _unary(function):
    def apply(x):
        x = to_tensor(x)
        if x.dtype not in (tl.float32, tl.float64):
            raise TypeError(f"{function.__name__} is for fp32 and fp64, not {x.dtype}")
        return rounded(function(x.data), x.dtype)

    return apply


exp, exp2, log, log2 = _unary(np.exp), _unary(np.exp2), _unary(np.log), _unary(np.log2)
sin, cos, floor, ceil = _unary(np.sin), _unary(np.cos), _unary(np.floor), _unary(np.ceil)
sqrt = sqrt_rn = _unary(np.sqrt)
rsqrt, erf = _unary(lambda x: 1 / np.sqrt(x)), _unary(np.vectorize(math.erf, otypes=[np.float64]))


def absolute(x):
    return abs(to_tensor(x))


def fma(x, y, z):
    x, y, z = to_tensor(x), to_tensor(y), to_tensor(z)
    x, y, _ = promote(x, y)
    z, x, _ = promote(z, x)
    z, y, dtype = promote(z, y)
    wide = np.float64 if dtype.is_floating() else numpy_dtype(dtype)
    return rounded(x.data.astype(wide) * y.data.astype(wide) + z.data.astype(wide), dtype)


def umulhi(x, y):
    x, y, dtype = promote(to_tensor(x), to_tensor(y))
    if dtype.name not in ("int32", "uint32", "int64", "uint64"):
        raise TypeError(f"umulhi of {dtype}")
    bits = dtype.int_bitwidth
    if bits == 32:
        high = (x.data.astype(np.uint32).astype(np.uint64) * y.data.astype(np.uint32).astype(np.uint64)) >> np.uint64(
            32
        )
        return Value(np.asarray(high).astype(np.uint32).astype(numpy_dtype(dtype)), dtype)
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    (a1, a0), (b1, b0) = ((v >> half, v & low) for v in (x.data.astype(np.uint64), y.data.astype(np.uint64)))
    middle = a1 * b0 + ((a0 * b0) >> half)
    high = a1 * b1 + (middle >> half) + ((a0 * b1 + (middle & low)) >> half)
    return Value(np.asarray(high).astype(numpy_dtype(dtype)), dtype)


def reshape(input, *shape, can_reorder=False):
    shape = _shape(shape[0] if len(shape) == 1 else shape)
    return input.like(input.data.reshape(shape))


def permute(input, *dims):
    dims = _shape(dims[0] if len(dims) == 1 else dims)
    return input.like(input.data.transpose(dims))


def trans(input, *dims):
    return permute(input, *dims) if dims else input.like(np.swapaxes(input.data, -1, -2))


def dot(input, other, acc=None, input_precision=None, **_):
    """The product in fp32, for any ``input_precision``."""
    if input.dtype != other.dtype:
        raise TypeError(f"a dot of {input.dtype} and {other.dtype}")
    product = Value(input.data.astype(np.float32) @ other.data.astype(np.float32), tl.float32)
    return product if acc is None else acc + product


def expand_dims(input, axis):
    axes = _shape(axis)
    return input.like(np.expand_dims(input.data, axes))


def broadcast_to(input, *shape):
    return input.like(np.broadcast_to(input.data, _shape(shape[0] if len(shape) == 1 else shape)))


def broadcast(input, other):
    check_ranks(input, other)
    shape = np.broadcast_shapes(input.shape, other.shape)
    return broadcast_to(input, shape), broadcast_to(other, shape)


def ravel(x, can_reorder=False):
    return x.like(x.data.reshape(-1))


def join(a, b):
    a, b = to_tensor(a), to_tensor(b)
    if a.dtype != b.dtype:
        raise TypeError(f"join of {a.dtype} and {b.dtype}")
    a, b = broadcast(a, b)
    return a.like(np.stack([a.data, b.data], -1))


def split(a):
    if a.shape[-1] != 2:
        raise EmulationError(f"split of {list(a.shape)}: the last dimension is 2")
    return a.like(a.data[..., 0]), a.like(a.data[..., 1])


def convert_layout(value, layout, assert_trivial=False):
    if not isinstance(value, Value):
        raise TypeError(f"convert_layout of {value}")
    return value


def set_auto_layout(value, layout):
    return value


def gather(src, index, axis):
    return src.like(np.take_along_axis(src.data, index.data.astype(np.int64), axis))


def dot_fma(a, b, acc):
    return rounded(a.data.astype(np.float32) @ b.data.astype(np.float32) + acc.data, acc.dtype)


def inline_asm_elementwise(asm, constraints, args, dtype, is_pure=True, pack=1):
    """Run the Python function that the caller of ``launch`` gave for this assembly."""
    functions = {_spaces(text): function for text, function in current().program.launch.assembly.items()}
    if _spaces(asm) not in functions:
        raise NotImplementedError(f"launch(..., assembly={{...}}) has no Python function for: {asm}")
    values = [to_tensor(x) for x in (args if isinstance(args, (tuple, list)) else [args])]
    check_ranks(*values)
    data = np.broadcast_arrays(*(value.data for value in values)) if values else []
    results, several = functions[_spaces(asm)](*data), isinstance(dtype, (tuple, list))
    dtypes = dtype if several else [dtype]
    results = [rounded(r, kind) for r, kind in zip(results if several else [results], dtypes, strict=True)]
    return tuple(results) if several else results[0]


def _spaces(text):
    return " ".join(text.split())


def program_id(axis):
    return scalar(current().program.ids[axis], tl.int32)


def num_programs(axis):
    return scalar(current().program.launch.grid[axis], tl.int32)


def num_warps():
    return current().num_warps


def num_ctas():
    return 1


def barrier(*, cluster=False):
    pass


def same(input, *_):
    """Compiler hints, which return their input."""
    return input


def ignored(*_, **__):
    pass


def static_assert(cond, msg=""):
    if not cond:
        raise AssertionError(f"static_assert: {msg}")


def device_assert(cond, msg="", mask=None):
    cond = cast(to_tensor(cond), tl.int1).data
    if not np.all(cond | ~cast(to_tensor(True if mask is None else mask), tl.int1).data):
        raise AssertionError(f"device_assert: {msg}")


def runtime_range(*bounds, **_):
    """A loop whose counter is a run-time integer, also for constant bounds."""
    start, stop, step = {1: (0, *bounds, 1), 2: (*bounds, 1), 3: bounds}[len(bounds)]
    wide = any(to_tensor(bound).dtype.name == "int64" for bound in (start, stop, step))
    for i in range(as_int(start), as_int(stop), as_int(step)):
        yield scalar(i, tl.int64 if wide else tl.int32)


def static_range(*bounds):
    if any(isinstance(bound, Value) for bound in bounds):
        raise EmulationError("the bounds of static_range are constants")
    return range(*bounds)


_MEMBERS = "reshape permute trans expand_dims broadcast_to split ravel gather exp exp2 log log2 sqrt sin cos floor ceil"
for _name in _MEMBERS.split():
    setattr(Value, _name, globals()[_name])
Value.abs, Value.cast, Value.view = absolute, cast, reshape
