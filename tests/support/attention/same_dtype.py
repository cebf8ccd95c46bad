"""Plain PyTorch attention with every step in the dtype of the inputs. The contract compares with its error.

It shares the mask, the logits and the dropout mask with ``reference``. For 16-bit inputs it uses PyTorch's softmax.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_train.attention import AttentionSpec
from flash_train.attention.dense.reference import dropout_mask, scores
from flash_train.attention.dropout import EntryOrigins, entry_origin
from flash_train.attention.packing import Entry, Packing
from flash_train.attention.packing import entries as entries_of


def same_dtype_attention(
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
    """Output and log-sum-exp like ``reference_attention``'s, both in the dtype of q."""
    found = entries_of(q, k, packing)
    outs, lses, end = [], [], 0
    for entry in found:
        rows, columns = slice(entry.q_row, entry.q_row + entry.len_q), slice(entry.k_row, entry.k_row + entry.len_k)
        tensors = (q[rows], k[columns], v[columns]) if packing else (q[entry.batch], k[entry.batch], v[entry.batch])
        slopes = alibi_slopes if alibi_slopes is None or alibi_slopes.dim() == 1 else alibi_slopes[entry.index]
        out, lse = _sequence(*tensors, spec, entry, rng, entry_origin(origin, entries, entry.index), slopes, sinks)
        outs.append(out)
        lses.append(lse)
        end = rows.stop
    if packing is None:
        return torch.stack(outs), torch.stack(lses)
    tail = q.shape[0] - end
    outs.append(q.new_zeros(tail, q.shape[1], v.shape[2]))
    lses.append(q.new_full((q.shape[1], tail), float("-inf")))
    return torch.cat(outs), torch.cat(lses, 1)


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
    n_heads = q.shape[1]
    group = n_heads // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    logits = scores(q, k, spec, entry, slopes)
    visible = spec.mask.dense(entry, n_heads, q.device).expand_as(logits)
    if sinks is not None:  # an extra column that every query attends to, without a value
        column = sinks.to(logits.dtype)[:, None, None].expand(-1, entry.len_q, 1)
        logits = torch.cat([logits, column], -1)
        visible = torch.cat([visible, visible.new_ones(column.shape)], -1)
    seeing = visible.any(-1, keepdim=True)
    # the softmax of a row of -inf would be NaN
    logits = torch.where(seeing, logits.masked_fill(~visible, float("-inf")), 0.0)
    lse = logits.logsumexp(-1, keepdim=True)
    # fp32 computes weights from the log-sum-exp, like the kernels' backward; 16 bits are too coarse for that
    shares = logits.softmax(-1) if logits.dtype.itemsize < 4 else torch.exp(logits - lse)
    weights = torch.where(visible, shares, 0.0)[..., : entry.len_k]
    lse = torch.where(seeing, lse, float("-inf"))[..., 0]
    if spec.dropout > 0:
        assert rng is not None
        keep = dropout_mask(rng, entry, n_heads, spec, origin)
        weights = torch.where(keep, weights * (256 / spec.keep_threshold), 0.0)
    return torch.einsum("hqk,khd->qhd", weights, v), lse
