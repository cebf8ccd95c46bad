"""The kernels as PyTorch operators: what is saved for the backward, and the shapes for ``torch.compile``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active as transforming  # called for every launch, without a wrapper
from torch._C._functorch import is_legacy_batchedtensor

from flash_train.attention import flops
from flash_train.attention.transforms import first_order, refuse_jvp, refuse_vmap

# The kernels are imported inside the operators: the package imports, and the other backends run, without Triton.


def _run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    rng: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    block_map: Tensor | None,
    term_tensors: Sequence[Tensor],
    terms: str,
    bounds: Sequence[int],
    origin: Sequence[int],
    scale: float,
    softcap: float,
    keep_threshold: int,
    kernels: str,
) -> tuple[Tensor, Tensor]:
    """Output and natural log-sum-exp; the backward recomputes the rest from them. ``arguments.Call`` names the rest;
    ``kernels`` are those of ``kernels.select``."""
    from flash_train.attention.kernels import select
    from flash_train.attention.kernels.call import Call, readable_call

    call = Call(
        cu_seqlens_q, cu_seqlens_k, rng, alibi_slopes, sinks, block_map, term_tensors, terms, bounds, origin, scale,
        softcap, keep_threshold,
    )  # fmt: skip
    call = readable_call(call)
    return select.forward_of(kernels, q, k, v, call)(q, k, v, call)


def _run_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    rng: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    block_map: Tensor | None,
    term_tensors: Sequence[Tensor],
    terms: str,
    bounds: Sequence[int],
    origin: Sequence[int],
    scale: float,
    softcap: float,
    keep_threshold: int,
    kernels: str,
    needs_slopes: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, the slopes and the sinks; empty for slopes that need none and sinks that are not there."""
    dq, dk, dv, dslopes, dsinks = _gradients(
        dout, dlse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, rng, alibi_slopes, sinks, block_map, term_tensors,
        terms, bounds, origin, scale, softcap, keep_threshold, kernels, needs_slopes,
    )  # fmt: skip
    nothing = q.new_empty(0)
    return dq, dk, dv, nothing if dslopes is None else dslopes, nothing.clone() if dsinks is None else dsinks


def _gradients(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The same, and None in place of empty ones: an allocation takes a while, too."""
    from flash_train.attention.kernels import select
    from flash_train.attention.kernels.call import Call, readable_call

    *plain, kernels, needs_slopes = rest
    call = readable_call(Call(*plain))
    return select.backward_of(kernels, q, k, v, call)(dout, dlse, q, k, v, out, lse, call, needs_slopes)


attention_forward = torch.library.custom_op("flash_train::attention_forward", _run_forward, mutates_args=())
attention_backward = torch.library.custom_op("flash_train::attention_backward", _run_backward, mutates_args=())


@attention_forward.register_fake
def _forward_shapes(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    rows = (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[1], q.shape[0])
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(rows, dtype=torch.float32)


@attention_backward.register_fake
def _backward_shapes(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    rng: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    needs_slopes = rest[-1]
    dslopes = alibi_slopes.new_empty(alibi_slopes.shape) if needs_slopes else q.new_empty(0)
    dsinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dslopes, dsinks


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *optional, term_tensors, terms, bounds, origin, scale, softcap, keep_threshold, kernels = inputs
    ctx.save_for_backward(q, k, v, *output, *optional, *term_tensors)
    ctx.settings = (terms, bounds, origin, scale, softcap, keep_threshold, kernels)
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, saved: Sequence[Any] | None = None
) -> tuple[Any, ...]:
    """Gradients of ``attention_forward``'s arguments, as ``torch.library`` wants them: a list for a list.

    ``saved``, if the context's tensors were read before: the operator then runs, since they may be wrapped.
    """
    q, k, v, out, lse, *optional = ctx.saved_tensors if saved is None else saved
    optional, term_tensors = optional[:6], optional[6:]
    needs_slopes, needs_sinks = ctx.needs_input_grad[6:8]
    if dout is None:  # only the log-sum-exp was used
        dout = torch.zeros_like(out)
    if is_legacy_batchedtensor(dout):  # PyTorch asks no rule of the operator then
        refuse_vmap()
    # With a graph of itself wanted, by the operator, too: it has no gradient of its own, and says so.
    watched = saved is not None or _is_watched(dout) or torch.is_grad_enabled() or transforming()
    run: Any = attention_backward if watched else _gradients
    dq, dk, dv, dslopes, dsinks = run(
        dout, dlse, q, k, v, out, lse, *optional, term_tensors, *ctx.settings, needs_slopes
    )
    dslopes, dsinks = dslopes if needs_slopes else None, dsinks if needs_sinks else None
    return (dq, dk, dv, None, None, None, dslopes, dsinks, None, [None] * len(term_tensors), *(None,) * 7)


attention_forward.register_autograd(_backward, setup_context=_setup_context)
attention_forward.register_vmap(refuse_vmap)
attention_backward.register_vmap(refuse_vmap)
flops.register()


def _is_watched(x: Tensor) -> bool:
    """Whether somebody counts, records or replaces operators, or x is more than a tensor: ``torch.library`` has to be
    asked then. It takes as long as a launch, and eager calls go without."""
    return torch._C._len_torch_dispatch_stack() > 0 or type(x) not in (Tensor, torch.nn.Parameter)


class _Attention(torch.autograd.Function):
    """The operator with the gradient that it is registered with. What is no tensor comes as one argument, ``settings``,
    and the mask's tensors last: PyTorch looks at every argument several times."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        *operands, settings = inputs[:10]
        inputs = (*operands, inputs[10:], *settings)
        output = (attention_forward if _is_watched(inputs[0]) else _run_forward)(*inputs)
        _setup_context(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        return _in_order_of_apply(_backward(ctx, dout, dlse))

    jvp = staticmethod(refuse_jvp)


class _TransformedAttention(torch.autograd.Function):
    """``_Attention`` for ``torch.func``, which needs the context set up apart. PyTorch then looks up the arguments'
    names at every call, which takes longer than a launch: plain calls do without."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        *operands, settings = inputs[:10]
        return attention_forward(*operands, inputs[10:], *settings)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *operands, settings = inputs[:10]
        _setup_context(ctx, (*operands, inputs[10:], *settings), output)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # still wrapped when the transform has ended
        with torch.no_grad():
            gradients = _in_order_of_apply(_backward(ctx, dout, dlse, saved))
        return first_order(gradients, dout, dlse, *saved)

    jvp = staticmethod(refuse_jvp)
    vmap = staticmethod(refuse_vmap)


def _in_order_of_apply(gradients: tuple[Any, ...]) -> tuple[Any, ...]:
    """``_backward``'s gradients in the order of a Function's arguments: settings tenth, the mask's tensors last."""
    return (*gradients[:9], None, *gradients[9])


def attend(*inputs: Any) -> tuple[Tensor, Tensor]:
    """``attention_forward``, differentiable. Run eagerly, it goes around ``torch.library``'s own autograd, which takes
    longer than all else that a call does on the host."""
    if torch.compiler.is_compiling():
        return attention_forward(*inputs)
    function = _TransformedAttention if transforming() else _Attention
    return function.apply(*inputs[:9], inputs[10:], *inputs[9])
