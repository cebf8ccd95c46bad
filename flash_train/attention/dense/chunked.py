"""Attention in chunks with memory linear in length (Rabe and Staats, 2021, arXiv:2112.05682), in plain PyTorch.

For each chunk of queries, a loop over chunks of keys updates the maximum, the sum and the output of the online softmax.
None of these tensors is saved for the backward, which recomputes a chunk of queries, and within it each chunk of keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flash_train.attention.dense.sequences import (
    Part,
    alibi_distance,
    attend_no_pairs,
    dropout_keep,
    join_lse,
    join_out,
    seen_keys,
    split_call,
    statistics_dtype,
    visible_pairs,
)
from flash_train.attention.dropout import EntryOrigins
from flash_train.attention.packing import Entry, Packing
from flash_train.attention.spec import AttentionSpec
from flash_train.attention.transforms import transforming

QUERY_CHUNK, KEY_CHUNK = 1024, 4096


def chunked_attention(
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
    query_chunk: int = QUERY_CHUNK,
    key_chunk: int = KEY_CHUNK,
) -> tuple[Tensor, Tensor]:
    """Compute the output and the natural log-sum-exp for every spec; differentiable.

    In addition to inputs and outputs, it holds per batch row and head a few tensors of query_chunk x key_chunk and
    of seqlen x head_dim elements. It skips chunks of keys outside the mask's band. A training step computes the scores
    three times: once in the forward and twice in the backward.

    Args:
        q: (batch, seqlen_q, heads, head_dim), packed (total_q, heads, head_dim).
        k: (batch, seqlen_k, kv_heads, head_dim), packed (total_k, kv_heads, head_dim).
        v: (batch, seqlen_k, kv_heads, v_head_dim), packed (total_k, kv_heads, v_head_dim).
        rng: int64 (2,), the dropout state of the exact mask; None draws a mask from PyTorch's generator.
        origin: (entry, head, query, key) of the call's first element in the whole dropout mask.
        entries: the first element of each entry, if entries are pieces of longer sequences.
        alibi_slopes: (heads,) or (entries, heads).
        sinks: (heads,).
        query_chunk, key_chunk: positions per chunk.

    Returns:
        out (batch, seqlen_q, heads, v_head_dim), packed (total_q, heads, v_head_dim), in the dtype of q; lse (batch,
        heads, seqlen_q), packed (heads, total_q), fp32 (fp64 for fp64). Queries that attend to no key have output 0 and
        log-sum-exp -inf, or the sink if there are sinks.

    Raises:
        ValueError: a chunk size below 1.
    """
    if query_chunk < 1 or key_chunk < 1:
        raise ValueError(f"query_chunk={query_chunk}, key_chunk={key_chunk}: must be 1 or more")
    outs, lses = [], []
    for part in split_call(q, k, v, packing, alibi_slopes):
        if part.empty:
            out, lse = attend_no_pairs(part, sinks)
        else:
            out, lse = _ChunkedPart(part, spec, rng, origin, entries, key_chunk).attend(sinks, query_chunk)
        outs.append(out)
        lses.append(lse)
    return join_out(outs, q, v, packing), join_lse(lses, q, packing)


class _ChunkedPart(NamedTuple):
    """The attention of one part, computed chunk by chunk."""

    part: Part
    spec: AttentionSpec
    rng: Tensor | None
    origin: tuple[int, int, int, int]
    entries: EntryOrigins | None
    key_chunk: int

    @property
    def draws_from_generator(self) -> bool:
        """Whether recomputation must restore the state of PyTorch's generator."""
        return self.spec.dropout > 0 and self.rng is None

    def attend(self, sinks: Tensor | None, query_chunk: int) -> tuple[Tensor, Tensor]:
        k, v = (_chunks(x.transpose(1, 2), self.key_chunk) for x in (self.part.k, self.part.v))
        # checkpoint detects in-place changes only of tensors that are its arguments
        tensors = (*k, *v, *self.spec.mask.tensors, *(() if self.rng is None else (self.rng,)))
        outs, lses, start = [], [], 0
        for q in _chunks(self.part.q.transpose(1, 2), query_chunk):
            queries = range(start, start + q.shape[2])
            out, lse = self.checkpointed(self.attend_queries, q, self.part.slopes, sinks, queries, len(k), *tensors)
            outs.append(out)
            lses.append(lse)
            start = queries.stop
        return torch.cat(outs, 2).transpose(1, 2), torch.cat(lses, 2)

    def checkpointed(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the function so that the backward recomputes it; ``torch.func`` has no checkpoints and saves all."""
        tensors = (x for x in arguments if isinstance(x, Tensor))
        if transforming() or not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
            return function(*arguments)
        return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=self.draws_from_generator)

    def attend_queries(
        self,
        q: Tensor,
        slopes: Tensor | None,
        sinks: Tensor | None,
        queries: range,
        n_chunks: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Compute the output and log-sum-exp of one chunk of queries, (batch, heads, queries, ...).

        The first ``n_chunks`` of ``tensors`` are chunks of keys, the next ``n_chunks`` are chunks of values.
        """
        k, v = tensors[:n_chunks], tensors[n_chunks : 2 * n_chunks]
        rows, dtype = q.shape[:3], statistics_dtype(q)
        row_max = q.new_full(rows, float("-inf"), dtype=dtype)
        total = q.new_zeros(rows, dtype=dtype)
        out = q.new_zeros(*rows, v[0].shape[-1], dtype=dtype)
        for chunk in _chunks_in_band(self.spec, self.part.entries[0], queries, self.key_chunk):
            keys = range(chunk * self.key_chunk, chunk * self.key_chunk + k[chunk].shape[2])
            # separate arguments, because a checkpoint keeps tensors inside a tuple alive until the backward
            row_max, total, out = self.checkpointed(
                self.update, row_max, total, out, q, k[chunk], v[chunk], slopes, queries, keys
            )
        if sinks is not None:
            sink = sinks.to(dtype)[:, None]
            previous_max, row_max = row_max, torch.maximum(row_max, sink.detach())
            shift = _finite(row_max)
            rescale = torch.exp(previous_max - shift)
            total, out = total * rescale + torch.exp(sink - shift), out * rescale[..., None]
        has_weight = total != 0  # True for NaN
        total = torch.where(has_weight, total, 1.0)
        lse = torch.where(has_weight, _finite(row_max) + total.log(), float("-inf"))
        return (out / total[..., None]).to(q.dtype), lse

    def update(
        self,
        row_max: Tensor,
        total: Tensor,
        out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slopes: Tensor | None,
        queries: range,
        keys: range,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Update the online softmax with one chunk of keys.

        Args:
            row_max, total: maximum and sum of the weights so far, (batch, heads, queries).
            out: output so far, not divided by ``total``, (batch, heads, queries, v_head_dim).
            q: (batch, heads, queries, head_dim).
            k, v: (batch, kv_heads, keys, head_dim).

        Returns:
            The updated row_max, total and out. The maximum is detached, since the result does not depend on it.
        """
        mask = visible_pairs(self.spec.mask, self.part, queries, keys)
        seen = seen_keys(self.spec.mask, self.part, mask)
        if seen is not None:
            k, v = (torch.where(seen[..., None], x, 0.0) for x in (k, v))
        batch, n_heads, len_q, _ = q.shape
        kv_heads, dtype = k.shape[1], statistics_dtype(q)
        # query heads that share keys are stacked in one product; scaling before rounding avoids overflow in fp16
        grouped = (batch * kv_heads, n_heads // kv_heads * len_q, -1)
        scores = torch.baddbmm(
            q.new_empty(()), q.reshape(grouped), k.flatten(0, 1).mT, beta=0, alpha=self.spec.scale_for(q.shape[-1])
        )
        scores = scores.view(batch, n_heads, len_q, -1).to(dtype)
        if self.spec.softcap:
            scores = self.spec.softcap * torch.tanh(scores / self.spec.softcap)
        if slopes is not None:
            scores = scores - slopes.to(dtype)[:, :, None, None] * alibi_distance(
                self.part.entries[0], q.device, queries, keys
            )
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        previous_max, row_max = row_max, torch.maximum(row_max, scores.detach().amax(-1))
        shift = _finite(row_max)
        rescale = torch.exp(previous_max - shift)
        weights = torch.exp(scores - shift[..., None])
        total = total * rescale + weights.sum(-1)
        if self.spec.dropout > 0:
            keep = dropout_keep(self.part, self.spec, self.rng, self.origin, self.entries, queries, keys)
            weights = weights * keep * (256 / self.spec.keep_threshold)
        values = (weights.to(v.dtype).view(grouped) @ v.flatten(0, 1)).view(batch, n_heads, len_q, -1)
        return row_max, total, out * rescale[..., None] + values.to(dtype)


def _chunks(x: Tensor, chunk: int) -> list[Tensor]:
    """Slice (batch, heads, seqlen, head_dim) into views of up to ``chunk`` positions.

    Slices are used because autograd tracks the views that ``split`` returns only as a group.
    """
    return [x[:, :, start : start + chunk] for start in range(0, x.shape[2], chunk)]


def _finite(row_max: Tensor) -> Tensor:
    """Return the maximum to subtract: 0 instead of -inf, since -inf minus -inf is NaN."""
    return torch.where(row_max == float("-inf"), 0.0, row_max)


def _chunks_in_band(spec: AttentionSpec, entry: Entry, queries: range, key_chunk: int) -> range:
    """Return the chunks of keys that intersect the mask's band for any of the queries."""
    band, shift = spec.mask.lower(), entry.len_k - entry.len_q
    first = 0 if band.left < 0 else max(queries.start + shift - band.left, 0)
    stop = entry.len_k if band.right < 0 else min(queries.stop + shift + band.right, entry.len_k)
    return range(first // key_chunk, -(-max(stop, 0) // key_chunk))
