"""The plain PyTorch backends as one operator, for traced programs that cannot contain the backends' steps.

The steps depend on values or on symbolic lengths: the number of chunks, and the positions at which packed entries
begin. The operator runs the backend on the real tensors. Its backward runs the forward again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_train.attention.dense.chunked import chunked_attention
from flash_train.attention.dense.reference import reference_attention
from flash_train.attention.dense.sequences import statistics_dtype
from flash_train.attention.dense.standard import standard_attention
from flash_train.attention.dropout import EntryOrigins
from flash_train.attention.kernels.call import schema_of
from flash_train.attention.masks.parts import mask_from_parts, mask_to_parts
from flash_train.attention.packing import Packing
from flash_train.attention.spec import AttentionSpec
from flash_train.attention.tracing import has_no_values

#: the implementations in PyTorch; without an rng, ``standard`` and ``chunked`` draw from PyTorch's generator
DENSE: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "standard": standard_attention,
    "chunked": chunked_attention,
    "reference": reference_attention,
}


def needs_operator(name: str, q: Tensor, packing: Packing | None) -> bool:
    """Whether a traced program cannot contain the steps of a backend of ``DENSE``."""
    if not has_no_values(q):
        return False
    if packing is not None and packing.lengths is None:
        return True
    return name != "reference" and torch.compiler.is_exporting()


def attend_by_operator(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    packing: Packing | None,
    state: Tensor | None,
    origin: tuple[int, int, int, int],
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    entries: EntryOrigins | None = None,
) -> tuple[Tensor, Tensor]:
    """Run ``DENSE[name]`` as an operator; dropout needs a state, so that the backward draws the same mask."""
    cu_q, cu_k = (None, None) if packing is None else (packing.cu_seqlens_q, packing.cu_seqlens_k)
    parts = mask_to_parts(spec.mask)
    call = _Call(
        None if entries is None else entries.first, alibi_slopes, sinks, cu_q, cu_k, state, parts.tensors, parts.names,
        parts.integers, list(origin),
        float(spec.scale_for(q.shape[-1])), float(spec.softcap), float(spec.dropout), name,
    )  # fmt: skip
    return attention_dense(q, k, v, *call)


class _Call(NamedTuple):
    """The operator's parameters after q, k and v; the mask in the form of ``masks.parts``."""

    origins: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    rng: Tensor | None
    mask_tensors: Sequence[Tensor]
    mask_names: str
    mask_integers: Sequence[int]
    origin: Sequence[int]
    scale: float
    softcap: float
    dropout: float
    name: str


N_TENSORS = _Call._fields.index("mask_tensors")  #: number of parameters that are single tensors


def _run(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """Return the output and the natural log-sum-exp; ``arguments`` are the fields of ``_Call``."""
    call = _Call(*arguments)
    mask = mask_from_parts(call.mask_names, call.mask_integers, call.mask_tensors)
    spec = AttentionSpec(mask, call.scale, call.softcap, call.dropout)
    cu_q, cu_k = call.cu_seqlens_q, call.cu_seqlens_k
    packing = None if cu_q is None or cu_k is None else Packing(cu_q, cu_k)
    if packing is not None:
        packing.validate(q.device, q.shape[0], k.shape[0])
    out, lse = DENSE[call.name](
        q, k, v, spec, packing, call.rng, origin=tuple(call.origin),
        entries=None if call.origins is None else EntryOrigins(call.origins), alibi_slopes=call.alibi_slopes,
        sinks=call.sinks,
    )  # fmt: skip
    return out.contiguous(), lse.to(statistics_dtype(q)).contiguous()


def _run_backward(dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> list[Tensor]:
    """Compute the gradients of q, k, v, and of the slopes and the sinks if they are given."""
    call = _Call(*arguments)
    leaves = [None if x is None else x.detach().requires_grad_() for x in (q, k, v, call.alibi_slopes, call.sinks)]
    run: Any = _run
    with _autograd_enabled():
        out, lse = run(*leaves[:3], *call._replace(alibi_slopes=leaves[3], sinks=leaves[4]))
        inputs = [x for x in leaves if x is not None]
        if not out.requires_grad:  # nothing was computed, as for an empty batch
            return [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in inputs]
        pairs = [(x, g) for x, g in ((out, dout), (lse, dlse)) if x.requires_grad]
        results, weights = zip(*pairs, strict=True)
        grads = torch.autograd.grad(results, inputs, weights, materialize_grads=True)
    return [grad.contiguous() for grad in grads]


@contextlib.contextmanager
def _autograd_enabled() -> Iterator[None]:
    """Enable autograd inside an operator, where PyTorch has disabled it."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView):
        excluded = excluded.remove(key)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


attention_dense = torch.library.custom_op(
    "flash_train::attention_dense",
    _run,
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {schema_of(_Call)}) -> (Tensor, Tensor)",
    tags=(torch.Tag.cudagraph_unsafe,),
)
attention_dense_backward = torch.library.custom_op(
    "flash_train::attention_dense_backward",
    _run_backward,
    mutates_args=(),
    schema=f"(Tensor dout, Tensor dlse, Tensor q, Tensor k, Tensor v, {schema_of(_Call)}) -> Tensor[]",
    tags=(torch.Tag.cudagraph_unsafe,),
)


@attention_dense.register_fake
def _shapes(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    rows = (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[1], q.shape[0])
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(rows, dtype=statistics_dtype(q))


@attention_dense_backward.register_fake
def _backward_shapes(dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> list[Tensor]:
    call = _Call(*arguments)
    return [x.new_empty(x.shape) for x in (q, k, v, call.alibi_slopes, call.sinks) if x is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *arguments = inputs
    call = _Call(*arguments)
    tensors, ctx.settings = call[:N_TENSORS], call[N_TENSORS + 1 :]
    ctx.save_for_backward(q, k, v, *tensors, *call.mask_tensors)


def _backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Any, ...]:
    q, k, v, *tensors = ctx.saved_tensors
    parameters: Any = (*tensors[:N_TENSORS], tensors[N_TENSORS:], *ctx.settings)
    call = _Call(*parameters)
    grads = iter(attention_dense_backward(dout, dlse, q, k, v, *call))
    dq, dk, dv, dslopes, dsinks = (None if x is None else next(grads) for x in (q, k, v, call.alibi_slopes, call.sinks))
    nothing: Any = [None] * len(_Call._fields)
    of_mask: Any = [None] * len(call.mask_tensors)
    return dq, dk, dv, *_Call(*nothing)._replace(alibi_slopes=dslopes, sinks=dsinks, mask_tensors=of_mask)


attention_dense.register_autograd(_backward, setup_context=_setup_context)
