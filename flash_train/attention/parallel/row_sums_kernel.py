"""The kernel of ``sum_rows``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from flash_train.attention.kernels.arguments import contiguous_columns, strided
from flash_train.attention.kernels.launch import Launch, on_device
from flash_train.attention.kernels.launch_cache import launch_all

TILE = 2048  # elements of a program: 16 of each thread, two loads of 16 bytes in 16 bits


@triton.jit
def sum_shared_rows_kernel(
    lists, slots, rows, boundary, parts, PARTS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Compute a block of rows of one head of one part; numbers from ``boundary`` are rows of ``second``."""
    for i in tl.static_range(PARTS):
        if tl.program_id(2) == i:
            out, first, second, heads, columns = parts[i]
            if tl.program_id(1) < heads:
                _sum_block(lists, slots, rows, boundary, out, first, second, columns, BLOCK_ROWS, BLOCK_D)


@triton.jit
def _sum_block(
    lists, slots, rows, boundary, out, first, second, columns, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr
):
    SUM: tl.constexpr = tl.float64 if out.ptr.dtype.element_ty == tl.float64 else tl.float32
    offs_row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inside = offs_row < rows
    total = tl.zeros([BLOCK_ROWS, BLOCK_D], SUM)
    for slot in range(slots):
        number = tl.load(lists + slot * rows + offs_row, mask=inside, other=-1)
        pointers, mask = _pointers(first, number, (number >= 0) & (number < boundary), columns, BLOCK_D)
        total += tl.load(pointers, mask=mask, other=0.0).to(SUM)
        if second is not None:
            pointers, mask = _pointers(second, number - boundary, number >= boundary, columns, BLOCK_D)
            total += tl.load(pointers, mask=mask, other=0.0).to(SUM)
    pointers, mask = _pointers(out, offs_row, inside, columns, BLOCK_D)
    tl.store(pointers, total.to(out.ptr.dtype.element_ty), mask=mask)


@triton.jit
def _pointers(x, row, used, columns, BLOCK_D: tl.constexpr):
    """Return pointers and mask [rows, BLOCK_D] of the program's head; rows may be anywhere in x."""
    offs_d = tl.arange(0, BLOCK_D)
    base = x.ptr + tl.program_id(1).to(tl.int64) * x.stride_head
    pointers = base + row.to(tl.int64)[:, None] * x.stride_row + offs_d[None, :]  # [rows, BLOCK_D]
    return pointers, used[:, None] & (offs_d < columns)[None, :]


def launch(lists: Tensor, parts: Sequence[tuple[Tensor, Tensor, Tensor | None]]) -> None:
    """Run ``row_sums.sum_rows`` on a GPU, or in Triton's interpreter; a part is a ``row_sums.Part``."""
    if lists.shape[1] > 0:
        with on_device(lists):
            launch_all(_launches, (lists, *chain(*parts)), ())


def _launches(lists: Tensor, *tensors: Tensor | None) -> tuple[Launch, ...]:
    """Return the launch for a part from each three tensors."""
    return (launch_of(lists, [tensors[i : i + 3] for i in range(0, len(tensors), 3)]),)


def launch_of(lists: Tensor, parts: Sequence[Sequence[Any]]) -> Launch:
    columns = max(out.shape[2] for out, *_ in parts)
    block_d = triton.next_power_of_2(columns)
    block_rows = max(1, TILE // block_d)
    slots, rows = lists.shape
    arguments: list[tuple[Any, ...]] = [
        (strided(out), *(None if x is None else strided(contiguous_columns(x)) for x in sources), *out.shape[1:])
        for out, *sources in parts
    ]
    heads = max(out.shape[1] for out, *_ in parts)
    constants = {"PARTS": len(parts), "BLOCK_ROWS": block_rows, "BLOCK_D": block_d, "num_warps": 4}
    return Launch(
        sum_shared_rows_kernel,
        (triton.cdiv(rows, block_rows), heads, len(parts)),
        (lists, slots, rows, parts[0][1].shape[0], tuple(arguments)),
        constants,
    )
