"""TMA descriptors of the tensors, and whether TMA accepts a tensor's strides."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flash_train.attention.kernels.launch_cache import TensorSignature

MOST_ROWS = 1 << 30  #: rows of an entry: coordinates have 32 bits, and a packed entry's rows end here
PACKED_STEP = 1 << 34  #: elements: sum of the strides of a packed tensor's two leading dimensions
TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


def describe(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor of tiles [rows, columns] of x (batch, seqlen, heads, head_dim) or, packed, (total, heads, head_dim).

    TMA reads zeros outside x, and does not write there. In packed calls this also holds outside an entry: two more
    dimensions select the entry's rows (``scheduler.tma_coords``). Their strides add up modulo 2**64 bytes, as in
    ``triton.tools.ragged_tma``.
    """
    return _make_descriptor(x, _fields(tuple(x.shape), x.stride(), x.dtype, rows, columns))


def _make_descriptor(x: Tensor, fields: dict[str, Any]) -> TensorDescriptor:
    """A descriptor of x from cached fields. To compute and check them takes longer than a launch."""
    descriptor = object.__new__(TensorDescriptor)
    descriptor.__dict__.update(fields, base=x)
    return descriptor


@functools.lru_cache(maxsize=4096)
def _fields(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, rows: int, columns: int
) -> dict[str, Any]:
    # TMA requires a valid stride even for a dimension of size 1
    step = [stride if size > 1 else columns for size, stride in zip(shape, stride, strict=True)]
    if len(shape) == 4:
        batch, row, head, _ = step
        sizes, strides, block = [shape[0], shape[2], shape[1], shape[3]], [batch, head, row, 1], [1, 1, rows, columns]
    else:
        row, head, _ = step
        sizes = [0x7FFF0000, 0x7FFF0000, shape[1], MOST_ROWS, shape[2]]
        strides = [PACKED_STEP - row, row, head, row, 1]
        block = [1, 1, 1, rows, columns]
    return vars(TensorDescriptor(torch.empty(0, dtype=dtype), sizes, strides, block, _layout(tuple(block), dtype)))


@functools.lru_cache(maxsize=4096)
def describable(signature: TensorSignature) -> bool:
    """Whether TMA accepts a tensor's strides and address."""
    if math.prod(signature.shape) == 0:  # nothing is launched for an empty tensor
        return True
    unit = 16 // signature.dtype.itemsize
    steps = [step for size, step in zip(signature.shape[:-1], signature.stride[:-1], strict=True) if size > 1]
    aligned = (
        signature.stride[-1] == 1 and signature.offset == 0 and all(step > 0 and step % unit == 0 for step in steps)
    )
    near = all(step * signature.dtype.itemsize < 2**40 for step in steps)
    if len(signature.shape) == 3 and signature.shape[0] > 1:
        near = near and signature.stride[0] < PACKED_STEP
    return aligned and near


def describe_rows(x: Tensor, block: int) -> TensorDescriptor:
    """A descriptor of tiles [block] of fp32 x."""
    return _make_descriptor(x, _row_fields(x.numel(), block))


@functools.lru_cache(maxsize=4096)
def _row_fields(size: int, block: int) -> dict[str, Any]:
    return vars(
        TensorDescriptor(torch.empty(0, dtype=torch.float32), [size], [1], [block], gl.NVMMASharedLayout(0, 32, 1))
    )


def describe_dq_accumulator(x: Tensor, columns: int) -> TensorDescriptor:
    """A descriptor of the pieces of the dQ accumulator x, fp32 (heads, rows, head_dim): see ``backward.rows``.

    A piece has 64 x ``columns`` contiguous numbers, described as [columns / 2, 128].
    """
    return _make_descriptor(x, _piece_fields(x.numel(), columns))


@functools.lru_cache(maxsize=4096)
def _piece_fields(size: int, columns: int) -> dict[str, Any]:
    block = [columns // 2, 128]
    layout = gl.NVMMASharedLayout(0, 32, 2)
    return vars(TensorDescriptor(torch.empty(0, dtype=torch.float32), [size // 128, 128], [128, 1], block, layout))


@functools.cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """The layout of a tile in shared memory. Cached, because computing it takes longer than the launch."""
    return gl.NVMMASharedLayout.get_default_for(list(block), TYPES[dtype])
