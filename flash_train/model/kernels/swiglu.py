"""An MLP's second half, (silu(gate) · up) @ weightᵀ, which keeps no product. Imported only once a tensor is on CUDA.

The weight's gradient needs silu(gate) · up, an activation as wide as the MLP. The kernel of the backward has both
factors at hand, and the gradient of the product is read for the last time: there it writes the product anew, which
takes a write more than without and saves a third of what an MLP holds between its forward and its backward.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_train.model.ops import overlap

BLOCK = 2048  # elements of a program; in 16 bits, 16 bytes of each of them for a thread


@triton.jit
def product_kernel(gate, up, product, count, BLOCK: tl.constexpr):
    """product = silu(gate) · up, computed in fp32."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g, u = tl.load(gate + at, mask=inside).to(tl.float32), tl.load(up + at, mask=inside).to(tl.float32)
    tl.store(product + at, (g * tl.sigmoid(g) * u).to(product.dtype.element_ty), mask=inside)


@triton.jit
def gradients_kernel(gate, up, dproduct, count, BLOCK: tl.constexpr):
    """In place of each: the gradient of gate, that of up, and the product, as the forward rounded it."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    kind = gate.dtype.element_ty
    g, u = tl.load(gate + at, mask=inside).to(tl.float32), tl.load(up + at, mask=inside).to(tl.float32)
    d = tl.load(dproduct + at, mask=inside).to(tl.float32)
    share = tl.sigmoid(g)
    tl.store(gate + at, (d * u * share * (1.0 + g * (1.0 - share))).to(kind), mask=inside)
    tl.store(up + at, (d * (g * share)).to(kind), mask=inside)
    tl.store(dproduct + at, (g * share * u).to(kind), mask=inside)


class _SwiGLULinear(torch.autograd.Function):
    """The backward writes over gate and up, so that a second one raises."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        product = torch.empty_like(gate)
        _launch(product_kernel, gate, up, product)
        return product @ weight.T

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        # Detached: what was saved would come out as the gradients with the history that it had in the forward.
        gate, up, weight = (x.detach() for x in ctx.saved_tensors)
        rows = dout.reshape(-1, dout.shape[-1])
        product = dout @ weight  # its gradient, as yet
        _launch(gradients_kernel, gate, up, product)
        torch.autograd.graph.increment_version((gate, up))
        dweight = rows.T @ product.view(-1, product.shape[-1]) if ctx.needs_input_grad[2] else None
        return gate, up, dweight


def _launch(kernel: Any, *tensors: Tensor) -> None:
    count = tensors[0].numel()
    if count:
        with torch.cuda.device_of(tensors[0]):
            kernel[(triton.cdiv(count, BLOCK),)](*tensors, count, BLOCK=BLOCK, num_warps=8)


def swiglu_linear(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """As `ops.swiglu_linear`, all in the dtype to compute in.

    Raises:
        ValueError: gate and up of different shapes.
    """
    if gate.shape != up.shape:
        raise ValueError(f"gate has shape {tuple(gate.shape)}, up {tuple(up.shape)}: they must be the same")
    gate, up = gate.contiguous(), up.contiguous()
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (gate, up, weight))
    if learns and (gate.is_leaf or up.is_leaf or overlap(gate, up)):  # not the caller's: the backward writes over them
        gate, up = gate.clone(), up.clone()
    return _SwiGLULinear.apply(gate, up, weight)
