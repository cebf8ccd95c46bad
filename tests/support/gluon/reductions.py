"""Reductions and scans along an axis of a tensor."""

from __future__ import annotations

import numpy as np
import triton.language as tl

from tests.support.gluon.operations import expand_dims, ravel
from tests.support.gluon.values import Value, cast, rounded


def cumsum(input, axis=0, reverse=False, dtype=None):
    flip = slice(None, None, -1 if reverse else 1)
    moved = np.moveaxis(input.data, axis, 0)[flip]
    return rounded(np.moveaxis(np.cumsum(moved, 0, dtype=moved.dtype)[flip], 0, axis), input.dtype)


def _reduced(input, axis, keep_dims, function):
    if not input.shape:
        return input
    if axis is None and keep_dims:
        axis = tuple(range(len(input.shape)))
    return rounded(function(input.data, axis=axis, keepdims=keep_dims), input.dtype)


def _extreme(function, index):
    def apply(input, axis=None, return_indices=False, return_indices_tie_break_left=True, keep_dims=False):
        if input.dtype.is_bf16():
            input = cast(input, tl.float32)
        if return_indices:
            where = Value(index(input.data, axis=axis, keepdims=keep_dims).astype(np.int32), tl.int32)
            return _reduced(input, axis, keep_dims, function), where
        if input.dtype.primitive_bitwidth < 32:
            input = cast(input, tl.float32 if input.dtype.is_floating() else tl.int32)
        return _reduced(input, axis, keep_dims, function)

    return apply


reduce_max, reduce_min = _extreme(np.fmax.reduce, np.argmax), _extreme(np.fmin.reduce, np.argmin)


def argmax(input, axis, tie_break_left=True, keep_dims=False):
    return reduce_max(input, axis, return_indices=True, keep_dims=keep_dims)[1]


def argmin(input, axis, tie_break_left=True, keep_dims=False):
    return reduce_min(input, axis, return_indices=True, keep_dims=keep_dims)[1]


def reduce_sum(input, axis=None, keep_dims=False, dtype=None):
    if dtype is None and input.dtype.is_int() and input.dtype.int_bitwidth < 32:
        dtype = tl.int32 if input.dtype.is_int_signed() else tl.uint32
    input = input if dtype is None else cast(input, dtype)
    return _reduced(input, axis, keep_dims, lambda x, **how: np.add.reduce(x, dtype=x.dtype, **how))


def xor_sum(input, axis=None, keep_dims=False):
    return _reduced(input, axis, keep_dims, np.bitwise_xor.reduce)


def reduce_or(input, axis=None, keep_dims=False):
    return _reduced(input, axis, keep_dims, np.bitwise_or.reduce)


def reduce(input, axis, combine_fn, keep_dims=False):
    """A reduction with the kernel's own function."""
    inputs = input if isinstance(input, tuple) else (input,)
    if axis is None:
        inputs, axis = tuple(ravel(x) for x in inputs), 0
    total, *rest = ([x.like(np.take(x.data, i, axis)) for x in inputs] for i in range(inputs[0].shape[axis]))
    for item in rest:
        result = combine_fn(*total, *item)
        total = list(result) if isinstance(result, tuple) else [result]
    if keep_dims:
        total = [expand_dims(x, axis) for x in total]
    return tuple(total) if isinstance(input, tuple) else total[0]


for _name in ("argmax", "argmin", "reduce", "xor_sum", "cumsum"):
    setattr(Value, _name, globals()[_name])
Value.max, Value.min, Value.sum = reduce_max, reduce_min, reduce_sum
