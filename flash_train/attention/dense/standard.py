"""Standard attention, forward and backward, as separate operations that hold S and P in memory.

What users compare with, for time and for memory. Source: FlashAttention (Dao et al., 2022, arXiv:2205.14135),
algorithm 0 and, in appendix B.4, algorithm 3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_train.attention.dense.sequences import (
    Part,
    attend_nothing,
    distance,
    join_lse,
    join_out,
    kept,
    only_seen,
    opened,
    seen_keys,
    split,
    statistics_dtype,
    visible,
)
from flash_train.attention.packing import Packing
from flash_train.attention.spec import AttentionSpec
from flash_train.attention.transforms import first_order, refuse_jvp, refuse_vmap, transforming


def standard_attention(
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
) -> tuple[Tensor, Tensor]:
    """Output and natural log-sum-exp, differentiable once; every spec.

    S and P are in the dtype of the inputs, (batch, heads, seqlen_q, seqlen_k), or one entry's at a time where packed;
    the softmax itself computes in fp32. From the forward to the backward it keeps P, the dropout mask (a byte per
    pair), and with a softcap the capped scores.

    Args:
        q: (batch, seqlen_q, heads, head_dim), packed (total_q, heads, head_dim).
        k: (batch, seqlen_k, kv_heads, head_dim), packed (total_k, kv_heads, head_dim).
        v: as k, with a head_dim of its own.
        rng: int64 (2,), the dropout state of the exact mask; without it the mask is drawn from PyTorch's generator.
        origin: (entry, head, query, key) of the call's first element in the whole dropout mask.
        alibi_slopes: (heads,) or (entries, heads).
        sinks: (heads,).

    Returns:
        out like q with v's head_dim; lse (batch, heads, seqlen_q), packed (heads, total_q), fp32 (fp64 for fp64), as
        exact as the dtype of P: it comes from the largest weight of each row. Queries that see no key have output 0
        and log-sum-exp -inf (with sinks: the sink).
    """
    outs, lses = [], []
    for part in split(q, k, v, packing, alibi_slopes):
        out, lse = attend_nothing(part, sinks) if part.empty else _attend(part, spec, rng, origin, sinks)
        outs.append(out)
        lses.append(lse)
    return join_out(outs, q, v, packing), join_lse(lses, q, packing)


def _attend(
    part: Part, spec: AttentionSpec, rng: Tensor | None, origin: tuple[int, int, int, int], sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    rule = visible(spec.mask, part)
    mask, seeing = opened(rule)
    seen = seen_keys(spec.mask, part, rule)
    keep = kept(part, spec, rng, origin) if spec.dropout > 0 else None
    away = None if part.slopes is None else distance(part.entries[0], part.q.device)
    scale, rate = spec.scale_for(part.q.shape[-1]), spec.keep_threshold / 256
    function = _TransformedStandard if transforming() else _Standard
    out, lse, *_ = function.apply(
        part.q, only_seen(part.k, seen), only_seen(part.v, seen), part.slopes, sinks, mask, seeing, keep, away,
        scale, spec.softcap, rate,
    )  # fmt: skip
    return out, lse


class _Standard(torch.autograd.Function):
    """Algorithm 0 and algorithm 3. The heads that share keys are rows of one product, (batch * kv_heads, rows, ...).

    The forward also returns what the backward needs, since ``torch.func`` sets the context up from the outputs.
    """

    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slopes: Tensor | None,
        sinks: Tensor | None,
        mask: Tensor | None,
        seeing: Tensor | None,
        keep: Tensor | None,
        away: Tensor | None,
        scale: float,
        softcap: float,
        rate: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        batch, len_q, n_heads, _ = q.shape
        kv_heads = k.shape[2]
        scores = _product(_stack(q, kv_heads), _stack(k, kv_heads).mT, scale).view(batch, n_heads, len_q, -1)
        capped = None
        if softcap:
            capped = scores.div_(softcap).tanh_()
            scores = capped * softcap
        if slopes is not None:
            scores.addcmul_(slopes[:, :, None, None], away, value=-1)
        if mask is not None:
            scores.masked_fill_(~mask, float("-inf"))
        weights = scores.softmax(-1, dtype=scores.dtype)  # which CUDA's autocast would make fp32
        top, at = scores.max(-1, keepdim=True)
        del scores
        stats = statistics_dtype(q)
        lse = top.to(stats) - weights.gather(-1, at).to(stats).log()
        if seeing is not None:
            lse = torch.where(seeing, lse, float("-inf"))
        # P = share * weights: a row's share is 0 where it sees nothing, and less than 1 where a sink takes part
        share = None if seeing is None else seeing.to(stats)
        if sinks is not None:
            whole = torch.logaddexp(lse, sinks.to(stats)[:, None, None])
            share, lse = torch.where(lse > float("-inf"), torch.exp(lse - whole), 0.0), whole
        dropped = weights if keep is None else weights * keep
        out = _product(dropped.view(batch * kv_heads, -1, k.shape[1]), _stack(v, kv_heads), 1 / rate)
        out = out.view(batch, n_heads, len_q, -1)
        if share is not None:
            out = (out * share).to(q.dtype)
        return out.transpose(1, 2), lse[..., 0], weights, capped, share

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        q, k, v, slopes, sinks, _, seeing, keep, away, scale, _, rate = inputs
        out, lse, weights, capped, share = output
        ctx.save_for_backward(q, k, v, sinks, weights, keep, capped, away, seeing, share, out, lse)
        ctx.constants = (scale, rate, None if slopes is None else (slopes.shape[0], slopes.dtype))
        ctx.mark_non_differentiable(*(x for x in output[2:] if x is not None))
        ctx.set_materialize_grads(False)  # zeros for the weights would be one more tensor of all pairs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: a checkpoint unpacks them a single time
        with torch.no_grad():
            gradients = _Standard.gradients(ctx, saved, *grads)
        return first_order(gradients, *grads[:2], *saved[:4])

    @staticmethod
    def gradients(
        ctx: Any, saved: tuple[Any, ...], dout: Tensor | None, dlse: Tensor | None, *_: Any
    ) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, weights, keep, capped, away, seeing, share, out, lse = saved
        dout = torch.zeros_like(out) if dout is None else dout
        dlse = torch.zeros_like(lse) if dlse is None else dlse
        scale, rate, slopes_like = ctx.constants
        batch, len_q, n_heads, _ = q.shape
        kv_heads, len_k = k.shape[2:0:-1]
        pairs, rows = weights.shape, (batch * kv_heads, -1, len_k)

        # dS = P (dP - D + dlse), D = rowsum(dO * O); both sides of it carry the row's share
        delta = (dout.to(lse.dtype) * out).sum(-1).transpose(1, 2) - dlse  # (batch, heads, len_q)
        dsinks = None
        if sinks is not None and ctx.needs_input_grad[4]:
            of_sink = torch.where(lse != float("-inf"), torch.exp(sinks.to(lse.dtype)[:, None] - lse) * delta, 0.0)
            dsinks = -of_sink.sum((0, 2)).to(sinks.dtype)
        dout, delta = dout.transpose(1, 2), delta[..., None]
        if share is not None:
            dout, delta = (dout * share).to(q.dtype), delta * share
        if seeing is not None:  # nothing flows through the log-sum-exp of a row that is -inf, whatever its gradient is
            delta = torch.where(seeing, delta, 0.0)
        dout = _stack(dout.transpose(1, 2), kv_heads)

        dropped = weights if keep is None else weights * keep
        dv = _product(dropped.view(rows).mT, dout, 1 / rate)
        del dropped
        dscores = _product(dout, _stack(v, kv_heads).mT, 1 / rate).view(pairs)  # dP
        if keep is not None:
            dscores.mul_(keep)
        dscores.sub_(delta).mul_(weights)
        dslopes = None
        if slopes_like is not None and ctx.needs_input_grad[3]:
            dslopes = -(dscores.to(away.dtype) * away).sum((2, 3))  # fp32: one more tensor of all pairs
            dslopes = (dslopes.sum(0, keepdim=True) if slopes_like[0] == 1 else dslopes).to(slopes_like[1])
        if capped is not None:  # d tanh(x) = 1 - tanh(x)^2
            dscores.mul_(torch.addcmul(capped.new_ones(()), capped, capped, value=-1))
        dq = _product(dscores.view(rows), _stack(k, kv_heads), scale)
        dk = _product(dscores.view(rows).mT, _stack(q, kv_heads), scale)
        dq, dk, dv = (_unstack(x, batch, like.shape[2]) for x, like in ((dq, q), (dk, k), (dv, v)))
        return dq, dk, dv, dslopes, dsinks, None, None, None, None, None, None, None


class _TransformedStandard(_Standard):
    """``_Standard`` for ``torch.func``: ``torch.compile`` traces no Function that has these rules."""

    jvp = staticmethod(refuse_jvp)
    vmap = staticmethod(refuse_vmap)


def _stack(x: Tensor, kv_heads: int) -> Tensor:
    """(batch, seqlen, heads, head_dim) to (batch * kv_heads, heads / kv_heads * seqlen, head_dim)."""
    batch, length, heads, head_dim = x.shape
    return x.transpose(1, 2).reshape(batch * kv_heads, heads // kv_heads * length, head_dim)


def _unstack(x: Tensor, batch: int, heads: int) -> Tensor:
    """The inverse of ``_stack``."""
    return x.view(batch, heads, -1, x.shape[-1]).transpose(1, 2)


def _product(a: Tensor, b: Tensor, factor: float) -> Tensor:
    """factor * a @ b, the factor before rounding and without a pass over memory of its own."""
    return torch.baddbmm(a.new_empty(()), a, b, beta=0, alpha=factor)  # beta = 0: what is added is not read
