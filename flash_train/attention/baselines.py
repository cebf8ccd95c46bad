"""What users compare with: PyTorch's own fused attention, and standard attention that materialises S and P.

Both draw dropout from PyTorch's generator; the exact mask of this project belongs to ``flash`` and ``reference``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F

from flash_train.attention.spec import AttentionSpec
from flash_train.attention.varlen import Packing

Dense = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionSpec], torch.Tensor]


def sdpa_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, packing: Packing | None = None
) -> torch.Tensor:
    """``scaled_dot_product_attention``; packed, ``varlen_attn`` where it applies, else one call per entry."""
    if packing is not None and _varlen_applies(q, spec, packing):
        return _varlen(q, k, v, spec, packing)
    return _by_entry(_sdpa, q, k, v, spec, packing)


def standard_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, packing: Packing | None = None
) -> torch.Tensor:
    """Scores, softmax, dropout and product as separate operations, each (heads, seqlen_q, seqlen_k) in memory."""
    return _by_entry(_standard, q, k, v, spec, packing)


def _by_entry(
    dense: Dense, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, packing: Packing | None
) -> torch.Tensor:
    if packing is None:
        return dense(q, k, v, spec)
    outs, end = [], 0
    for q0, q1, k0, k1 in packing.host_spans():
        if q1 > q0:
            outs.append(dense(q[None, q0:q1], k[None, k0:k1], v[None, k0:k1], spec)[0])
        end = q1
    if end < q.shape[0]:
        outs.append(torch.zeros_like(q[end:]))
    return torch.cat(outs) if outs else torch.zeros_like(q)


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """(batch, seqlen, heads, head_dim) through PyTorch's fused kernels."""
    if k.shape[1] == 0:
        return torch.zeros_like(q)
    grouped = q.shape[2] != k.shape[2]
    if grouped and q.device.type == "cpu":  # PyTorch's grouped backward there is eight times slower than copied heads
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
        grouped = False
    mask = None
    if spec.mask.causal and q.shape[1] != k.shape[1]:  # PyTorch's is_causal aligns sequences at their beginnings
        mask = spec.mask.dense(q.shape[1], k.shape[1], q.device)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=spec.mask.causal and mask is None,
        dropout_p=spec.dropout,
        scale=spec.scale,
        enable_gqa=grouped,
    ).transpose(1, 2)
    return out if mask is None else torch.where(mask.any(-1)[:, None, None], out, 0.0)


def _standard(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """(batch, seqlen, heads, head_dim) by FlashAttention's algorithm 0, in the dtype of the inputs."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    scores = (q @ k.transpose(-1, -2)) * spec.scale_for(q.shape[-1])
    if spec.mask.causal:
        visible = spec.mask.dense(q.shape[2], k.shape[2], q.device)
        seeing = visible.any(-1)[:, None]
        weights = torch.where(seeing, scores.masked_fill(~visible & seeing, float("-inf")).softmax(-1), 0.0)
    else:
        weights = scores.softmax(-1)
    weights = F.dropout(weights, spec.dropout)
    return (weights @ v).transpose(1, 2)


def _varlen_applies(q: torch.Tensor, spec: AttentionSpec, packing: Packing) -> bool:
    """PyTorch's packed kernel: CUDA, 16 bits, no dropout, head_dim of whole 16-byte vectors."""
    return (
        q.is_cuda
        and q.dtype in (torch.float16, torch.bfloat16)
        and spec.dropout == 0.0
        and q.shape[-1] % 8 == 0
        and (packing.lengths is not None or packing.max_seqlen_q is not None)
    )


def _varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, packing: Packing) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    cu_q, cu_k = packing.cu_seqlens_q, packing.cu_seqlens_k
    longest_q, longest_k = packing.max_seqlen_q, packing.max_seqlen_k
    if packing.lengths is not None:  # the entries that hold something come first: leave the empty ones out
        cu_q, cu_k = cu_q[: len(packing.lengths) + 1], cu_k[: len(packing.lengths) + 1]
        longest_q = longest_k = max(packing.lengths, default=1)
    window = (-1, 0) if spec.mask.causal else (-1, -1)
    options: dict[str, Any] = {"window_size": window, "scale": spec.scale}
    if q.shape[1] != k.shape[1] and "enable_gqa" in inspect.signature(varlen_attn).parameters:  # torch >= 2.12
        options["enable_gqa"] = True
    return cast(torch.Tensor, varlen_attn(q, k, v, cu_q, cu_k, longest_q, longest_k, **options))
