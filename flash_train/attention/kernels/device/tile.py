"""Loads and stores of tiles [rows, head_dim] of strided tensors."""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Strided(NamedTuple):
    """A tensor (batch, row, head, column) with contiguous columns: address, and strides in elements."""

    ptr: Any
    stride_batch: Any
    stride_row: Any
    stride_head: Any


class Rows(NamedTuple):
    """A tensor (batch, head, row) with contiguous rows: address, and strides in elements."""

    ptr: Any
    stride_batch: Any
    stride_head: Any


@triton.jit
def row_pointers(x, batch, head, row, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Pointers [ROWS, BLOCK_D] to the rows from ``row`` of a ``Strided``; ``batch`` and ``head`` are int64.

    Offsets inside the tile have 32 bits (``arguments.addressable``), and the offset of the tile has 64.
    """
    offs = tl.arange(0, ROWS)[:, None] * x.stride_row + tl.arange(0, BLOCK_D)[None, :]
    base = x.ptr + batch * x.stride_batch + head * x.stride_head
    return base + row.to(tl.int64) * x.stride_row + offs


@triton.jit
def far_row_pointers(x, batch, head, row, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """``row_pointers`` for any row stride: offsets inside the tile have 64 bits."""
    offs = tl.arange(0, ROWS)[:, None].to(tl.int64) * x.stride_row + tl.arange(0, BLOCK_D)[None, :]
    base = x.ptr + batch * x.stride_batch + head * x.stride_head
    return base + row.to(tl.int64) * x.stride_row + offs


@triton.jit
def stat_pointers(x, batch, head, row, ROWS: tl.constexpr):
    """Pointers [ROWS] to a ``Rows``."""
    return x.ptr + batch * x.stride_batch + head * x.stride_head + row + tl.arange(0, ROWS)


@triton.jit
def load_tile(ptrs, valid_rows, CHECK: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr):
    """A tile [ROWS, BLOCK_D], with zeros past HEAD_DIM columns and, if CHECK, past ``valid_rows`` rows."""
    if CHECK:
        if BLOCK_D == HEAD_DIM:
            return tl.load(ptrs, mask=(tl.arange(0, ROWS) < valid_rows)[:, None], other=0.0)
        inside = (tl.arange(0, ROWS) < valid_rows)[:, None] & (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
        return tl.load(ptrs, mask=inside, other=0.0)
    if BLOCK_D == HEAD_DIM:
        return tl.load(ptrs)
    return tl.load(ptrs, mask=(tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def store_tile(ptrs, value, valid_rows, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Store the first ``valid_rows`` rows and HEAD_DIM columns of a tile, in the destination's dtype."""
    inside = (tl.arange(0, ROWS) < valid_rows)[:, None] & (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
    tl.store(ptrs, value.to(ptrs.dtype.element_ty), mask=inside)
