"""The second half of an MLP, (silu(gate) · up) @ weightᵀ. Imported only once a tensor is on CUDA.

The weight's gradient needs silu(gate) · up, an activation as wide as the MLP, and the forward does not keep it. The
backward kernel loads both factors and reads the product's gradient for the last time, so it computes the product again
and writes it over that gradient. This costs one more write and saves a third of the memory that an MLP holds between
its forward and its backward.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_train.model.kernels.common import overlap
from flash_train.model.products import weight_gradient

BLOCK = 2048  # elements of a program; 16 bytes per thread and tensor in 16 bits


@triton.jit
def product_kernel(gate, up, product, count, BLOCK: tl.constexpr):
    """Compute product = silu(gate) · up in fp32."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g, u = tl.load(gate + at, mask=inside).to(tl.float32), tl.load(up + at, mask=inside).to(tl.float32)
    tl.store(product + at, (g * tl.sigmoid(g) * u).to(product.dtype.element_ty), mask=inside)


@triton.jit
def gradients_kernel(gate, up, dproduct, count, BLOCK: tl.constexpr, PRODUCT: tl.constexpr):
    """Write gate's gradient over gate and up's over up.

    With PRODUCT, also write the product, rounded as in the forward, over dproduct.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    kind = gate.dtype.element_ty
    g, u = tl.load(gate + at, mask=inside).to(tl.float32), tl.load(up + at, mask=inside).to(tl.float32)
    d = tl.load(dproduct + at, mask=inside).to(tl.float32)
    share = tl.sigmoid(g)
    tl.store(gate + at, (d * u * share * (1.0 + g * (1.0 - share))).to(kind), mask=inside)
    tl.store(up + at, (d * (g * share)).to(kind), mask=inside)
    if PRODUCT:
        tl.store(dproduct + at, (g * share * u).to(kind), mask=inside)


class _SwiGLULinear(torch.autograd.Function):
    """The backward writes over gate and up, so a second backward raises."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, needs_value: bool, adds: bool) -> Tensor:
        matrix = weight.to(gate.dtype)
        ctx.save_for_backward(gate, up, matrix)
        ctx.weight, ctx.adds = weight, adds
        if not needs_value:
            return gate.new_empty(()).expand(*gate.shape[:-1], len(weight))
        product = torch.empty_like(gate)
        _launch(product_kernel, gate, up, product)
        return product @ matrix.T

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        # Detach, because the gradients are written over these tensors and must have no autograd history.
        gate, up, matrix = (x.detach() for x in ctx.saved_tensors)
        rows = dout.reshape(-1, dout.shape[-1])
        product = dout @ matrix  # its gradient; the kernel below replaces it by the product
        _launch(gradients_kernel, gate, up, product, PRODUCT=True)
        torch.autograd.graph.increment_version((gate, up))
        product = product.view(-1, product.shape[-1])
        dweight = weight_gradient(rows, product, ctx.weight, ctx.adds) if ctx.needs_input_grad[2] else None
        return gate, up, dweight, None, None


class _SwiGLU(torch.autograd.Function):
    """The product alone. The backward writes over gate and up, so a second backward raises."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        product = torch.empty_like(gate)
        _launch(product_kernel, gate, up, product)
        return product

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dproduct: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = (x.detach() for x in ctx.saved_tensors)
        _launch(gradients_kernel, gate, up, dproduct.contiguous(), PRODUCT=False)
        torch.autograd.graph.increment_version((gate, up))
        return gate, up


def _launch(kernel: Any, *tensors: Tensor, **named: Any) -> None:
    count = tensors[0].numel()
    if count:
        with torch.cuda.device_of(tensors[0]):
            grid = (triton.cdiv(count, BLOCK),)
            kernel[grid](*tensors, count, BLOCK=BLOCK, **named, num_warps=8, enable_fp_fusion=True)


def swiglu_linear(gate: Tensor, up: Tensor, weight: Tensor, needs_value: bool = True, adds: bool = False) -> Tensor:
    """Implement `ops.swiglu_linear`; gate and up have the compute dtype.

    Raises:
        ValueError: gate and up of different shapes.
    """
    gate, up = _own(gate, up, torch.is_grad_enabled() and any(x.requires_grad for x in (gate, up, weight)))
    return _SwiGLULinear.apply(gate, up, weight, needs_value, adds)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Implement `ops.swiglu`.

    Raises:
        ValueError: gate and up of different shapes.
    """
    return _SwiGLU.apply(*_own(gate, up, torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad)))


def _own(gate: Tensor, up: Tensor, learns: bool) -> tuple[Tensor, Tensor]:
    """Return contiguous tensors. If the backward will write over them, copy leaves, and tensors that share memory."""
    if gate.shape != up.shape:
        raise ValueError(f"gate has shape {tuple(gate.shape)} and up {tuple(up.shape)}: must be equal")
    gate, up = gate.contiguous(), up.contiguous()
    if learns and (gate.is_leaf or up.is_leaf or overlap(gate, up)):
        gate, up = gate.clone(), up.clone()
    return gate, up
