"""What a call returns: outputs and gradients are allocated, and gradients of slopes and sinks summed over rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flash_train.attention.kernels.call import Call


def slope_gradient(rows: Tensor, call: Call) -> Tensor:
    """Sum the rows' parts to the shape of the slopes, in a fixed order."""
    assert call.alibi_slopes is not None
    if call.alibi_slopes.dim() == 1:
        return (rows.sum(-1) if rows.dim() == 2 else rows.sum((0, 2))).to(call.alibi_slopes.dtype)
    if rows.dim() == 3:
        return rows.sum(-1).to(call.alibi_slopes.dtype)
    assert call.cu_seqlens_q is not None
    per_entry = torch.segment_reduce(rows.t().contiguous(), "sum", offsets=call.cu_seqlens_q.long(), axis=0)
    return per_entry.to(call.alibi_slopes.dtype)


def sink_gradient(delta: Tensor, lse: Tensor, call: Call) -> Tensor:
    """Return the gradient of the sinks.

    A sink has the weight exp(sink - lse) and no value, so that each row adds -weight * D.
    """
    assert call.sinks is not None
    weight = torch.exp(call.sinks.float()[:, None] - lse)
    rows = torch.where(lse != float("-inf"), weight * delta, 0.0) / -call.keep_rate
    return (rows.sum(-1) if rows.dim() == 2 else rows.sum((0, 2))).to(call.sinks.dtype)


def outputs(q: Tensor, v: Tensor, out: Tensor | None) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return the outputs of a forward that are given and those allocated here; together out and its log-sum-exp."""
    lse = q.new_empty(lse_shape(q), dtype=torch.float32)
    return ((), (q.new_empty((*q.shape[:-1], v.shape[-1])), lse)) if out is None else ((out,), (lse,))


def gradients(q: Tensor, k: Tensor, v: Tensor, into: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Return dq, dk and dv, allocated here unless ``into`` has them."""
    return tuple([x.new_empty(x.shape) if dx is None else dx for x, dx in zip((q, k, v), into, strict=True)])


def lse_shape(q: Tensor) -> tuple[int, ...]:
    return (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[1], q.shape[0])
