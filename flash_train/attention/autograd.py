"""PyTorch operators for the kernels, with their autograd rules and the output shapes for ``torch.compile``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active as transforming  # called for every launch, without a wrapper
from torch._C._functorch import is_legacy_batchedtensor

from flash_train.attention import flops
from flash_train.attention.kernels.call import Call, schema_of
from flash_train.attention.transforms import forbid_second_gradient, refuse_jvp, refuse_vmap

# The kernels are imported inside the operators: the package imports, and the other backends run, without Triton.

#: gradients of q, k, v, slopes and sinks; None if slopes or sinks have no gradient
Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


def _run_forward(q: Tensor, k: Tensor, v: Tensor, call: Call, kernels: str) -> tuple[Tensor, Tensor]:
    """Return the output and the natural log-sum-exp; ``kernels`` is the backend name that ``kernels.select`` reads."""
    from flash_train.attention.kernels.select import forward_of

    call = call.contiguous()
    return forward_of(kernels, q, k, v, call)(q, k, v, call)


def _run_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    call: Call,
    kernels: str,
    needs_slopes: bool,
) -> Gradients:
    from flash_train.attention.kernels.select import backward_of

    call = call.contiguous()
    return backward_of(kernels, q, k, v, call)(dout, dlse, q, k, v, out, lse, call, needs_slopes)


# -- operators


def _forward_operator(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _run_forward(q, k, v, Call.from_arguments(rest[:-1]), rest[-1])


def _backward_operator(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Call ``_run_backward`` and replace each missing gradient by an empty tensor."""
    call, (kernels, needs_slopes) = Call.from_arguments(rest[:-2]), rest[-2:]
    dq, dk, dv, dslopes, dsinks = _run_backward(dout, dlse, q, k, v, out, lse, call, kernels, needs_slopes)
    empty = q.new_empty(0)
    return dq, dk, dv, empty if dslopes is None else dslopes, empty.clone() if dsinks is None else dsinks


attention_forward = torch.library.custom_op(
    "flash_train::attention_forward",
    _forward_operator,
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {schema_of(Call)}, str kernels) -> (Tensor, Tensor)",
)
attention_backward = torch.library.custom_op(
    "flash_train::attention_backward",
    _backward_operator,
    mutates_args=(),
    schema="(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{schema_of(Call)}, str kernels, bool needs_slopes) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@attention_forward.register_fake
def _forward_shapes(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    rows = (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[1], q.shape[0])
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(rows, dtype=torch.float32)


@attention_backward.register_fake
def _backward_shapes(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    call, needs_slopes = Call.from_arguments(rest[:-2]), rest[-1]
    slopes, sinks = call.alibi_slopes, call.sinks
    dslopes = q.new_empty(0) if slopes is None or not needs_slopes else slopes.new_empty(slopes.shape)
    dsinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dslopes, dsinks


# -- gradients of the operators


def _save(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call, kernels: str, output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(q, k, v, *output, *call.tensors)
    ctx.settings, ctx.kernels = call.settings, kernels
    ctx.set_materialize_grads(False)


def _gradients(
    ctx: Any,
    saved: Sequence[Any],
    needs_slopes: bool,
    needs_sinks: bool,
    dout: Tensor | None,
    dlse: Tensor | None,
    use_operator: bool = False,
) -> Gradients:
    """Compute the gradients from the tensors that ``_save`` saved.

    The backward runs as an operator if ``use_operator`` is set or if PyTorch must observe the call.
    """
    q, k, v, out, lse, *tensors = saved
    if dout is None:  # only the log-sum-exp was used
        dout = torch.zeros_like(out)
    if is_legacy_batchedtensor(dout):  # PyTorch does not apply the operator's vmap rule to such tensors
        refuse_vmap()
    call = Call.of(tensors, ctx.settings)
    if use_operator or is_observed(dout) or transforming():
        gradients = attention_backward(dout, dlse, q, k, v, out, lse, *call.arguments, ctx.kernels, needs_slopes)
    else:
        gradients = _run_backward(dout, dlse, q, k, v, out, lse, call, ctx.kernels, needs_slopes)
    dq, dk, dv, dslopes, dsinks = gradients
    return dq, dk, dv, dslopes if needs_slopes else None, dsinks if needs_sinks else None


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *arguments, kernels = inputs
    _save(ctx, q, k, v, Call.from_arguments(arguments), kernels, output)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    """Return a gradient per argument of ``attention_forward``; ``torch.library`` needs a list for a list argument."""
    needs: Any = Call(*ctx.needs_input_grad[3:-1])
    saved = ctx.saved_tensors
    dq, dk, dv, dslopes, dsinks = _gradients(ctx, saved, needs.alibi_slopes, needs.sinks, dout, dlse)
    return (dq, dk, dv, *_call_gradients(len(needs.term_tensors), dslopes, dsinks), None)


def _call_gradients(n_terms: int, dslopes: Tensor | None, dsinks: Tensor | None) -> Call:
    """Return a ``Call`` that holds each parameter's gradient, or None, in the parameter's field."""
    nothing: Any = [None] * len(Call._fields)
    of_terms: Any = [None] * n_terms
    return Call(*nothing)._replace(alibi_slopes=dslopes, sinks=dsinks, term_tensors=of_terms)


attention_forward.register_autograd(_backward, setup_context=_setup_context)
attention_forward.register_vmap(refuse_vmap)
attention_backward.register_vmap(refuse_vmap)
flops.register()


# -- eager calls


def attend(q: Tensor, k: Tensor, v: Tensor, call: Call, kernels: str) -> tuple[Tensor, Tensor]:
    """Run ``attention_forward`` with gradients.

    Eager calls bypass the autograd of ``torch.library``, which takes longer than the rest of the call's host work.
    """
    if torch.compiler.is_compiling():
        return attention_forward(q, k, v, *call.arguments, kernels)
    if transforming():
        return _TransformedAttention.apply(q, k, v, call.settings, kernels, *call.tensors)
    return _Attention.apply(q, k, v, call.alibi_slopes, call.sinks, call, kernels)


def is_observed(x: Tensor) -> bool:
    """Whether a dispatch mode or a tensor subclass is active and must observe the operator.

    Other eager calls bypass ``torch.library``, which takes as long as a launch.
    """
    return torch._C._len_torch_dispatch_stack() > 0 or type(x) not in (Tensor, torch.nn.Parameter)


class _Attention(torch.autograd.Function):
    """The autograd function of eager calls.

    PyTorch inspects every argument several times, so only tensors that can have a gradient are separate arguments.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, alibi_slopes: Any, sinks: Any, call: Call, kernels: str
    ) -> tuple[Tensor, Tensor]:
        if is_observed(q):
            output = attention_forward(q, k, v, *call.arguments, kernels)
        else:
            output = _run_forward(q, k, v, call, kernels)
        _save(ctx, q, k, v, call, kernels, output)
        return output

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        needs_slopes, needs_sinks = ctx.needs_input_grad[3:5]
        saved = ctx.saved_tensors
        with torch.no_grad():
            gradients = _gradients(ctx, saved, needs_slopes, needs_sinks, dout, dlse)
        return (*forbid_second_gradient(gradients, dout, dlse, *saved), None, None)

    jvp = staticmethod(refuse_jvp)


class _TransformedAttention(torch.autograd.Function):
    """``_Attention`` for ``torch.func``: every tensor is an argument, and a separate method sets up the context.
    Eager calls do not use it, because with ``setup_context`` PyTorch looks up the arguments' names at every call. That
    takes longer than a launch."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, settings: tuple[Any, ...], kernels: str, *tensors: Any
    ) -> tuple[Tensor, Tensor]:
        return attention_forward(q, k, v, *Call.of(tensors, settings).arguments, kernels)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, settings, kernels, *tensors = inputs
        _save(ctx, q, k, v, Call.of(tensors, settings), kernels, output)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        needs: Any = Call.of(ctx.needs_input_grad[5:], ctx.settings)
        saved = ctx.saved_tensors  # still wrapped when the transform has ended
        with torch.no_grad():
            dq, dk, dv, dslopes, dsinks = _gradients(
                ctx, saved, needs.alibi_slopes, needs.sinks, dout, dlse, use_operator=True
            )
        call_gradients = _call_gradients(len(needs.term_tensors), dslopes, dsinks)
        return forbid_second_gradient((dq, dk, dv, None, None, *call_gradients.tensors), dout, dlse, *saved)

    jvp = staticmethod(refuse_jvp)
    vmap = staticmethod(refuse_vmap)
