"""Take rows of a tensor and put them back, when no row repeats: then no gradient has to be added up."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def put_rows(values: Tensor, rows: Tensor, count: int) -> Tensor:
    """Write values (total, ...) to distinct rows, integers (total,), of a new tensor (count, ...) of zeros."""
    return values.new_zeros(count, *values.shape[1:]).index_copy(0, rows.long(), values)


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Take distinct rows, int64 (total,), of x (rows, ...). The caller knows that they are distinct."""
    return _TakeRows.apply(x, rows.long())


class _TakeRows(torch.autograd.Function):
    """``index_select`` of distinct rows. PyTorch's own backward adds rows up, on a GPU with atomics."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, rows: Tensor) -> Tensor:
        return x.index_select(0, rows)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        x, rows = inputs
        ctx.save_for_backward(rows)
        ctx.count = x.shape[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return put_rows(grad, rows, ctx.count), None
