"""Attention in chunks with memory linear in length (Rabe and Staats, 2021, arXiv:2112.05682), in plain PyTorch.

Each chunk of queries walks the keys chunk by chunk and carries the running maximum, sum and output of the online
softmax. The backward keeps none of it: a chunk of queries is computed again when its turn comes, and within it each
step over a chunk of keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flash_train.attention.dense.sequences import (
    Part,
    attend_nothing,
    distance,
    join_lse,
    join_out,
    kept,
    seen_keys,
    split,
    statistics_dtype,
    visible,
)
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
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    query_chunk: int = QUERY_CHUNK,
    key_chunk: int = KEY_CHUNK,
) -> tuple[Tensor, Tensor]:
    """Output and natural log-sum-exp, differentiable; every spec.

    Beside inputs and outputs it holds, per batch row and head, a few tensors of query_chunk x key_chunk and of
    seqlen x head_dim. Chunks of keys outside the mask's band are not visited. A training step computes the scores three
    times: in the forward, and twice again in the backward.

    Args:
        q: (batch, seqlen_q, heads, head_dim), packed (total_q, heads, head_dim).
        k: (batch, seqlen_k, kv_heads, head_dim), packed (total_k, kv_heads, head_dim).
        v: as k, with a head_dim of its own.
        rng: int64 (2,), the dropout state of the exact mask; without it the mask is drawn from PyTorch's generator.
        origin: (entry, head, query, key) of the call's first element in the whole dropout mask.
        alibi_slopes: (heads,) or (entries, heads).
        sinks: (heads,).
        query_chunk, key_chunk: positions per chunk.

    Returns:
        out like q with v's head_dim; lse (batch, heads, seqlen_q), packed (heads, total_q), fp32 (fp64 for fp64).
        Queries that see no key have output 0 and log-sum-exp -inf (with sinks: the sink).

    Raises:
        ValueError: a chunk without positions.
    """
    if query_chunk < 1 or key_chunk < 1:
        raise ValueError(f"query_chunk={query_chunk}, key_chunk={key_chunk}: must be at least 1")
    outs, lses = [], []
    for part in split(q, k, v, packing, alibi_slopes):
        if part.empty:
            out, lse = attend_nothing(part, sinks)
        else:
            out, lse = _Walk(part, spec, rng, origin, key_chunk).attend(sinks, query_chunk)
        outs.append(out)
        lses.append(lse)
    return join_out(outs, q, v, packing), join_lse(lses, q, packing)


class _Walk(NamedTuple):
    """One part's walk over its keys."""

    part: Part
    spec: AttentionSpec
    rng: Tensor | None
    origin: tuple[int, int, int, int]
    key_chunk: int

    @property
    def draws(self) -> bool:
        """Whether PyTorch's generator must be put back when a chunk is computed again."""
        return self.spec.dropout > 0 and self.rng is None

    def attend(self, sinks: Tensor | None, query_chunk: int) -> tuple[Tensor, Tensor]:
        k, v = (_cut(x.transpose(1, 2), self.key_chunk) for x in (self.part.k, self.part.v))
        # the checkpoint watches tensors that are its own arguments: a change before the backward raises PyTorch's error
        tensors = (*k, *v, *self.spec.mask.tensors, *(() if self.rng is None else (self.rng,)))
        outs, lses, start = [], [], 0
        for q in _cut(self.part.q.transpose(1, 2), query_chunk):
            queries = range(start, start + q.shape[2])
            out, lse = self.recomputed(self.queries, q, self.part.slopes, sinks, queries, len(k), *tensors)
            outs.append(out)
            lses.append(lse)
            start = queries.stop
        return torch.cat(outs, 2).transpose(1, 2), torch.cat(lses, 2)

    def recomputed(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The function's result; the backward computes it again. ``torch.func`` has no such hook: it keeps all."""
        if transforming():
            return function(*arguments)
        return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=self.draws)

    def queries(
        self,
        q: Tensor,
        slopes: Tensor | None,
        sinks: Tensor | None,
        queries: range,
        n_chunks: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of one chunk of queries, (batch, heads, queries, ...).

        ``tensors`` begin with ``n_chunks`` chunks of keys and as many of values.
        """
        k, v = tensors[:n_chunks], tensors[n_chunks : 2 * n_chunks]
        rows, dtype = q.shape[:3], statistics_dtype(q)
        top = q.new_full(rows, float("-inf"), dtype=dtype)
        total = q.new_zeros(rows, dtype=dtype)
        out = q.new_zeros(*rows, v[0].shape[-1], dtype=dtype)
        for chunk in _chunks_in_band(self.spec, self.part.entries[0], queries, self.key_chunk):
            keys = range(chunk * self.key_chunk, chunk * self.key_chunk + k[chunk].shape[2])
            # tensors as arguments of their own: what a structure holds would stay alive until the backward
            top, total, out = self.recomputed(self.step, top, total, out, q, k[chunk], v[chunk], slopes, queries, keys)
        if sinks is not None:
            sink = sinks.to(dtype)[:, None]
            before, top = top, torch.maximum(top, sink.detach())
            shift = _finite(top)
            rescale = torch.exp(before - shift)
            total, out = total * rescale + torch.exp(sink - shift), out * rescale[..., None]
        seeing = total != 0  # also what is not a number
        total = torch.where(seeing, total, 1.0)
        lse = torch.where(seeing, _finite(top) + total.log(), float("-inf"))
        return (out / total[..., None]).to(q.dtype), lse

    def step(
        self,
        top: Tensor,
        total: Tensor,
        out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slopes: Tensor | None,
        queries: range,
        keys: range,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One chunk of keys taken into the online softmax: its maximum and sum (batch, heads, queries), and the output.

        The maximum is a constant to the gradient: the result does not depend on it.
        """
        mask = visible(self.spec.mask, self.part, queries, keys)
        seen = seen_keys(self.spec.mask, self.part, mask)
        if seen is not None:
            k, v = (torch.where(seen[..., None], x, 0.0) for x in (k, v))
        batch, n_heads, len_q, _ = q.shape
        kv_heads, dtype = k.shape[1], statistics_dtype(q)
        # heads that share keys are rows of one product; the scale comes before rounding: fp16 ends at 65,504
        grouped = (batch * kv_heads, n_heads // kv_heads * len_q, -1)
        scores = torch.baddbmm(
            q.new_empty(()), q.reshape(grouped), k.flatten(0, 1).mT, beta=0, alpha=self.spec.scale_for(q.shape[-1])
        )
        scores = scores.view(batch, n_heads, len_q, -1).to(dtype)
        if self.spec.softcap:
            scores = self.spec.softcap * torch.tanh(scores / self.spec.softcap)
        if slopes is not None:
            scores = scores - slopes.to(dtype)[:, :, None, None] * distance(
                self.part.entries[0], q.device, queries, keys
            )
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        before, top = top, torch.maximum(top, scores.detach().amax(-1))
        shift = _finite(top)
        rescale = torch.exp(before - shift)
        weights = torch.exp(scores - shift[..., None])
        total = total * rescale + weights.sum(-1)
        if self.spec.dropout > 0:
            keep = kept(self.part, self.spec, self.rng, self.origin, queries, keys)
            weights = weights * keep * (256 / self.spec.keep_threshold)
        values = (weights.to(v.dtype).view(grouped) @ v.flatten(0, 1)).view(batch, n_heads, len_q, -1)
        return top, total, out * rescale[..., None] + values.to(dtype)


def _cut(x: Tensor, chunk: int) -> list[Tensor]:
    """Pieces of (batch, heads, seqlen, head_dim), as views that autograd follows one by one."""
    return [x[:, :, start : start + chunk] for start in range(0, x.shape[2], chunk)]


def _finite(top: Tensor) -> Tensor:
    """The maximum to subtract: 0 where nothing has been seen, since -inf minus itself would be NaN."""
    return torch.where(top == float("-inf"), 0.0, top)


def _chunks_in_band(spec: AttentionSpec, entry: Entry, queries: range, key_chunk: int) -> range:
    """Chunks of keys that the mask's band lets any of the queries see."""
    band, shift = spec.mask.lower(), entry.len_k - entry.len_q
    first = 0 if band.left < 0 else max(queries.start + shift - band.left, 0)
    stop = entry.len_k if band.right < 0 else min(queries.stop + shift + band.right, entry.len_k)
    return range(first // key_chunk, -(-max(stop, 0) // key_chunk))
