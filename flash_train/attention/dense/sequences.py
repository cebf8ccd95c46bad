"""Shared code of the dense implementations: split a call into parts of equal lengths, and join the results.

A padded batch is one part; a packed call has one part per entry. Inside a part, tensors are (batch, seqlen, heads,
head_dim), and tensors of pairs are (batch, heads, queries, keys).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flash_train.attention.dropout import EntryOrigins, entry_origin, keep_mask
from flash_train.attention.masks import Band, Full, Mask
from flash_train.attention.packing import Entry, Packing, Span, entries
from flash_train.attention.spec import AttentionSpec
from flash_train.attention.transforms import transforming


class Part(NamedTuple):
    """Sequences of equal lengths, computed as one batch.

    Attributes:
        q: (batch, len_q, heads, head_dim).
        k: (batch, len_k, kv_heads, head_dim).
        v: (batch, len_k, kv_heads, v_head_dim).
        slopes: ALiBi slopes (batch or 1, heads), or None.
        entries: one entry per batch row.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    slopes: Tensor | None
    entries: list[Entry]

    @property
    def empty(self) -> bool:
        """Whether there are no pairs."""
        return self.q.shape[1] == 0 or self.k.shape[1] == 0


def split_call(q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, slopes: Tensor | None = None) -> list[Part]:
    """Split a call into parts. Packed calls leave out entries without queries, but have at least one part.

    A packed call without ``packing.lengths`` reads ``cu_seqlens``, which synchronises with the device.

    Args:
        slopes: (heads,) or (entries, heads).
    """
    found = entries(q, k, packing)
    if slopes is not None and slopes.dim() == 1:
        slopes = slopes[None]
    if packing is None:
        return [Part(q, k, v, slopes, found)] if found else []
    parts = []
    for entry in found:
        if entry.len_q == 0:
            continue
        rows, columns = slice(entry.q_row, entry.q_row + entry.len_q), slice(entry.k_row, entry.k_row + entry.len_k)
        row = slopes if slopes is None or slopes.shape[0] == 1 else slopes[entry.index][None]
        parts.append(Part(q[None, rows], k[None, columns], v[None, columns], row, [entry]))
    # an output of nothing must depend on the inputs, too
    return parts or [Part(q[None, :0], k[None, :0], v[None, :0], None, [])]


def join_out(outs: list[Tensor], q: Tensor, v: Tensor, packing: Packing | None) -> Tensor:
    """Join the outputs of the parts into one tensor, (..., heads, v_head_dim); 0 in rows that belong to no entry."""
    if packing is None:
        return outs[0] if outs else q.new_zeros(*q.shape[:-1], v.shape[-1])
    tail = q.shape[0] - sum(out.shape[1] for out in outs)
    return torch.cat([*(out[0] for out in outs), q.new_zeros(tail, q.shape[1], v.shape[2])])


def join_lse(lses: list[Tensor], q: Tensor, packing: Packing | None) -> Tensor:
    """Join the log-sum-exps of the parts, each (batch, heads, len_q); -inf in rows that belong to no entry."""
    dtype = statistics_dtype(q)
    if packing is None:
        return lses[0] if lses else q.new_zeros(0, q.shape[2], q.shape[1], dtype=dtype)
    tail = q.shape[0] - sum(lse.shape[2] for lse in lses)
    return torch.cat([*(lse[0] for lse in lses), q.new_full((q.shape[1], tail), float("-inf"), dtype=dtype)], 1)


def statistics_dtype(q: Tensor) -> torch.dtype:
    """Return the dtype of row maxima, row sums and the log-sum-exp: fp32, or fp64 for fp64 inputs."""
    return torch.promote_types(q.dtype, torch.float32)


def attend_no_pairs(part: Part, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return output 0 and log-sum-exp -inf, or the sink, for a part without pairs.

    The output depends on the inputs, so that their gradients are 0.
    """
    q, k, v = (x.transpose(1, 2) for x in (part.q, *repeat_heads(part.k, part.v, part.q.shape[2])))
    out = ((q @ k.transpose(-1, -2)) @ v).transpose(1, 2)
    for x in (part.slopes, sinks):
        if x is not None:
            out = out + x[..., :0].sum().to(out.dtype)
    zero = out.sum(-1).transpose(1, 2).to(statistics_dtype(q))
    return out, (zero - float("inf") if sinks is None else zero + sinks.to(zero.dtype)[:, None])


def repeat_heads(k: Tensor, v: Tensor, n_heads: int) -> tuple[Tensor, Tensor]:
    """Return keys and values with one head per query head; copy them if query heads share keys."""
    group = n_heads // k.shape[2]
    return (k, v) if group == 1 else (k.repeat_interleave(group, 2), v.repeat_interleave(group, 2))


def visible_pairs(
    mask: Mask, part: Part, queries: range | Span | None = None, keys: range | Span | None = None
) -> Tensor | None:
    """Return the pairs that attend, bool (batch or 1, heads or 1, queries, keys); None for ``Full``.

    ``queries`` and ``keys`` choose a part of the sequences; None takes all.
    """
    if isinstance(mask, Full):
        return None
    n_heads, device = part.q.shape[2], part.q.device
    if not mask.per_entry:
        return mask.dense(part.entries[0], n_heads, device, queries, keys)[None]
    return torch.stack([mask.dense(entry, n_heads, device, queries, keys) for entry in part.entries])


def masks_of(mask: Mask, part: Part) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return both results of ``open_empty_rows`` and ``seen_keys`` for all pairs of a part.

    ``visible_pairs`` has a byte per pair. It is freed here, before the scores exist.
    """
    visible = visible_pairs(mask, part)
    return *open_empty_rows(visible), seen_keys(mask, part, visible)


def open_empty_rows(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the mask with rows of False replaced by True, and bool (..., queries, 1), False for those rows.

    The softmax of a row of -inf is NaN, and so is its gradient. The caller computes these rows without a mask and then
    multiplies them by 0, which needs no extra pass over all pairs and heads.
    """
    if mask is None:
        return None, None
    has_keys = mask.any(-1, keepdim=True)
    return mask | ~has_keys, has_keys


def seen_keys(mask: Mask, part: Part, visible: Tensor | None) -> Tensor | None:
    """Return the keys that any query attends to, bool (batch or 1, kv_heads or 1, keys).

    The result is None if a band alone shows that every key has such a query. Other keys and values must be replaced by
    zeros: they may be NaN, and 0 * NaN would spread to every row. This costs one pass over the mask, the keys and the
    values.

    Args:
        visible: ``visible_pairs`` of the part, or of a piece of it.
    """
    shift = part.k.shape[1] - part.q.shape[1]
    if visible is None or (isinstance(mask, Band) and (mask.left is None or shift <= mask.left)):
        return None
    seen = visible.any(-2)
    return seen if seen.shape[1] == 1 else seen.unflatten(1, (part.k.shape[2], -1)).any(2)


def zero_unseen(x: Tensor, seen: Tensor | None) -> Tensor:
    """Set keys or values (batch, keys, kv_heads, head_dim) to zero if ``seen`` (from ``seen_keys``) is False."""
    return x if seen is None else torch.where(seen.transpose(1, 2)[..., None], x, 0.0)


def alibi_distance(
    entry: Entry, device: torch.device, queries: range | Span | None = None, keys: range | Span | None = None
) -> Tensor:
    """Return the distance between query and key, fp32 (queries, keys), which ALiBi multiplies by its slopes."""
    queries = Span(0, entry.len_q) if queries is None else queries
    keys = Span(0, entry.len_k) if keys is None else keys
    shift = entry.len_k - entry.len_q
    q = torch.arange(queries.start + shift, queries.stop + shift, device=device, dtype=torch.float32)
    k = torch.arange(keys.start, keys.stop, device=device, dtype=torch.float32)
    return (q[:, None] - k[None, :]).abs_()


def dropout_keep(
    part: Part,
    spec: AttentionSpec,
    rng: Tensor | None,
    origin: tuple[int, int, int, int],
    entries: EntryOrigins | None = None,
    queries: range | Span | None = None,
    keys: range | Span | None = None,
) -> Tensor:
    """Return the weights that dropout keeps, bool (batch, heads, queries, keys).

    With ``rng``, int64 (2,), this is the exact mask of ``flash_train.attention.dropout``. Without it, the mask is drawn
    from PyTorch's generator of the device with the same probability.
    """
    queries = Span(0, part.q.shape[1]) if queries is None else queries
    keys = Span(0, part.k.shape[1]) if keys is None else keys
    n_heads = part.q.shape[2]
    if rng is None:
        shape = (len(part.entries), n_heads, queries.stop - queries.start, keys.stop - keys.start)
        if transforming():  # `vmap` cannot draw into a tensor
            return torch.rand(shape, device=part.q.device) < spec.keep_threshold / 256
        return torch.empty(shape, dtype=torch.bool, device=part.q.device).bernoulli_(spec.keep_threshold / 256)
    masks = []
    for entry in part.entries:
        number, first_head, first_query, first_key = entry_origin(origin, entries, entry.index)
        q = torch.arange(queries.start + first_query, queries.stop + first_query, device=rng.device)
        k = torch.arange(keys.start + first_key, keys.stop + first_key, device=rng.device)
        heads = range(first_head, first_head + n_heads)
        masks.append(torch.stack([keep_mask(rng, number, head, q, k, spec.keep_threshold) for head in heads]))
    return torch.stack(masks)
