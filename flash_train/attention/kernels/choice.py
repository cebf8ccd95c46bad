"""Which of this project's kernels run a call: the portable ones, or Hopper's own where they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from flash_train.attention.kernels import launch
from flash_train.attention.kernels.arguments import Call


def forward_of(kernels: str) -> Callable[..., Any]:
    """``launch.forward`` of the kernels named: ``flash`` or ``triton`` (the portable ones), or ``hopper``, which raise
    ValueError where they cannot run the call."""
    if kernels != "hopper":
        return launch.forward
    from flash_train.attention.kernels.hopper import launch as hopper

    return hopper.forward


def backward_of(kernels: str, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Callable[..., Any]:
    """The same of ``launch.backward``; behind Hopper's forward the portable one where Hopper's backward cannot run
    (``hopper.launch.backward_unavailable`` says why)."""
    if kernels != "hopper":
        return launch.backward
    from flash_train.attention.kernels.hopper import launch as hopper

    return hopper.backward if hopper.backward_unavailable(q, k, v, call) is None else launch.backward
