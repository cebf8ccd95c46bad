"""One kernel that rotates heads in place. Imported only once a tensor is on CUDA."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK = 4096  # pairs that one program turns


@triton.jit
def rotary_kernel(
    x_ptr, cos_ptr, sin_ptr, positions_ptr, seqlen, n_heads, table_rows, stride_xb, stride_xs, stride_xh,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr, BACK: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Turn some heads of one token by the row of the tables at its position; with BACK, turn back."""
    token = tl.program_id(0).to(tl.int64)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    offs_p = tl.arange(0, BLOCK_P)
    position = tl.load(positions_ptr + token)
    in_table = (position >= 0) & (position < table_rows)
    row = tl.where(in_table, position, 0)
    mask = offs_p < HALF
    c = tl.load(cos_ptr + row * HALF + offs_p, mask=mask, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin_ptr + row * HALF + offs_p, mask=mask, other=0.0).to(tl.float32)[None, :]
    c = tl.where(in_table, c, float("nan"))  # a mistake that the result shows
    if BACK:
        s = -s
    first = x_ptr + (token // seqlen) * stride_xb + (token % seqlen) * stride_xs
    first += offs_h[:, None].to(tl.int64) * stride_xh  # heads may be far apart, as in (batch, heads, seqlen, head_dim)
    if INTERLEAVED:
        first += 2 * offs_p[None, :]
        second = first + 1
    else:
        first += offs_p[None, :]
        second = first + HALF
    inside = (offs_h < n_heads)[:, None] & mask[None, :]  # [BLOCK_H, BLOCK_P]
    a = tl.load(first, mask=inside).to(tl.float32)
    b = tl.load(second, mask=inside).to(tl.float32)
    tl.store(first, (a * c - b * s).to(x_ptr.dtype.element_ty), mask=inside)
    tl.store(second, (a * s + b * c).to(x_ptr.dtype.element_ty), mask=inside)


class _Rotation(torch.autograd.Function):
    """Turns parts of a tensor in the forward, and the same parts of its gradient back in the backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, positions: Tensor, interleaved: bool, inplace: bool, indices: list, *tables: Tensor
    ) -> Tensor:
        ctx.save_for_backward(positions, *tables)
        ctx.interleaved, ctx.indices = interleaved, indices
        if inplace:
            ctx.mark_dirty(x)
        else:
            x = x.clone(memory_format=torch.contiguous_format)
        _launch(x, positions, interleaved, indices, tables, back=False)
        return x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        positions, *tables = ctx.saved_tensors
        grad = grad.clone(memory_format=torch.contiguous_format)  # another branch of the graph may read it, too
        _launch(grad, positions, ctx.interleaved, ctx.indices, tables, back=True)
        return grad, None, None, None, None, *(None for _ in tables)


def rotated(
    x: Tensor, parts: list[tuple[int | slice, Tensor, Tensor]], positions: Tensor, interleaved: bool, inplace: bool
) -> Tensor:
    """Turn ``x[:, :, index]`` by the tables of each part.

    Args:
        x: (batch, seqlen, ..., head_dim) with contiguous columns.
        parts: index, cos and sin.
        positions: int64 (batch, seqlen).
    """
    tables = [table.contiguous() for _, *pair in parts for table in pair]
    indices = [index for index, *_ in parts]
    return _Rotation.apply(x, positions.contiguous(), interleaved, inplace, indices, *tables)


def _launch(
    x: Tensor, positions: Tensor, interleaved: bool, indices: list, tables: tuple[Tensor, ...] | list, back: bool
) -> None:
    for index, cos, sin in zip(indices, tables[::2], tables[1::2], strict=True):
        part = x[:, :, index]
        n_heads, (rows, half) = part.shape[2], cos.shape
        if not part.numel() or not cos.numel():
            continue
        block_p = triton.next_power_of_2(half)
        block_h = min(triton.next_power_of_2(n_heads), max(MAX_BLOCK // block_p, 1))
        with torch.cuda.device_of(x):
            rotary_kernel[(positions.numel(), triton.cdiv(n_heads, block_h))](
                part, cos, sin, positions, part.shape[1], n_heads, rows, *part.stride()[:3],
                half, interleaved, back, block_h, block_p, enable_fp_fusion=True,
            )  # fmt: skip
