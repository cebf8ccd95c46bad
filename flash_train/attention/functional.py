"""The public call: validation, dropout state, and dispatch to a backend."""

from __future__ import annotations

import warnings
from typing import Any, Literal, cast, overload

import torch

from flash_train.attention.autograd import attend
from flash_train.attention.backends import resolve_backend
from flash_train.attention.dense.operator import DENSE, attend_by_operator, needs_operator
from flash_train.attention.dense.sdpa import sdpa_attention
from flash_train.attention.dropout import EntryOrigins, RngState, draw_state
from flash_train.attention.jagged import unpack
from flash_train.attention.kernels.call import Call, call_of
from flash_train.attention.kernels.families import is_own
from flash_train.attention.masks import Mask
from flash_train.attention.packing import Packing
from flash_train.attention.spec import AttentionSpec

FULL = AttentionSpec()
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
MAX_PLAUSIBLE_HEADS = 256  #: with more heads than this and than rows, q probably has the dimensions swapped


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: AttentionSpec = ...,
    *,
    packing: Packing | None = ...,
    rng: RngState | None = ...,
    alibi_slopes: torch.Tensor | None = ...,
    sinks: torch.Tensor | None = ...,
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
    alibi_slopes: torch.Tensor | None = ...,
    sinks: torch.Tensor | None = ...,
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
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    backend: str = "auto",
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention, ``dropout(softmax(softcap(scale * q @ k.T) + bias + mask)) @ v``, differentiable.

    Args:
        q: (batch, seqlen_q, heads, head_dim), or (total_q, heads, head_dim) with ``packing``; bf16, fp16 or fp32. This
            is not the layout of PyTorch's ``scaled_dot_product_attention``, (batch, heads, seqlen, head_dim), which
            needs ``transpose(1, 2)``. Jagged nested tensors are packed sequences: (batch, j, heads, head_dim) or
            (batch, heads, j, head_dim), depending on which dimension is ragged.
        k: (batch, seqlen_k, kv_heads, head_dim), or (total_k, kv_heads, head_dim); kv_heads divides heads.
        v: the same shape as k, except that head_dim may differ; the output has v's head_dim.
        spec: mask, scale, softcap and dropout probability.
        packing: boundaries of the packed entries; queries attend only to keys of their own entry.
        rng: dropout state; None draws one from PyTorch's generator of the device.
        alibi_slopes: (heads,), or (batch or entries, heads): the bias ``-slope * abs(i + len_k - len_q - j)`` is added
            to the logit of query i and key j. They may be learnable.
        sinks: (heads,): a logit per head that is added to the softmax's sum and has no value. They may be learnable.
        backend: one of ``BACKENDS``: ``flash``, this project's kernels (``triton`` selects only the portable
            kernels, and the name of another family only its kernels), ``sdpa``, ``standard``, ``chunked``,
            ``reference``, or ``auto``: flash if it can run, else sdpa, else reference. ``explain`` says what runs.
        return_lse: also return the natural log-sum-exp of the logits, (batch, heads, seqlen_q), packed (heads,
            total_q), in fp32, or in fp64 for fp64 inputs. It includes the sink, is -inf for queries that attend to no
            key, and is differentiable. Every backend except ``sdpa`` can return it.

    Returns:
        out, shaped like q but with v's head_dim, and the log-sum-exp if requested. Queries that attend to no key give
        exactly 0. For jagged tensors, out is jagged in their layout, and the log-sum-exp is jagged (batch, heads, j).

    Raises:
        ValueError, TypeError: inputs that do not fit together, or a named backend that cannot run. Both are raised
            before any launch.
        RuntimeError: a second gradient through this project's kernels or ``standard``, raised in the backward.

    Source: FlashAttention-2 (Dao, 2023, arXiv:2307.08691), algorithms 1 and 2; dropout as in FlashAttention
    (arXiv:2205.14135), with the counter map of ``flash_train.attention.dropout``; ALiBi (Press et al.,
    arXiv:2108.12409); sinks as in "Efficient Streaming Language Models with Attention Sinks" (arXiv:2309.17453) and the
    learnable form of gpt-oss.
    """
    check_tensors(q, k, v)
    if q.is_nested or k.is_nested or v.is_nested:
        jagged = unpack(q, k, v, packing)
        results = cast(Any, attention)(
            jagged.q, jagged.k, jagged.v, spec, packing=jagged.packing, rng=rng, alibi_slopes=alibi_slopes,
            sinks=sinks, backend=backend, return_lse=return_lse,
        )  # fmt: skip
        return (jagged.out(results[0]), jagged.lse(results[1])) if return_lse else jagged.out(results)
    (q, k, v), (name, _) = prepare(q, k, v, spec, packing, rng, alibi_slopes, sinks, backend, return_lse)
    if name == "sdpa":
        out = sdpa_attention(q, k, v, spec, packing, alibi_slopes=alibi_slopes)
        return _connect_gradients(out, q, k, v, alibi_slopes)

    state, origin, parts = None, (0, 0, 0, 0), None
    if spec.dropout > 0 and rng is not None:
        state, origin, parts = rng.as_tensor(q.device), rng.origin, rng.entries
    if name in DENSE:
        use_operator = needs_operator(name, q, packing)
        if spec.dropout > 0 and state is None and (name == "reference" or use_operator):
            state = draw_state(q.device)
        if use_operator:
            out, lse = attend_by_operator(name, q, k, v, spec, packing, state, origin, alibi_slopes, sinks, parts)
        else:
            out, lse = DENSE[name](
                q, k, v, spec, packing, state, origin=origin, entries=parts, alibi_slopes=alibi_slopes, sinks=sinks
            )
        out, lse = (_connect_gradients(x, q, k, v, alibi_slopes, sinks) for x in (out, lse))
        lse = lse.float() if lse.dtype.itemsize < 4 else lse
    else:
        if spec.dropout > 0 and state is None:
            state = draw_state(q.device)
        call = operands_of(q, k, spec, packing, state, origin, alibi_slopes, sinks, parts)
        out, lse = attend(q, k, v, call, name)
    return (out, lse) if return_lse else out


def _connect_gradients(out: torch.Tensor, *inputs: torch.Tensor | None) -> torch.Tensor:
    """Return the output, connected to the inputs so that they get zero gradients even if nothing was computed."""
    learned = [x for x in inputs if x is not None and x.requires_grad]
    if out.requires_grad or not (torch.is_grad_enabled() and learned):
        return out
    return out + sum(x[..., :0].sum().to(out.dtype) for x in learned)


def explain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: AttentionSpec = FULL,
    *,
    packing: Packing | None = None,
    rng: RngState | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    backend: str = "auto",
    return_lse: bool = False,
) -> str:
    """Say what runs ``attention`` with the same arguments, and why nothing faster runs it. No kernel is launched.

    Args:
        q, k, v, spec, packing, rng, alibi_slopes, sinks, backend, return_lse: as in ``attention``.

    Returns:
        One line: the backend and the reason, or the kernels of the forward and of the backward.

    Raises:
        ValueError, TypeError: the same errors as ``attention``.
    """
    check_tensors(q, k, v)
    if q.is_nested or k.is_nested or v.is_nested:
        q, k, v, packing, *_ = unpack(q, k, v, packing)
    (q, k, v), (name, why) = prepare(q, k, v, spec, packing, rng, alibi_slopes, sinks, backend, return_lse)
    if not is_own(name):
        return f"{name}: {why}"
    from flash_train.attention.kernels.select import explain_choice

    origin = (0, 0, 0, 0) if rng is None else rng.origin
    state = torch.empty(2, dtype=torch.int64, device=q.device) if spec.dropout > 0 else None
    parts = None if rng is None or spec.dropout == 0 else rng.entries
    call = operands_of(q, k, spec, packing, state, origin, alibi_slopes, sinks, parts)
    return f"{name}: {explain_choice(name, q, k, v, call)}"


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: AttentionSpec,
    packing: Packing | None,
    rng: RngState | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    backend: str,
    return_lse: bool,
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], tuple[str, str]]:
    """Check all arguments; return q, k and v in autocast's dtype, and the backend that runs them with the reason."""
    require_values(q)
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        # autocast leaves fp64 as it is, and integers are refused below
        q, k, v = (x.to(dtype) if x.dtype.is_floating_point and x.dtype != torch.float64 else x for x in (q, k, v))
    _validate(q, k, v, packing)
    entries = q.shape[0] if packing is None else packing.cu_seqlens_q.numel() - 1
    validate_settings(q, k.shape[-3], entries, spec, rng, alibi_slopes, sinks)
    resolved = resolve_backend(
        backend,
        device=q.device,
        dtype=q.dtype,
        head_dim=max(q.shape[-1], v.shape[-1]),
        spec=spec,
        sinks=sinks is not None,
        exact=return_lse or (rng is not None and spec.dropout > 0),
    )
    return (q, k, v), resolved


def operands_of(
    q: torch.Tensor,
    k: torch.Tensor,
    spec: AttentionSpec,
    packing: Packing | None,
    state: torch.Tensor | None,
    origin: tuple[int, int, int, int],
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    entries: EntryOrigins | None = None,
) -> Call:
    """Build the kernel call that computes ``spec``."""
    cu_seqlens = (None, None) if packing is None else (packing.cu_seqlens_q, packing.cu_seqlens_k)
    return call_of(
        spec, q.shape[-1], q.shape[-3], k.shape[-3], cu_seqlens, state, origin, alibi_slopes, sinks, entries,
        packed=packing is not None,
    )  # fmt: skip


def check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise TypeError unless q, k and v are tensors that have strides, or are nested."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}: must be a tensor")
        if x.layout != torch.strided and not x.is_nested:
            raise TypeError(f"{name} has the layout {x.layout}: must be a strided tensor, such as {name}.to_dense()")


def require_values(q: torch.Tensor) -> None:
    """Raise ValueError for a tensor of the meta device, on which nothing can be computed."""
    if q.is_meta:
        raise ValueError("q is on the meta device, which holds no values: must be on another, such as cpu or cuda")


def _validate(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: Packing | None) -> None:
    if packing is not None and not isinstance(packing, Packing):
        raise TypeError(f"packing is a {type(packing).__name__}: must be Packing(cu_seqlens_q, cu_seqlens_k), or None")
    rank, layout = (4, "(batch, seqlen, heads, head_dim)") if packing is None else (3, "(total, heads, head_dim)")
    dtype, device, shape_q, shape_k, shape_v = q.dtype, q.device, q.shape, k.shape, v.shape  # attribute access is slow
    for name, shape in (("q", shape_q), ("k", shape_k), ("v", shape_v)):
        if len(shape) != rank:
            raise ValueError(f"{name} has shape {tuple(shape)}: must be {layout}" + _packing_hint(packing))
    for name, x in (("k", k), ("v", v)):
        if x.dtype != dtype or x.device != device:
            raise TypeError(f"{name} is {x.dtype} on {x.device} and q is {dtype} on {device}: must be equal")
    if dtype not in DTYPES:
        raise TypeError(f"q is {dtype}: must be a floating-point dtype of 16 bits or more")
    if shape_k[:-1] != shape_v[:-1]:
        raise ValueError(f"k has shape {tuple(shape_k)} and v {tuple(shape_v)}: must be equal up to head_dim")
    if shape_q[-1] != shape_k[-1]:
        raise ValueError(f"q has head_dim {shape_q[-1]} and k {shape_k[-1]}: must be equal")
    if packing is None and shape_q[0] != shape_k[0]:
        raise ValueError(f"q has batch {shape_q[0]} and k {shape_k[0]}: must be equal")
    n_heads, n_kv_heads = shape_q[-2], shape_k[-2]
    if n_kv_heads == 0 or n_heads == 0 or n_heads % n_kv_heads:
        raise ValueError(
            f"q has {n_heads} heads and k {n_kv_heads}: q's must be a multiple of k's, and neither 0"
            + _layout_hint(packing, shape_q, shape_k)
        )
    if packing is None and n_heads > MAX_PLAUSIBLE_HEADS and n_heads > shape_q[1] and not torch.compiler.is_compiling():
        warnings.warn(
            f"q has {n_heads} heads and {shape_q[1]} rows: the layout is (batch, seqlen, heads, head_dim), and tensors "
            "of scaled_dot_product_attention need transpose(1, 2)",
            stacklevel=4,
        )
    if shape_q[-1] == 0 or shape_v[-1] == 0:
        raise ValueError(f"q has head_dim {shape_q[-1]} and v {shape_v[-1]}: must be 1 or more")
    if packing is not None:
        packing.validate(device, shape_q[0], shape_k[0])


def validate_settings(
    q: torch.Tensor,
    len_k: int,
    entries: int,
    spec: AttentionSpec,
    rng: RngState | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> None:
    """Raise ValueError or TypeError if the settings do not fit q, padded or packed, and ``len_k`` keys."""
    if not isinstance(spec, AttentionSpec):
        inside = spec if isinstance(spec, Mask) else "mask"
        raise TypeError(f"spec is {spec!r}: must be an AttentionSpec, such as AttentionSpec({inside})")
    if rng is not None and not isinstance(rng, RngState):
        raise TypeError(f"rng is {rng!r}: must be an RngState, such as RngState(5), or None")
    if rng is not None and rng.entries is not None:
        rng.entries.validate(entries, q.device)
    if rng is not None and (rng.query or rng.key):
        for name, first, rows in (("query", rng.query, q.shape[-3]), ("key", rng.key, len_k)):
            if first + rows > 2**31:
                raise ValueError(f"RngState({name}={first}) with {rows} rows: must end at 2**31 or before")
    n_heads = q.shape[-2]
    spec.mask.validate(entries, q.shape[-3], len_k, n_heads, q.device, q.dim() == 3)
    for name, x, allowed in (
        ("alibi_slopes", alibi_slopes, [(n_heads,), (entries, n_heads)]),
        ("sinks", sinks, [(n_heads,)]),
    ):
        if x is None:
            continue
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}: must be a tensor")
        if tuple(x.shape) not in allowed or not x.dtype.is_floating_point:
            shapes = " or ".join(map(str, allowed))
            raise ValueError(f"{name} is {x.dtype} of shape {tuple(x.shape)}: must be floating-point {shapes}")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} and q on {q.device}: must be the same device")


def _layout_hint(packing: Packing | None, shape_q: torch.Size, shape_k: torch.Size) -> str:
    """Return a hint at the layout if the head counts would fit with dimension 1 as the heads; else an empty string."""
    if packing is not None or shape_k[1] == 0 or shape_q[1] % shape_k[1]:
        return ""
    return "; (batch, heads, seqlen, head_dim), as for scaled_dot_product_attention, needs transpose(1, 2)"


def _packing_hint(packing: Packing | None) -> str:
    return "; packed tensors need packing=Packing(...)" if packing is None else " with packing"
