"""A residual addition and the RMS norm after it: one forward kernel, one backward. Imported once a tensor is on CUDA.

Both are memory-bound. The forward reads its inputs and writes the stream and the normed rows. The backward reads the
stream, its gradient, and a gradient for each use of the normed rows; it writes one gradient, which both addends share.
Liger's norm leaves the addition and the sums of gradients to other kernels.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_train.attention.kernels.gpu import processors
from flash_train.checks import check, within

USES = 3  # the most uses of the normed rows: the backward kernel has one gradient argument for each
BLOCK = 2048  # elements that a program of the forward loads at a time, or one row if it is longer
BACKWARD_BLOCK = 1024  # the same for the backward
PROGRAMS = 8  # programs of the backward per multiprocessor; each accumulates a gradient of the weight
SUM_ROWS, SUM_COLUMNS = 64, 32  # of the tile in which `sum_rows_kernel` adds up


@triton.jit
def norm_forward_kernel(
    x, update, weight, stream, out, rstd, rows, width, eps, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Process ROWS rows. If `update` and `stream` are None, x is the stream."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    at = row[:, None].to(tl.int64) * width + column[None, :]
    inside = (row < rows)[:, None] & (column < width)[None, :]
    value = tl.load(x + at, mask=inside, other=0.0)
    if update is not None:
        value = (value.to(tl.float32) + tl.load(update + at, mask=inside, other=0.0).to(tl.float32)).to(value.dtype)
        tl.store(stream + at, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / width + eps)
    scaled = (wide * scale[:, None]).to(value.dtype)
    factor = tl.load(weight + column, mask=column < width, other=0.0)
    result = scaled.to(tl.float32) * factor.to(tl.float32)[None, :]
    tl.store(out + at, result.to(value.dtype), mask=inside)
    tl.store(rstd + row, scale, mask=row < rows)


@triton.jit
def norm_backward_kernel(
    dout1, dout2, dout3, dstream, stream, rstd, weight, dx, dweight, rows, width, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Process groups of ROWS rows, strided by the number of programs.

    Each program writes its sum of the weight's gradient to its row of dweight, fp32 (programs, width).
    """
    column = tl.arange(0, COLUMNS)
    factor = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for group in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = group * ROWS + tl.arange(0, ROWS)
        at = row[:, None].to(tl.int64) * width + column[None, :]
        inside = (row < rows)[:, None] & (column < width)[None, :]
        value = tl.load(stream + at, mask=inside, other=0.0)
        gradient = tl.load(dout1 + at, mask=inside, other=0.0).to(tl.float32)
        if dout2 is not None:
            gradient += tl.load(dout2 + at, mask=inside, other=0.0).to(tl.float32)
        if dout3 is not None:
            gradient += tl.load(dout3 + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        scaled = value.to(tl.float32) * scale
        total += gradient * scaled.to(value.dtype).to(tl.float32)
        gradient = gradient * factor[None, :]
        mean = tl.sum(gradient * scaled, axis=1) / width
        result = scale * (gradient - scaled * mean[:, None])
        if dstream is not None:
            result += tl.load(dstream + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + at, result.to(value.dtype), mask=inside)
    place = tl.program_id(0).to(tl.int64) * width + column
    tl.store(dweight + place, tl.sum(total, axis=0), mask=column < width)


@triton.jit(do_not_specialize=["rows"])  # the same kernel for any number of programs
def sum_rows_kernel(parts, out, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Add up the rows of parts, fp32 (rows, width), in a fixed order: out (width,)."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        total += tl.load(parts + row[:, None] * width + column[None, :], mask=inside, other=0.0)
    result = tl.sum(total, axis=0)
    tl.store(out + column, result.to(out.dtype.element_ty), mask=column < width)


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, update: Tensor | None, weight: Tensor, eps: float, uses: int
    ) -> tuple[Tensor, ...]:
        x, weight = x.contiguous(), weight.contiguous()
        update = None if update is None else update.contiguous()
        stream = x if update is None else torch.empty_like(x)
        out, rstd = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
        rows, width = rstd.numel(), x.shape[-1]
        tile = _tile(width, BLOCK)
        if rows:
            with torch.cuda.device_of(x):
                norm_forward_kernel[(triton.cdiv(rows, tile["ROWS"]),)](
                    x,
                    update,
                    weight,
                    None if update is None else stream,
                    out,
                    rstd,
                    rows,
                    width,
                    eps,
                    enable_fp_fusion=True,
                    **tile,
                )
        ctx.save_for_backward(stream, rstd, weight)
        ctx.added = update is not None
        ctx.set_materialize_grads(False)
        return stream, out, *(out.view_as(out) for _ in range(uses - 1))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dstream: Tensor | None, *douts: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [dout.contiguous() for dout in douts if dout is not None]
        if not given:  # only the stream was used
            return dstream, dstream if ctx.added else None, None, None, None
        stream, rstd, weight = ctx.saved_tensors
        dstream = None if dstream is None else dstream.contiguous()
        rows, width = rstd.numel(), stream.shape[-1]
        tile = _tile(width, BACKWARD_BLOCK)
        programs = min(triton.cdiv(rows, tile["ROWS"]), PROGRAMS * processors(stream.device))
        dx, parts = torch.empty_like(stream), stream.new_empty((programs, width), dtype=torch.float32)
        dweight = torch.empty_like(weight)
        if rows:
            with torch.cuda.device_of(stream):
                norm_backward_kernel[(programs,)](
                    *given, *[None] * (USES - len(given)), dstream, stream, rstd, weight, dx, parts, rows, width,
                    enable_fp_fusion=True, **tile,
                )  # fmt: skip
                sum_rows_kernel[(triton.cdiv(width, SUM_COLUMNS),)](
                    parts, dweight, programs, width, ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS, num_warps=8,
                    enable_fp_fusion=True,
                )  # fmt: skip
        else:
            dweight.zero_()
        return dx, dx if ctx.added else None, dweight, None, None


def add_rms_norm(x: Tensor, update: Tensor | None, weight: Tensor, eps: float, uses: int = 1) -> tuple[Tensor, ...]:
    """Implement `ops.add_rms_norm`."""
    check("uses", uses, within(1, USES))
    return _AddRMSNorm.apply(x, update, weight, eps, uses)


@functools.cache
def _tile(width: int, block: int) -> dict[str, int]:
    columns = triton.next_power_of_2(width)
    return {
        "ROWS": max(1, block // columns),
        "COLUMNS": columns,
        "num_warps": max(4, min(16, columns // 512)),
    }
