"""The kernels as PyTorch operators: what is saved for the backward, and the shapes for ``torch.compile``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# The kernels are imported inside the operators: the package imports, and the other backends run, without Triton.


@torch.library.custom_op("flash_train::attention_forward", mutates_args=())
def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    rng: Tensor | None,
    causal: bool,
    scale: float,
    keep_threshold: int,
) -> tuple[Tensor, Tensor]:
    """Output and natural log-sum-exp; the backward recomputes the rest from them."""
    from flash_train.attention.kernels import launch

    return launch.forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, rng, causal=causal, scale=scale, keep_threshold=keep_threshold
    )


@torch.library.custom_op("flash_train::attention_backward", mutates_args=())
def attention_backward(
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
    causal: bool,
    scale: float,
    keep_threshold: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    from flash_train.attention.kernels import launch

    return launch.backward(
        dout,
        dlse,
        q,
        k,
        v,
        out,
        lse,
        cu_seqlens_q,
        cu_seqlens_k,
        rng,
        causal=causal,
        scale=scale,
        keep_threshold=keep_threshold,
    )


@attention_forward.register_fake
def _forward_shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    rng: Tensor | None,
    causal: bool,
    scale: float,
    keep_threshold: int,
) -> tuple[Tensor, Tensor]:
    rows = (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[1], q.shape[0])
    return q.new_empty(q.shape), q.new_empty(rows, dtype=torch.float32)


@attention_backward.register_fake
def _backward_shapes(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens_q, cu_seqlens_k, rng, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens_q, cu_seqlens_k, rng)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, rng = ctx.saved_tensors
    if dout is None:  # only the log-sum-exp was used
        dout = torch.zeros_like(out)
    grads = attention_backward(dout, dlse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, rng, *ctx.settings)
    return (*grads, *(None,) * 6)


attention_forward.register_autograd(_backward, setup_context=_setup_context)
