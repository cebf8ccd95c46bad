"""Calls under ``torch.func``: every backend has gradients; ``vmap``, ``jvp`` and second gradients only some have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad


def transforming() -> bool:
    """Whether a transform of ``torch.func`` is active, whose tensors are wrapped and have no address, or forward-mode
    AD. False while ``torch.compile`` traces, which handles transforms itself."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def refuse_vmap(*_: Any) -> NoReturn:
    """Raise RuntimeError: a rule for ``torch.func.vmap`` that says what to do without it."""
    raise RuntimeError(
        "attention under torch.func.vmap (jacrev and is_grads_batched use it, too): must be backend=reference, chunked "
        "or sdpa, or one call in which the mapped dimension is part of the batch, as of q.flatten(0, 1)"
    )


def refuse_jvp(ctx: Any, *_: Any) -> Any:
    """Raise RuntimeError: a rule for ``torch.func.jvp`` that says what to do without it."""
    raise RuntimeError(
        "attention under torch.func.jvp, jacfwd or forward-mode AD: must be backend=reference or chunked; the others "
        "have gradients in reverse only, as of torch.func.grad and vjp"
    )


def refuse_decoding() -> NoReturn:
    """Raise RuntimeError: the decode kernel under any transform."""
    raise RuntimeError(
        "attention to a cache by the decode kernel under a transform of torch.func or forward-mode AD: must be "
        "backend=reference or chunked, or a call outside of the transform"
    )


def first_order(gradients: Sequence[Tensor | None], *inputs: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients; where a graph of them is recorded, a gradient of them raises RuntimeError.

    ``torch.func`` takes what autograd did not see as constant, and would return a second gradient of 0.
    """
    return _FirstOrder.apply(len(gradients), *gradients, *inputs) if torch.is_grad_enabled() else tuple(gradients)


class _FirstOrder(torch.autograd.Function):
    @staticmethod
    def forward(count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if x is None else x.view_as(x) for x in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise RuntimeError(
            "a gradient of attention's gradient: must be backend=reference or chunked; the others have the first only"
        )

    jvp = staticmethod(refuse_jvp)
    generate_vmap_rule = True
