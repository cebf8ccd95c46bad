"""Rules for calls under ``torch.func``: every backend has gradients; some lack ``vmap``, ``jvp`` or second ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad


def transforming() -> bool:
    """Whether a transform of ``torch.func`` or forward-mode AD is active.

    Tensors under a transform are wrapped and have no address. The result is False while ``torch.compile`` traces,
    because it handles transforms itself.
    """
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def refuse_vmap(*_: Any) -> NoReturn:
    """Raise RuntimeError under ``torch.func.vmap``; the message names the alternatives."""
    raise RuntimeError(
        "attention under torch.func.vmap (jacrev and is_grads_batched use it, too): must be backend=reference, chunked "
        "or sdpa, or one call in which the mapped dimension is part of the batch, such as q.flatten(0, 1)"
    )


def refuse_jvp(ctx: Any, *_: Any) -> Any:
    """Raise RuntimeError under ``torch.func.jvp``; the message names the alternatives."""
    raise RuntimeError(
        "attention under torch.func.jvp, jacfwd or forward-mode AD: must be backend=reference or chunked; the others "
        "support reverse mode only, as in torch.func.grad and vjp"
    )


def refuse_decoding() -> NoReturn:
    """Raise RuntimeError, because the decode kernel cannot run under any transform."""
    raise RuntimeError(
        "attention to a cache by the decode kernel under a transform of torch.func or forward-mode AD: must be "
        "backend=reference or chunked, or a call outside of the transform"
    )


def forbid_second_gradient(gradients: Sequence[Tensor | None], *inputs: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients, and raise RuntimeError if autograd later differentiates them.

    Without this, ``torch.func`` would treat the gradients as constants and return a second gradient of 0.
    """
    if not torch.is_grad_enabled():
        return tuple(gradients)
    return _ForbidSecondGradient.apply(len(gradients), *gradients, *inputs)


class _ForbidSecondGradient(torch.autograd.Function):
    @staticmethod
    def forward(count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if x is None else x.view_as(x) for x in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise RuntimeError(
            "a gradient of attention's gradient: must be backend=reference or chunked; the others have only "
            "first gradients"
        )

    jvp = staticmethod(refuse_jvp)
    generate_vmap_rule = True
