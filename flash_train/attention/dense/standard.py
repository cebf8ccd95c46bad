"""Standard attention: separate operations that hold S and P in memory, in the forward and in the backward.

It is the baseline for time and memory. Source: FlashAttention (Dao et al., 2022, arXiv:2205.14135), algorithm 0 and
algorithm 3 (appendix B.4).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_train.attention.dense.sequences import (
    Part,
    alibi_distance,
    attend_no_pairs,
    dropout_keep,
    join_lse,
    join_out,
    masks_of,
    split_call,
    statistics_dtype,
    zero_unseen,
)
from flash_train.attention.dropout import EntryOrigins
from flash_train.attention.packing import Packing
from flash_train.attention.spec import AttentionSpec
from flash_train.attention.transforms import forbid_second_gradient, refuse_jvp, refuse_vmap, transforming


def standard_attention(
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
    """Compute the output and the natural log-sum-exp for every spec; differentiable once.

    S and P are (batch, heads, seqlen_q, seqlen_k) in the dtype of the inputs; packed calls run one entry at a time. The
    softmax computes in fp32. For the backward it saves P, the dropout mask (one byte per pair), and with a softcap also
    the capped scores.

    Args:
        q: (batch, seqlen_q, heads, head_dim), packed (total_q, heads, head_dim).
        k: (batch, seqlen_k, kv_heads, head_dim), packed (total_k, kv_heads, head_dim).
        v: (batch, seqlen_k, kv_heads, v_head_dim), packed (total_k, kv_heads, v_head_dim).
        rng: int64 (2,), the dropout state of the exact mask; None draws a mask from PyTorch's generator.
        origin: (entry, head, query, key) of the call's first element in the whole dropout mask.
        entries: the first element of each entry, if entries are pieces of longer sequences.
        alibi_slopes: (heads,) or (entries, heads).
        sinks: (heads,).

    Returns:
        out (batch, seqlen_q, heads, v_head_dim), packed (total_q, heads, v_head_dim), in the dtype of q; lse (batch,
        heads, seqlen_q), packed (heads, total_q), fp32 (fp64 for fp64). The log-sum-exp is computed from the largest
        weight of each row, so it is only as precise as the dtype of P. Queries that attend to no key have output 0 and
        log-sum-exp -inf, or the sink if there are sinks.
    """
    outs, lses = [], []
    for part in split_call(q, k, v, packing, alibi_slopes):
        out, lse = attend_no_pairs(part, sinks) if part.empty else _attend(part, spec, rng, origin, entries, sinks)
        outs.append(out)
        lses.append(lse)
    return join_out(outs, q, v, packing), join_lse(lses, q, packing)


def _attend(
    part: Part,
    spec: AttentionSpec,
    rng: Tensor | None,
    origin: tuple[int, int, int, int],
    entries: EntryOrigins | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    mask, has_keys, seen = masks_of(spec.mask, part)
    keep = dropout_keep(part, spec, rng, origin, entries) if spec.dropout > 0 else None
    distance = None if part.slopes is None else alibi_distance(part.entries[0], part.q.device)
    scale, rate = spec.scale_for(part.q.shape[-1]), spec.keep_threshold / 256
    function = _TransformedStandard if transforming() else _Standard
    q, k, v = part.q, zero_unseen(part.k, seen), zero_unseen(part.v, seen)
    if torch.compiler.is_compiling():  # it cannot trace a Function that gets a tensor twice
        k, v = k.view_as(k), v.view_as(v)
    out, lse, *_ = function.apply(
        q, k, v, part.slopes, sinks, mask, has_keys, keep,
        distance, scale, spec.softcap, rate,
    )  # fmt: skip
    return out, lse


class _Standard(torch.autograd.Function):
    """The autograd function of algorithms 0 and 3.

    Query heads that share keys are stacked in one product, (batch * kv_heads, rows, ...).

    The forward also returns the tensors that the backward needs, because ``torch.func`` saves only inputs and outputs.
    """

    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slopes: Tensor | None,
        sinks: Tensor | None,
        mask: Tensor | None,
        has_keys: Tensor | None,
        keep: Tensor | None,
        distance: Tensor | None,
        scale: float,
        softcap: float,
        rate: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        batch, len_q, n_heads, _ = q.shape
        kv_heads = k.shape[2]
        scores = _scaled_matmul(_stack(q, kv_heads), _stack(k, kv_heads).mT, scale).view(batch, n_heads, len_q, -1)
        capped = None
        if softcap:
            capped = scores.div_(softcap).tanh_()
            scores = capped * softcap
        if slopes is not None:
            assert distance is not None  # it is given with the slopes
            scores.addcmul_(slopes[:, :, None, None], distance, value=-1)
        if mask is not None:
            scores.masked_fill_(~mask, float("-inf"))
        weights = scores.softmax(-1, dtype=scores.dtype)  # autocast on CUDA would return fp32
        row_max, index = scores.max(-1, keepdim=True)
        del scores
        stats = statistics_dtype(q)
        lse = row_max.to(stats) - weights.gather(-1, index).to(stats).log()
        if has_keys is not None:
            lse = torch.where(has_keys, lse, float("-inf"))
        # P = share * weights; share is 0 in rows without a key, and less than 1 if there is a sink
        share = None if has_keys is None else has_keys.to(stats)
        if sinks is not None:
            with_sink = torch.logaddexp(lse, sinks.to(stats)[:, None, None])
            share, lse = torch.where(lse > float("-inf"), torch.exp(lse - with_sink), 0.0), with_sink
        dropped = weights if keep is None else weights * keep
        out = _scaled_matmul(dropped.view(batch * kv_heads, -1, k.shape[1]), _stack(v, kv_heads), 1 / rate)
        out = out.view(batch, n_heads, len_q, -1)
        if share is not None:
            out = (out * share).to(q.dtype)
        return out.transpose(1, 2), lse[..., 0], weights, capped, share

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        q, k, v, slopes, sinks, _, has_keys, keep, distance, scale, _, rate = inputs
        out, lse, weights, capped, share = output
        ctx.save_for_backward(q, k, v, sinks, weights, keep, capped, distance, has_keys, share, out, lse)
        ctx.constants = (scale, rate, None if slopes is None else (slopes.shape[0], slopes.dtype))
        ctx.mark_non_differentiable(*(x for x in output[2:] if x is not None))
        ctx.set_materialize_grads(False)  # avoids a tensor of zeros over all pairs, the gradient of the weights

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once, because a checkpoint can unpack them only once
        with torch.no_grad():
            gradients = _Standard.gradients(ctx, saved, *grads)
        return forbid_second_gradient(gradients, *grads[:2], *saved[:4])

    @staticmethod
    def gradients(
        ctx: Any, saved: tuple[Any, ...], dout: Tensor | None, dlse: Tensor | None, *_: Any
    ) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, weights, keep, capped, distance, has_keys, share, out, lse = saved
        dout = torch.zeros_like(out) if dout is None else dout
        dlse = torch.zeros_like(lse) if dlse is None else dlse
        scale, rate, slopes_like = ctx.constants
        batch, len_q, n_heads, _ = q.shape
        kv_heads, len_k = k.shape[2:0:-1]
        pairs, rows = weights.shape, (batch * kv_heads, -1, len_k)

        # dS = P (dP - D + dlse) with D = rowsum(dO * O); P and both terms include the row's share
        delta = (dout.to(lse.dtype) * out).sum(-1).transpose(1, 2) - dlse  # (batch, heads, len_q)
        dsinks = None
        if sinks is not None and ctx.needs_input_grad[4]:
            per_row = torch.where(lse != float("-inf"), torch.exp(sinks.to(lse.dtype)[:, None] - lse) * delta, 0.0)
            dsinks = -per_row.sum((0, 2)).to(sinks.dtype)
        dout, delta = dout.transpose(1, 2), delta[..., None]
        if share is not None:
            dout, delta = (dout * share).to(q.dtype), delta * share
        if has_keys is not None:  # a log-sum-exp of -inf is a constant: no gradient flows through it
            delta = torch.where(has_keys, delta, 0.0)
        dout = _stack(dout.transpose(1, 2), kv_heads)

        dropped = weights if keep is None else weights * keep
        dv = _scaled_matmul(dropped.view(rows).mT, dout, 1 / rate)
        del dropped
        dscores = _scaled_matmul(dout, _stack(v, kv_heads).mT, 1 / rate).view(pairs)  # dP
        if keep is not None:
            dscores.mul_(keep)
        dscores.sub_(delta).mul_(weights)
        dslopes = None
        if slopes_like is not None and ctx.needs_input_grad[3]:
            dslopes = -(dscores.to(distance.dtype) * distance).sum((2, 3))  # fp32: one more tensor of all pairs
            dslopes = (dslopes.sum(0, keepdim=True) if slopes_like[0] == 1 else dslopes).to(slopes_like[1])
        if capped is not None:  # d tanh(x) = 1 - tanh(x)^2
            dscores.mul_(torch.addcmul(capped.new_ones(()), capped, capped, value=-1))
        dq = _scaled_matmul(dscores.view(rows), _stack(k, kv_heads), scale)
        dk = _scaled_matmul(dscores.view(rows).mT, _stack(q, kv_heads), scale)
        dq, dk, dv = (_unstack(x, batch, like.shape[2]) for x, like in ((dq, q), (dk, k), (dv, v)))
        return dq, dk, dv, dslopes, dsinks, None, None, None, None, None, None, None


class _TransformedStandard(_Standard):
    """``_Standard`` for ``torch.func``. ``torch.compile`` cannot trace a Function that defines jvp or vmap."""

    jvp = staticmethod(refuse_jvp)
    vmap = staticmethod(refuse_vmap)


def _stack(x: Tensor, kv_heads: int) -> Tensor:
    """Reshape (batch, seqlen, heads, head_dim) to (batch * kv_heads, heads / kv_heads * seqlen, head_dim)."""
    batch, length, heads, head_dim = x.shape
    return x.transpose(1, 2).reshape(batch * kv_heads, heads // kv_heads * length, head_dim)


def _unstack(x: Tensor, batch: int, heads: int) -> Tensor:
    """Undo ``_stack``."""
    return x.view(batch, heads, -1, x.shape[-1]).transpose(1, 2)


def _scaled_matmul(a: Tensor, b: Tensor, factor: float) -> Tensor:
    """Compute factor * a @ b. The factor is applied before rounding and needs no pass over memory."""
    return torch.baddbmm(a.new_empty(()), a, b, beta=0, alpha=factor)  # with beta = 0 the first argument is not read
