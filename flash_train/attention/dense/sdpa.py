"""PyTorch's own fused attention."""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
from torch import Tensor
from torch._C import _nn

from flash_train.attention.dense.sequences import (
    Part,
    alibi_distance,
    attend_no_pairs,
    join_out,
    masks_of,
    repeat_heads,
    split_call,
    statistics_dtype,
    zero_unseen,
)
from flash_train.attention.index_tensors import contiguous_tensor
from flash_train.attention.masks import Band, Causal
from flash_train.attention.packing import Packing
from flash_train.attention.spec import AttentionSpec
from flash_train.attention.tracing import assume_constant_result, has_no_values


def sdpa_unavailable(spec: AttentionSpec, *, sinks: bool, exact: bool = False) -> str | None:
    """Return why PyTorch's fused attention cannot compute this, or None if it can.

    Args:
        sinks: whether there are sinks.
        exact: whether the log-sum-exp or this project's dropout mask is required.
    """
    if spec.softcap:
        return f"it has no softcap ({spec.softcap:g} was given)"
    if sinks:
        return "it has no sinks"
    if exact:
        return "it gives no log-sum-exp and takes no rng"
    return None


def sdpa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    packing: Packing | None = None,
    *,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Run PyTorch's ``scaled_dot_product_attention``.

    Packed calls use ``varlen_attn`` if it applies, else one call per entry. If all entries are known to have the same
    length and to fill the tensors, they run as a padded batch. Full and square causal masks use PyTorch's
    ``is_causal``; other masks become a bool tensor of all pairs, and ALiBi an additive tensor in the dtype of q.
    Dropout uses PyTorch's generator, and its probability is not rounded.

    Args:
        q: (batch, seqlen_q, heads, head_dim), packed (total_q, heads, head_dim).
        k: (batch, seqlen_k, kv_heads, head_dim), packed (total_k, kv_heads, head_dim).
        v: (batch, seqlen_k, kv_heads, v_head_dim), packed (total_k, kv_heads, v_head_dim).
        alibi_slopes: (heads,) or (entries, heads); may require a gradient.

    Returns:
        (batch, seqlen_q, heads, v_head_dim), packed (total_q, heads, v_head_dim), in the dtype of q; 0 for queries that
        attend to no key and for rows that belong to no entry.

    Raises:
        ValueError: a spec with a softcap.
    """
    missing = sdpa_unavailable(spec, sinks=False)
    if missing is not None:
        raise ValueError(f"PyTorch's fused attention cannot run this: {missing}")
    if packing is not None and alibi_slopes is None and isinstance(spec.mask, Band):
        if _is_batch(q, k, packing):
            q, k, v = (x.unflatten(0, (len(packing.lengths or ()), -1)) for x in (q, k, v))
            return sdpa_attention(q, k, v, spec).flatten(0, 1)
        if _varlen_applies(q, v, spec, packing):
            return _varlen(q, k, v, spec, packing)
    outs = [_attend(part, spec) for part in split_call(q, k, v, packing, alibi_slopes)]
    return join_out(outs, q, v, packing)


def _attend(part: Part, spec: AttentionSpec) -> Tensor:
    if part.empty:
        return attend_no_pairs(part)[0]
    # PyTorch's is_causal aligns sequences at their beginnings
    is_causal = isinstance(spec.mask, Causal) and _is_square(part.q, part.k) and part.slopes is None
    mask, has_keys, seen = (None, None, None) if is_causal else masks_of(spec.mask, part)
    q, k, v = part.q, zero_unseen(part.k, seen), zero_unseen(part.v, seen)
    grouped = q.shape[2] != k.shape[2]
    if grouped and q.device.type == "cpu":  # on the CPU the backward of enable_gqa is eight times slower than copies
        k, v = repeat_heads(k, v, q.shape[2])
        grouped = False
    if part.slopes is not None:
        slopes = part.slopes.to(statistics_dtype(q))
        bias = -slopes[:, :, None, None] * alibi_distance(part.entries[0], q.device)
        mask = (bias if mask is None else bias.masked_fill(~mask, float("-inf"))).to(q.dtype)
    # call _nn, because a program may have replaced torch.nn.functional's function by this package
    out = _nn.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=is_causal,
        dropout_p=spec.dropout,
        scale=spec.scale,
        enable_gqa=grouped,
    )
    return (out if has_keys is None else torch.where(has_keys, out, 0.0)).transpose(1, 2)


def _is_square(q: Tensor, k: Tensor) -> bool:
    """Whether there are as many queries as keys; for symbolic lengths, whether this holds for all values."""
    if not has_no_values(q):
        return q.shape[1] == k.shape[1]
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # slow to import

    return statically_known_true(q.shape[1] == k.shape[1])


def _is_batch(q: Tensor, k: Tensor, packing: Packing) -> bool:
    lengths = packing.lengths or ()
    return len(set(lengths)) == 1 and sum(lengths) == q.shape[0] == k.shape[0] > 0


def _varlen_applies(q: Tensor, v: Tensor, spec: AttentionSpec, packing: Packing) -> bool:
    """Whether ``varlen_attn`` can run.

    It needs Ampere or later, 16-bit dtypes, no dropout, and for q, k and v the same head_dim, a multiple of 8. The host
    must know the lengths of the entries or the longest ones.
    """
    return (
        q.is_cuda
        and _has_packed_kernel(q.device)
        and q.dtype in (torch.float16, torch.bfloat16)
        and spec.dropout == 0.0
        and q.shape[-1] % 8 == 0
        and q.shape[-1] == v.shape[-1]
        and (packing.lengths is not None or None not in (packing.max_seqlen_q, packing.max_seqlen_k))
    )


@assume_constant_result
def _has_packed_kernel(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _varlen(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, packing: Packing) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    cu_q, cu_k = contiguous_tensor(packing.cu_seqlens_q), contiguous_tensor(packing.cu_seqlens_k)
    longest_q, longest_k = packing.max_seqlen_q, packing.max_seqlen_k
    if packing.lengths is not None:  # non-empty entries come first: drop the empty ones
        cu_q, cu_k = cu_q[: len(packing.lengths) + 1], cu_k[: len(packing.lengths) + 1]
        longest_q = longest_k = max(packing.lengths, default=1)
    assert longest_q is not None and longest_k is not None  # `_varlen_applies`
    band = cast(Band, spec.mask)
    window = tuple(-1 if bound is None else bound for bound in (band.left, band.right))
    options: dict[str, Any] = {"window_size": window, "scale": spec.scale}
    if q.shape[1] != k.shape[1] and "enable_gqa" in inspect.signature(varlen_attn).parameters:  # torch >= 2.12
        options["enable_gqa"] = True
    if packing.lengths is not None and sum(packing.lengths) == q.shape[0] == k.shape[0]:
        return cast(Tensor, varlen_attn(q, k, v, cu_q, cu_k, longest_q, longest_k, **options))
    # the kernel leaves rows that belong to no entry unwritten, in the output and in the gradients
    inside_q, inside_k = _inside(q, cu_q), _inside(k, cu_k)
    q, k, v = (torch.where(inside, x, 0.0) for inside, x in ((inside_q, q), (inside_k, k), (inside_k, v)))
    out = cast(Tensor, varlen_attn(q, k, v, cu_q, cu_k, longest_q, longest_k, **options))
    return torch.where(inside_q, out, 0.0)


def _inside(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return bool (total, 1, 1), True for rows before the last boundary."""
    return (torch.arange(x.shape[0], device=x.device) < cu_seqlens[-1])[:, None, None]
