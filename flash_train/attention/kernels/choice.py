"""Which of this project's kernels run a call: the portable ones, or Hopper's own where they are asked for."""

from __future__ import annotations

from torch import Tensor

from flash_train.attention.kernels import launch
from flash_train.attention.kernels.arguments import Call


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call, kernels: str) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp by the kernels named: ``flash`` or ``triton`` (the portable ones), or ``hopper``, which
    raise ValueError where they cannot run the call."""
    if kernels == "hopper":
        from flash_train.attention.kernels.hopper import launch as hopper

        return hopper.forward(q, k, v, call)
    return launch.forward(q, k, v, call)


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    call: Call,
    kernels: str,
    needs_slopes: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients; behind Hopper's forward by the portable kernels where Hopper's backward cannot run
    (``hopper.launch.backward_unavailable`` says why)."""
    if kernels == "hopper":
        from flash_train.attention.kernels.hopper import launch as hopper

        if hopper.backward_unavailable(q, k, v, call) is None:
            return hopper.backward(dout, dlse, q, k, v, out, lse, call, needs_slopes)
    return launch.backward(dout, dlse, q, k, v, out, lse, call, needs_slopes)
