"""Which of this project's kernels run a call: Hopper's own where they can, else the portable ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from flash_train.attention.kernels import launch
from flash_train.attention.kernels.arguments import Call


def forward_of(kernels: str, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Callable[..., Any]:
    """``launch.forward`` of the kernels named: ``triton``, the portable ones; ``hopper``; or ``flash``, Hopper's where
    ``reasons_against_hopper`` has none.

    Raises:
        ValueError: ``hopper`` that cannot run the call, and why.
    """
    if kernels == "triton" or (kernels == "flash" and not _may_be_hopper(q)):
        return launch.forward
    from flash_train.attention.kernels.hopper import launch as hopper

    reason = hopper.unavailable(q, k, v, call)
    if reason is None:
        return hopper.forward
    if kernels == "hopper":
        raise ValueError(f"attention=hopper cannot run this: {reason}; use attention=flash")
    return launch.forward


def backward_of(kernels: str, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Callable[..., Any]:
    """The same of ``launch.backward``; behind Hopper's forward the portable one where Hopper's backward cannot run."""
    if kernels == "triton" or (kernels == "flash" and not _may_be_hopper(q)):
        return launch.backward
    from flash_train.attention.kernels.hopper import launch as hopper

    return hopper.backward if hopper.backward_unavailable(q, k, v, call) is None else launch.backward


def reasons_against_hopper(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[str | None, str | None]:
    """Why Hopper's forward and its backward cannot run the call; None where they can."""
    if not _may_be_hopper(q):
        reason = f"the tensors are on {q.device.type}"
        return reason, reason
    from flash_train.attention.kernels.hopper import launch as hopper

    return hopper.unavailable(q, k, v, call), hopper.backward_unavailable(q, k, v, call)


def _may_be_hopper(q: Tensor) -> bool:
    """Whether Gluon need be imported to know."""
    return q.device.type == "cuda"
