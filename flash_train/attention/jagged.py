"""Jagged nested tensors, PyTorch's form of packed tensors: ``torch.nested`` with ``layout=torch.jagged``."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_train.attention.packing import Packing
from flash_train.attention.rows import take_rows


class Unpacked(NamedTuple):
    """The packed form of a call on jagged tensors, with methods that turn its results into jagged tensors.

    Attributes:
        q: (total_q, heads, head_dim).
        k: (total_k, kv_heads, head_dim).
        v: likewise.
        packing: boundaries of the entries.
        like: q as jagged (batch, j, heads, head_dim). Results share its offsets, and so its symbolic length j.
        rows: int64 (total_q,), the index of each packed row within q's values if these have holes, else None.
        by_head: whether the tensors of the call were (batch, heads, j, head_dim).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    packing: Packing
    like: Any
    rows: Tensor | None
    by_head: bool

    def out(self, values: Tensor) -> Tensor:
        """Convert packed (total_q, heads, head_dim) to jagged, in the layout of q."""
        return self._jagged(values, self.by_head)

    def lse(self, values: Tensor) -> Tensor:
        """Convert packed (heads, total_q) to jagged (batch, heads, j)."""
        return self._jagged(values.t(), True)

    def _jagged(self, values: Tensor, by_head: bool) -> Tensor:
        if self.rows is not None:
            with_holes = values.new_zeros(self.like.values().shape[0], *values.shape[1:])
            values = with_holes.index_copy(0, self.rows, values)
        jagged = torch.nested.nested_tensor_from_jagged(values, self.like.offsets(), self.like.lengths())
        return jagged.transpose(1, 2) if by_head else jagged


def unpack(q: Any, k: Any, v: Any, packing: Packing | None) -> Unpacked:
    """Convert jagged q, k and v to packed tensors. Differentiable.

    If the boundaries of k and v are different tensors, they are compared, which synchronises with the device.

    Args:
        q, k, v: jagged (batch, j, heads, head_dim), or (batch, heads, j, head_dim) as for PyTorch's SDPA.
        packing: must be None.

    Raises:
        TypeError: tensors that are not all jagged.
        ValueError: a packing, different layouts, or different boundaries in k and v.
    """
    if packing is not None:
        raise ValueError("packing was given with nested tensors, which have boundaries already: must be None")
    layouts = set()
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not x.is_nested or x.layout != torch.jagged:
            kind = f"nested with layout={x.layout}" if x.is_nested else "not nested"
            raise TypeError(f"{name} is {kind}: q, k and v must all be nested with layout=torch.jagged, or none")
        if x.dim() != 4 or x._ragged_idx not in (1, 2):
            raise ValueError(
                f"{name} is jagged of shape {tuple(x.shape)}: must be (batch, j, heads, head_dim), or (batch, heads, "
                "j, head_dim)"
            )
        layouts.add(x._ragged_idx)
    if len(layouts) > 1:
        raise ValueError("q, k and v are jagged in different dimensions: must be in the same, (batch, j, heads, ...)")
    by_head = layouts == {2}
    q, k, v = (x.transpose(1, 2) if by_head else x for x in (q, k, v))
    (q_rows, cu_q), (k_rows, cu_k) = _boundaries(q), _boundaries(k)
    v_rows = k_rows
    if k.shape[1] != v.shape[1]:
        v_rows, cu_v = _boundaries(v)
        if not torch.equal(cu_k, cu_v):
            raise ValueError(f"k has boundaries {cu_k.tolist()} and v {cu_v.tolist()}: must be equal")
    packed = [
        x.values() if rows is None else take_rows(x.values(), rows)
        for x, rows in ((q, q_rows), (k, k_rows), (v, v_rows))
    ]
    packing = Packing(cu_q, cu_q if k.shape[1] == q.shape[1] else cu_k)
    return Unpacked(packed[0], packed[1], packed[2], packing, q, q_rows, by_head)


def _boundaries(x: Any) -> tuple[Tensor | None, Tensor]:
    """Return the indices of x's rows within its values, int64 (total,), or None without holes; and boundaries.

    The boundaries are int32 (batch + 1,).

    An empty batch becomes one empty entry. Holes come from ``torch.nested.narrow`` and cost a device synchronisation.
    """
    offsets, lengths = x.offsets(), x.lengths()
    if lengths is None:
        return None, (offsets if offsets.numel() > 1 else offsets.expand(2)).to(torch.int32).contiguous()
    ends = lengths.cumsum(0)
    gaps = torch.repeat_interleave(offsets[: lengths.numel()] - (ends - lengths), lengths)
    return torch.arange(gaps.numel(), device=x.device) + gaps, F.pad(ends, (1, 0)).to(torch.int32)
