"""The dense oracle: any specification in any dtype up to fp64, in plain PyTorch.

Memory is quadratic in length. Every other backend is held to this one.
"""

from __future__ import annotations

import torch

from flash_train.attention.dropout import keep_mask
from flash_train.attention.spec import AttentionSpec
from flash_train.attention.varlen import Packing


def reference_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: AttentionSpec,
    packing: Packing | None = None,
    rng: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and natural log-sum-exp, differentiable, computed in the dtype of the inputs.

    Args:
        q: (batch, seqlen_q, heads, head_dim), packed (total_q, heads, head_dim).
        k, v: (batch, seqlen_k, kv_heads, head_dim), packed (total_k, kv_heads, head_dim).
        rng: int64 (2,), the dropout state; required where ``spec.dropout > 0``.

    Returns:
        out like q; lse (batch, heads, seqlen_q), packed (heads, total_q). Queries that see no key have output 0 and
        log-sum-exp -inf, as have the rows of a packed tensor that belong to no entry.
    """
    if packing is None:
        rows = [_sequence(q[b], k[b], v[b], spec, rng, b) for b in range(q.shape[0])]
        if not rows:
            return torch.zeros_like(q), q.new_zeros(0, q.shape[2], q.shape[1])
        return torch.stack([out for out, _ in rows]), torch.stack([lse for _, lse in rows])
    outs, lses, end = [], [], 0
    for entry, (q0, q1, k0, k1) in enumerate(packing.host_spans()):
        out, lse = _sequence(q[q0:q1], k[k0:k1], v[k0:k1], spec, rng, entry)
        outs.append(out)
        lses.append(lse)
        end = q1
    tail = q.shape[0] - end
    outs.append(q.new_zeros(tail, q.shape[1], v.shape[2]))
    lses.append(q.new_full((q.shape[1], tail), float("-inf")))
    return torch.cat(outs), torch.cat(lses, 1)


def _sequence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, rng: torch.Tensor | None, entry: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(seqlen, heads, head_dim) tensors of one sequence to its output and (heads, seqlen_q) log-sum-exp."""
    len_q, n_heads, head_dim = q.shape
    len_k = k.shape[0]
    group = n_heads // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale_for(head_dim)
    visible = spec.mask.dense(len_q, len_k, q.device)
    scores = scores.masked_fill(~visible, float("-inf"))
    seeing = visible.any(-1)  # a row of -inf has no gradient to give: its weights are set, not computed
    lse = torch.where(seeing, torch.where(seeing[:, None], scores, 0.0).logsumexp(-1), float("-inf"))
    weights = torch.where(seeing[:, None], torch.exp(scores - torch.where(seeing, lse, 0.0)[..., None]), 0.0)
    if spec.dropout > 0:
        assert rng is not None
        queries, keys = torch.arange(len_q), torch.arange(len_k)
        keep = torch.stack([keep_mask(rng, entry, h, queries, keys, spec.keep_threshold) for h in range(n_heads)])
        weights = torch.where(keep, weights * (256 / spec.keep_threshold), 0.0)
    return torch.einsum("hqk,khd->qhd", weights, v), lse
