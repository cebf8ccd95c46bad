"""Matrix products of linear layers, whose backward needs fewer passes over the gradients of the weights.

- The gradient of an fp32 weight under autocast is written in fp32 by the product. PyTorch writes it in 16 bits, and
  converts it.
- The later micro-batches of a step can add to the gradient within the product. PyTorch writes a gradient of the
  micro-batch, and adds it. (Megatron-LM calls this gradient accumulation fusion.)
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class Adding:
    """Whether the layers of a block add gradients within their products; they share this object."""

    on: bool = False


def linear(x: Tensor, weight: Tensor, adds: bool) -> Tensor:
    """Return x @ weight.T, for x (…, in) in the compute dtype and weight (out, in) of any dtype.

    With `adds`, the backward adds to `weight.grad` if there is one, and then returns no gradient. A weight with hooks,
    which would not run, gets its gradient as usual.
    """
    return _Linear.apply(x, weight, adds)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, adds: bool) -> Tensor:
        matrix = weight.to(x.dtype)
        ctx.save_for_backward(x, matrix)
        ctx.weight, ctx.adds = weight, adds
        return x @ matrix.T

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, matrix = ctx.saved_tensors
        dx = dout @ matrix if ctx.needs_input_grad[0] else None
        rows = dout.reshape(-1, dout.shape[-1])
        return dx, weight_gradient(rows, x.reshape(len(rows), -1), ctx.weight, ctx.adds), None


def weight_gradient(dout: Tensor, x: Tensor, weight: Tensor, adds: bool) -> Tensor | None:
    """Return dout.T @ x in the weight's dtype; or, with `adds`, add it to `weight.grad` if there is one.

    dout (tokens, out), x (tokens, in), weight (out, in).
    """
    if adds and weight.grad is not None and not _has_hooks(weight):
        add_product(weight.grad, dout.T, x)
        return None
    if weight.dtype == torch.float32 != x.dtype and has_wide_results(x):
        return torch.mm(dout.T, x, out_dtype=torch.float32)
    return (dout.T @ x).to(weight.dtype)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to `total`; the sums are in fp32, and rounded to the dtype of `total`."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.dtype == torch.float32 and has_wide_results(a):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += a @ b


def _has_hooks(weight: Tensor) -> bool:
    return bool(weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None))


def has_wide_results(x: Tensor) -> bool:
    """Whether products of 16-bit tensors on this device can be written in fp32."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device) >= (8, 0)
