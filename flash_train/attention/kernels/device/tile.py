"""Loading and storing [rows, head_dim] tiles."""

import triton
import triton.language as tl


@triton.jit
def row_pointers(ptr, row, stride_row, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Pointers [ROWS, BLOCK_D] to the rows from ``row``; only the row's own offset needs 64 bits."""
    offs = tl.arange(0, ROWS)[:, None] * stride_row + tl.arange(0, BLOCK_D)[None, :]
    return ptr + row.to(tl.int64) * stride_row + offs


@triton.jit
def load_tile(ptrs, valid_rows, CHECK: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr):
    """The tile with zeros past ``valid_rows`` rows (where CHECK) and past HEAD_DIM columns."""
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
    """Store the tile's first ``valid_rows`` rows and HEAD_DIM columns in the dtype of the destination."""
    inside = (tl.arange(0, ROWS) < valid_rows)[:, None] & (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
    tl.store(ptrs, value.to(ptrs.dtype.element_ty), mask=inside)
