"""Exact combination of attention over disjoint sets of keys."""

from __future__ import annotations

import torch
from torch import Tensor


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Combine the attention over two disjoint sets of keys into the attention over their union.

    The operation is associative and differentiable.

    Each partial output is a weighted mean of values whose weights sum to ``exp(lse)``, so the result is the mean of the
    two outputs with weights ``exp(lse_a)`` and ``exp(lse_b)``. This is one step of the online softmax (Milakov and
    Gimelshein, 2018, arXiv:1805.02867) in normalised form. Flash-decoding (Dao et al., 2023) joins the parts of a split
    cache with it.

    Args:
        out_a, out_b: (batch, seqlen, heads, head_dim), or packed (total, heads, head_dim).
        lse_a, lse_b: natural log-sum-exp, (batch, heads, seqlen), packed (heads, total). -inf means that the query
            attends to none of these keys; the output of that row is then ignored.

    Returns:
        out and lse, with the promoted dtype of the outputs and of the log-sum-exps; computed in at least fp32. For
        queries that attend to no key at all, out is 0 and lse is -inf.

    Raises:
        ValueError: shapes that do not fit each other.
    """
    expected = (*out_a.shape[:-3], out_a.shape[-2], out_a.shape[-3]) if out_a.dim() in (3, 4) else None
    if out_b.shape != out_a.shape or lse_a.shape != expected or lse_b.shape != expected:
        shapes = [tuple(x.shape) for x in (out_a, lse_a, out_b, lse_b)]
        raise ValueError(
            f"out_a, lse_a, out_b, lse_b have shapes {', '.join(map(str, shapes))}: must be (batch, seqlen, heads, "
            "head_dim) with (batch, heads, seqlen), or packed (total, heads, head_dim) with (heads, total), for both"
        )
    out_dtype, lse_dtype = torch.promote_types(out_a.dtype, out_b.dtype), torch.promote_types(lse_a.dtype, lse_b.dtype)
    dtype = torch.promote_types(torch.promote_types(out_dtype, lse_dtype), torch.float32)
    lse_a, lse_b = lse_a.to(dtype), lse_b.to(dtype)
    # if neither set has a key, the difference of infinities would be NaN, also in the gradient
    seen = torch.maximum(lse_a, lse_b) != float("-inf")
    safe_a, safe_b = torch.where(seen, lse_a, 0.0), torch.where(seen, lse_b, 0.0)
    # the shares come from the difference: a large log-sum-exp is rounded by more than its exponential allows
    share = safe_a - safe_b
    out = _weighted(out_a, lse_a, torch.sigmoid(share)) + _weighted(out_b, lse_b, torch.sigmoid(-share))
    lse = torch.logaddexp(safe_a, safe_b)
    return out.to(out_dtype), torch.where(seen, lse, float("-inf")).to(lse_dtype)


def _weighted(out: Tensor, lse: Tensor, share: Tensor) -> Tensor:
    """Multiply a partial output by its share of the total weight."""
    seen = (lse != float("-inf")).transpose(-1, -2)[..., None]
    return torch.where(seen, out.to(lse.dtype), 0.0) * share.transpose(-1, -2)[..., None]
