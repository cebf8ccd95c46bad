"""The CUDA implementations of `ops`, from liger-kernel. Imported only once a tensor is on a CUDA device.

Liger's functions do not know autocast: `ops` hands them tensors already in the compute dtype. They run backward once:
some write gradients over what they saved.
"""

import torch
from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy_forward
from liger_kernel.ops.rms_norm import LigerRMSNormFunction
from liger_kernel.ops.rope import LigerRopeFunction
from liger_kernel.ops.swiglu import LigerSiLUMulFunction
from torch import Tensor

from flash_train.model.ops import MAX_LOGIT_TOKENS


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    # in_place=True would write dx over a gradient that may belong to someone else.
    return LigerRMSNormFunction.apply(x, weight, eps, 0.0, "llama", False)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return LigerSiLUMulFunction.apply(gate, up)


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q, k (total, heads, head_dim); overwritten where they are contiguous. cos, sin fp32 (total, head_dim / 2)."""

    def heads_first(x: Tensor) -> Tensor:  # (total, heads, head_dim) -> (1, heads, total, head_dim), Liger's layout
        return x.unsqueeze(0).transpose(1, 2)

    q, k = LigerRopeFunction.apply(heads_first(q), heads_first(k), cos[None], sin[None], None, 1, q.shape[-1])
    return q.transpose(1, 2).squeeze(0), k.transpose(1, 2).squeeze(0)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return _LinearCrossEntropy.apply(hidden, weight, labels, needs_grad)


class _LinearCrossEntropy(torch.autograd.Function):
    """Liger's forward (it computes the gradients too) with a backward of our own.

    Liger's backward compares grad_output with 1 on the host, which waits for the device, and scales what it saved with
    a kernel that autograd does not see, so that a second backward would be silently wrong; here it raises.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor, needs_grad: bool) -> Tensor:
        # Liger cuts what it is given into about vocab_size / width pieces: give it so much that a piece is in bounds.
        tokens = MAX_LOGIT_TOKENS * -(-weight.shape[0] // weight.shape[1])
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden, grad_weight = [], None
        for rows, targets in zip(hidden.split(tokens), labels.split(tokens), strict=True):
            part, *_, d_rows, d_weight, _ = fused_linear_cross_entropy_forward(
                rows,
                weight,
                targets,
                reduction="sum",
                accum_dtype=torch.float32,
                compute_gradients=needs_grad,
                weight_requires_grad=ctx.needs_input_grad[1],
            )
            loss += part
            grad_hidden.append(d_rows)
            if d_weight is not None:
                grad_weight = d_weight if grad_weight is None else grad_weight.add_(d_weight)
        if needs_grad:
            ctx.save_for_backward(torch.cat(grad_hidden) if len(grad_hidden) > 1 else grad_hidden[0], grad_weight)
        return loss

    @staticmethod
    def backward(ctx, grad_output: Tensor):
        grad_hidden, grad_weight = ctx.saved_tensors
        grad_hidden = grad_hidden.mul_(grad_output) if ctx.needs_input_grad[0] else None
        grad_weight = grad_weight.mul_(grad_output) if ctx.needs_input_grad[1] else None
        return grad_hidden, grad_weight, None, None
