"""The reference in plain PyTorch, for any specification and any dtype up to fp64.

Its memory is quadratic in length. Tests compare every other backend with it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_train.attention.dense.sequences import statistics_dtype
from flash_train.attention.dropout import EntryOrigins, entry_origin, keep_mask
from flash_train.attention.packing import Entry, Packing
from flash_train.attention.packing import entries as entries_of
from flash_train.attention.spec import AttentionSpec
from flash_train.attention.tracing import has_no_values


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    packing: Packing | None = None,
    rng: Tensor | None = None,
    *,
    origin: tuple[int, int, int, int] = (0, 0, 0, 0),
    entries: EntryOrigins | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the output and the natural log-sum-exp in fp32, or in fp64 for fp64 inputs; differentiable.

    Each row subtracts its maximum and divides by its own sum, so that weights add up to 1 however large the logits are.
    With 16-bit inputs it holds fp32 copies of q, k and v and rounds once, at the output.

    Args:
        q: (batch, seqlen_q, heads, head_dim), packed (total_q, heads, head_dim).
        k: (batch, seqlen_k, kv_heads, head_dim), packed (total_k, kv_heads, head_dim).
        v: (batch, seqlen_k, kv_heads, v_head_dim), packed (total_k, kv_heads, v_head_dim).
        rng: int64 (2,), the dropout state; required if ``spec.dropout > 0``.
        origin: (entry, head, query, key) of the call's first element in the whole dropout mask.
        entries: the first element of each entry, if entries are pieces of longer sequences.
        alibi_slopes: (heads,) or (entries, heads).
        sinks: (heads,).

    Returns:
        out (batch, seqlen_q, heads, v_head_dim), packed (total_q, heads, v_head_dim), in the dtype of q; lse (batch,
        heads, seqlen_q), packed (heads, total_q), fp32 (fp64 for fp64). Queries that attend to no key have output 0 and
        log-sum-exp -inf, or the sink if there are sinks. Rows that belong to no packed entry have output 0 and
        log-sum-exp -inf, also with sinks.
    """
    dtype, stats = q.dtype, statistics_dtype(q)
    q, k, v = q.to(stats), k.to(stats), v.to(stats)
    outs, lses, end = [], [], 0
    for entry in entries_of(q, k, packing):
        rows, columns = slice(entry.q_row, entry.q_row + entry.len_q), slice(entry.k_row, entry.k_row + entry.len_k)
        tensors = (q[rows], k[columns], v[columns]) if packing else (q[entry.batch], k[entry.batch], v[entry.batch])
        slopes = alibi_slopes if alibi_slopes is None or alibi_slopes.dim() == 1 else alibi_slopes[entry.index]
        with torch.autocast(q.device.type, enabled=False):  # autocast would make the products 16-bit
            out, lse = _sequence(*tensors, spec, entry, rng, entry_origin(origin, entries, entry.index), slopes, sinks)
        outs.append(out)
        lses.append(lse)
        end = rows.stop
    if packing is None:
        if not outs:
            return q.new_zeros(*q.shape[:-1], v.shape[-1], dtype=dtype), q.new_zeros(0, q.shape[2], q.shape[1])
        return torch.stack(outs).to(dtype), torch.stack(lses)
    tail = q.shape[0] - end
    outs.append(q.new_zeros(tail, q.shape[1], v.shape[2]))
    lses.append(q.new_full((q.shape[1], tail), float("-inf")))
    return torch.cat(outs).to(dtype), torch.cat(lses, 1)


def scores(q: Tensor, k: Tensor, spec: AttentionSpec, entry: Entry, slopes: Tensor | None = None) -> Tensor:
    """Compute one sequence's logits before the mask, (heads, len_q, len_k), from q and k (seqlen, heads, head_dim).

    The softcap comes before the ALiBi bias ``-slope * abs(i + len_k - len_q - j)`` (Press et al., arXiv:2108.12409),
    as in flash-attn.
    """
    logits = torch.einsum("qhd,khd->hqk", q, k) * spec.scale_for(q.shape[-1])
    if spec.softcap:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    if slopes is not None:
        position = torch.arange(entry.len_q, device=q.device)[:, None] + (entry.len_k - entry.len_q)
        distance = (position - torch.arange(entry.len_k, device=q.device)[None, :]).abs()
        logits = logits - slopes.to(logits.dtype)[:, None, None] * distance
    return logits


def _sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    entry: Entry,
    rng: Tensor | None,
    origin: tuple[int, int, int, int],
    slopes: Tensor | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute the output (len_q, heads, v_head_dim) and log-sum-exp (heads, len_q) of one sequence."""
    n_heads = q.shape[1]
    group = n_heads // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    visible = spec.mask.dense(entry, n_heads, q.device)
    seen = visible.any(1)[..., None].transpose(0, 1)  # keys that no query attends to may be NaN, and 0 * NaN is NaN
    k, v = torch.where(seen, k, 0.0), torch.where(seen, v, 0.0)
    logits = scores(q, k, spec, entry, slopes).masked_fill(~visible, float("-inf"))
    sink = None if sinks is None else sinks.to(logits.dtype)[:, None]
    shift = _row_maximum(logits.detach(), None if sink is None else sink.detach())
    weights = torch.exp(logits - shift[..., None])
    total = weights.sum(-1) if sink is None else weights.sum(-1) + torch.exp(sink - shift)
    counted = total != 0  # the sum is 0 without any key and sink; NaN != 0 is True
    total = torch.where(counted, total, 1.0)
    lse = torch.where(counted, shift + total.log(), float("-inf"))
    weights = weights / total[..., None]
    if spec.dropout > 0:
        assert rng is not None
        keep = dropout_mask(rng, entry, n_heads, spec, origin)
        weights = torch.where(keep, weights * (256 / spec.keep_threshold), 0.0)
    return torch.einsum("hqk,khd->qhd", weights, v), lse


def _row_maximum(logits: Tensor, sink: Tensor | None) -> Tensor:
    """Return the number to subtract from each row, (heads, len_q): its largest logit or the sink, or 0 if infinite."""
    top = logits.new_full(logits.shape[:-1], float("-inf")) if sink is None else sink.expand(logits.shape[:-1])
    if logits.shape[-1]:
        top = torch.maximum(top, logits.amax(-1))
    return torch.where(top.isinf(), 0.0, top)


def dropout_mask(
    rng: Tensor, entry: Entry, n_heads: int, spec: AttentionSpec, origin: tuple[int, int, int, int]
) -> Tensor:
    """Compute the dropout mask of one sequence, bool (heads, len_q, len_k), True if the weight is kept."""
    number, first_head, first_query, first_key = origin
    queries = torch.arange(first_query, first_query + entry.len_q)
    keys = torch.arange(first_key, first_key + entry.len_k)
    heads = range(first_head, first_head + n_heads)
    # Heads at once: several take less time, but many take memory. A traced program must not depend on the lengths.
    step = 1 if has_no_values(rng) else max(1, 2**20 // max(1, entry.len_q * entry.len_k))
    groups = [heads[i : i + step] for i in range(0, n_heads, step)]
    return torch.cat([keep_mask(rng, number, group, queries, keys, spec.keep_threshold) for group in groups])
