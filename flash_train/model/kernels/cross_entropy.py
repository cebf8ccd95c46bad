"""The linear cross entropy for CUDA. It computes one chunk of logits at a time and writes the gradient over the logits.

It follows Liger's fused linear cross entropy (arXiv:2410.10989). Liger synchronises with the device to count the
labels, and its chunks shrink as rows grow longer; this one does neither. Imported only once a tensor is on a CUDA
device.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_train.model.kernels.common import IGNORE_INDEX, MAX_LOGIT_TOKENS
from flash_train.model.products import add_product

BLOCK = 4096  # logits of a row that a program loads at a time
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def cross_entropy_kernel(
    logits, labels, losses, vocab_size, IGNORED: tl.constexpr, BLOCK: tl.constexpr, WITH_GRADIENT: tl.constexpr
):  # fmt: skip
    """Compute the loss of one row and write the gradient over its logits. Both are 0 if the label is IGNORED.

    The loss of a label outside the vocabulary is NaN.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab_size
    label = tl.load(labels + row)
    counts = label != IGNORED
    known = (label >= 0) & (label < vocab_size)
    # loaded before it is overwritten
    own = tl.load(logits + tl.where(known, label, 0), mask=known, other=float("nan")).to(tl.float32)
    column = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), -1.0e30, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        value = tl.load(logits + start + column, mask=start + column < vocab_size, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, value)
        total = total * tl.exp2((largest - larger) * LOG2_E) + tl.exp2((value - larger) * LOG2_E)
        largest = larger
    top = tl.max(largest, axis=0)
    lse = top + tl.log(tl.sum(total * tl.exp2((largest - top) * LOG2_E), axis=0))
    tl.store(losses + row, tl.where(counts, lse - own, 0.0))
    if WITH_GRADIENT:
        for start in range(0, vocab_size, BLOCK):
            inside = start + column < vocab_size
            value = tl.load(logits + start + column, mask=inside, other=0.0)
            weight = tl.exp2((value.to(tl.float32) - lse) * LOG2_E)
            gradient = tl.where(counts, weight - tl.where(start + column == label, 1.0, 0.0), 0.0)
            tl.store(logits + start + column, gradient.to(value.dtype), mask=inside)


class _LinearCrossEntropy(torch.autograd.Function):
    """The forward computes the gradients with the loss, while the logits exist.

    The backward scales them in place, so a second backward raises.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, with_gradient: bool) -> Tensor:
        hidden, labels, tokens = hidden.contiguous(), labels.contiguous(), hidden.shape[0]
        for_hidden, for_weight = (with_gradient and needed for needed in ctx.needs_input_grad[:2])
        losses = hidden.new_empty(tokens, dtype=torch.float32)
        d_hidden = torch.empty_like(hidden) if for_hidden else None
        d_weight = weight.new_zeros(weight.shape, dtype=torch.float32) if for_weight else None
        with torch.autocast(hidden.device.type, enabled=False), torch.cuda.device_of(hidden):
            matrix = weight.to(hidden.dtype)
            for start in range(0, tokens, MAX_LOGIT_TOKENS):
                chunk = slice(start, start + MAX_LOGIT_TOKENS)
                logits = hidden[chunk] @ matrix.T
                cross_entropy_kernel[(len(logits),)](
                    logits, labels[chunk], losses[chunk], len(weight), IGNORED=IGNORE_INDEX,
                    BLOCK=min(BLOCK, triton.next_power_of_2(len(weight))), WITH_GRADIENT=for_hidden or for_weight,
                    num_warps=8, enable_fp_fusion=True,
                )  # fmt: skip
                if d_hidden is not None:
                    torch.mm(logits, matrix, out=d_hidden[chunk])
                if d_weight is not None:
                    add_product(d_weight, logits.T, hidden[chunk])
                del logits  # frees them before the next chunk's logits are allocated
        if with_gradient:
            ctx.save_for_backward(d_hidden, None if d_weight is None else d_weight.to(weight.dtype))
        return losses.sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        return (
            None if d_hidden is None else d_hidden.mul_(grad_output),
            None if d_weight is None else d_weight.mul_(grad_output),
            None,
            None,
        )


# Inductor cannot improve on these launches; the blocks before them stay compiled. The decorator imports the whole
# compiler, which takes more than a second, so it is in a module that is imported only if the kernels run.
@torch.compiler.disable
def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Implement `ops.linear_cross_entropy`; `hidden` has the compute dtype."""
    with_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return _LinearCrossEntropy.apply(hidden, weight, labels, with_gradient)
