"""The public call: validation, dropout state, and dispatch to a backend."""

from __future__ import annotations

from typing import Literal, overload

import torch

from flash_train.attention.autograd import attention_forward
from flash_train.attention.backends import resolve_backend
from flash_train.attention.baselines import sdpa_attention, standard_attention
from flash_train.attention.dropout import RngState, draw_state
from flash_train.attention.reference import reference_attention
from flash_train.attention.spec import AttentionSpec
from flash_train.attention.varlen import Packing

FULL = AttentionSpec()


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: AttentionSpec = ...,
    *,
    packing: Packing | None = ...,
    rng: RngState | None = ...,
    backend: str = ...,
    return_lse: Literal[False] = ...,
) -> torch.Tensor: ...
@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: AttentionSpec = ...,
    *,
    packing: Packing | None = ...,
    rng: RngState | None = ...,
    backend: str = ...,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: AttentionSpec = FULL,
    *,
    packing: Packing | None = None,
    rng: RngState | None = None,
    backend: str = "auto",
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention, ``dropout(softmax(scale * q @ k.T + mask)) @ v``, differentiable.

    Args:
        q: (batch, seqlen_q, heads, head_dim), or (total_q, heads, head_dim) with ``packing``; bf16, fp16 or fp32.
        k, v: (batch, seqlen_k, kv_heads, head_dim), or (total_k, kv_heads, head_dim); kv_heads divides heads.
        spec: mask, scale and dropout probability.
        packing: boundaries of the packed entries; queries see the keys of their own entry only.
        rng: dropout state. Without it one is drawn from PyTorch's generator of the device.
        backend: ``flash`` (this project's kernels), ``sdpa``, ``standard``, ``reference``, or ``auto``.
        return_lse: also return the natural log-sum-exp of the scaled scores, fp32, (batch, heads, seqlen_q), packed
            (heads, total_q); -inf for queries that see nothing; differentiable. ``flash`` and ``reference`` have it.

    Returns:
        out like q, and the log-sum-exp where asked for. Queries that see no key give exactly 0.

    Raises:
        ValueError, TypeError: inputs that do not fit together, or a named backend that cannot run; before any launch.

    Source: FlashAttention-2 (Dao, 2023, arXiv:2307.08691), algorithms 1 and 2; dropout as in FlashAttention
    (arXiv:2205.14135), with the counter map of ``flash_train.attention.dropout``.
    """
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    _validate(q, k, v, packing)
    name, _ = resolve_backend(backend, device=q.device, dtype=q.dtype, head_dim=q.shape[-1])
    if name in ("sdpa", "standard"):
        if rng is not None or return_lse:
            given = "rng" if rng is not None else "return_lse"
            raise ValueError(f"{given} was given with backend={name}: only flash and reference take it")
        return (sdpa_attention if name == "sdpa" else standard_attention)(q, k, v, spec, packing)

    state = None
    if spec.dropout > 0:
        state = draw_state(q.device) if rng is None else rng.as_tensor(q.device)
    if name == "reference":
        out, lse = reference_attention(q, k, v, spec, packing, state)
    else:
        cu_q, cu_k = (None, None) if packing is None else (packing.cu_seqlens_q, packing.cu_seqlens_k)
        out, lse = attention_forward(
            q, k, v, cu_q, cu_k, state, spec.mask.causal, spec.scale_for(q.shape[-1]), spec.keep_threshold
        )
    return (out, lse) if return_lse else out


def _validate(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: Packing | None) -> None:
    rank, layout = (4, "(batch, seqlen, heads, head_dim)") if packing is None else (3, "(total, heads, head_dim)")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != rank:
            raise ValueError(f"{name} has shape {tuple(x.shape)}: must be {layout}" + _packing_hint(packing))
        if x.dtype != q.dtype or x.device != q.device:
            raise TypeError(f"{name} is {x.dtype} on {x.device} and q is {q.dtype} on {q.device}: must be equal")
    if k.shape != v.shape:
        raise ValueError(f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}: must be equal")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q has head_dim {q.shape[-1]} and k {k.shape[-1]}: must be equal")
    if packing is None and q.shape[0] != k.shape[0]:
        raise ValueError(f"q has batch {q.shape[0]} and k {k.shape[0]}: must be equal")
    if k.shape[-2] == 0 or q.shape[-2] % k.shape[-2]:
        raise ValueError(f"q has {q.shape[-2]} heads and k {k.shape[-2]}: q's must be a multiple of k's")
    if packing is not None:
        packing.validate(q.device)


def _packing_hint(packing: Packing | None) -> str:
    return "; packed tensors need packing=Packing(...)" if packing is None else " where packing is given"
