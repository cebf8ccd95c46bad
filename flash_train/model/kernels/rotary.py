"""One kernel that rotates queries and keys in place. Imported only once a tensor is on CUDA."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_train.model.kernels.common import overlap


@triton.jit
def rotary_kernel(
    q, k, cos, sin, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, Q_ROWS: tl.constexpr,
    K_ROWS: tl.constexpr, COLUMNS: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Rotate all heads of one token's contiguous q and k by its row of the tables; with BACK, rotate back."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < HALF
    c = tl.load(cos + token * HALF + column, mask=inside, other=0.0)[None, :]
    s = tl.load(sin + token * HALF + column, mask=inside, other=0.0)[None, :]
    if BACK:
        s = -s
    _turn(q + token * (Q_HEADS * 2 * HALF), c, s, Q_HEADS, HALF, Q_ROWS, COLUMNS)
    _turn(k + token * (K_HEADS * 2 * HALF), c, s, K_HEADS, HALF, K_ROWS, COLUMNS)


@triton.jit
def _turn(x, c, s, HEADS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    head, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    inside = (head < HEADS) & (column < HALF)
    first, second = x + head * (2 * HALF) + column, x + head * (2 * HALF) + HALF + column
    a, b = tl.load(first, mask=inside).to(tl.float32), tl.load(second, mask=inside).to(tl.float32)
    tl.store(first, (a * c - b * s).to(x.dtype.element_ty), mask=inside)
    tl.store(second, (b * c + a * s).to(x.dtype.element_ty), mask=inside)


class _Rotary(torch.autograd.Function):
    """Rotates q and k in place in the forward, and their gradients in the backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _launch(q, k, cos, sin, back=False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return *_launch(dq, dk, cos, sin, back=True), None, None


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Implement `ops.apply_rotary`; contiguous q and k are overwritten."""
    return _Rotary.apply(q, k, cos.contiguous(), sin.contiguous())


def _launch(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, back: bool) -> tuple[Tensor, Tensor]:
    q, k = q.contiguous(), k.contiguous()
    if overlap(q, k):
        k = k.clone()
    (tokens, q_heads, _), k_heads, half = q.shape, k.shape[1], cos.shape[-1]
    if tokens:
        with torch.cuda.device_of(q):
            rotary_kernel[(tokens,)](
                q, k, cos, sin, q_heads, k_heads, half, triton.next_power_of_2(q_heads),
                triton.next_power_of_2(k_heads), triton.next_power_of_2(half), back, enable_fp_fusion=True,
            )  # fmt: skip
        torch.autograd.graph.increment_version([x for x in (q, k) if not x.is_inference()])
    return q.view(q.shape), k.view(k.shape)
