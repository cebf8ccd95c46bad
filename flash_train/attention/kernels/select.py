"""Which of this project's kernels run a call: Hopper's own where they can, else the portable ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from flash_train.attention.kernels.call import Call
from flash_train.attention.kernels.portable import launch


def forward_of(kernels: str, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Callable[..., Any]:
    """``launch.forward`` of the kernels named: ``triton``, the portable ones; ``hopper``; or ``flash``, Hopper's where
    ``reasons_against_hopper`` has none.

    Raises:
        ValueError: ``hopper`` that cannot run the call, and why.
    """
    hopper = _hopper(kernels, q)
    if hopper is None:
        return launch.forward
    reason = hopper.unavailable(q, k, v, call)
    if reason is None:
        return hopper.forward
    if kernels == "hopper":
        raise ValueError(f"the hopper backend cannot run this: {reason}; flash can")
    return launch.forward


def backward_of(kernels: str, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Callable[..., Any]:
    """The same of ``launch.backward``; behind Hopper's forward the portable one where Hopper's backward cannot run."""
    hopper = _hopper(kernels, q)
    if hopper is None or hopper.backward_unavailable(q, k, v, call) is not None:
        return launch.backward
    return hopper.backward


def reasons_against_hopper(kernels: str, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[str | None, str | None]:
    """Why Hopper's forward and its backward do not run the call; None where they do. Raises as ``forward_of``."""
    forward_of(kernels, q, k, v, call)
    hopper = _hopper(kernels, q)
    if hopper is None:
        reason = "they were asked for" if kernels == "triton" else f"the tensors are on {q.device.type}"
        return reason, reason
    return hopper.unavailable(q, k, v, call), hopper.backward_unavailable(q, k, v, call)


def _hopper(kernels: str, q: Tensor) -> Any:
    """Hopper's launches, where they come into question: Gluon is imported for nothing else."""
    if kernels == "triton" or (kernels == "flash" and not q.is_cuda):
        return None
    from flash_train.attention.kernels.hopper import launch as hopper

    return hopper
