"""Runs AdamW's step within the backward, so that the gradients need not all be in memory at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from flash_train.optim.adamw import AdamW


class GradientNorms:
    """The norms of the gradients that a backward has had."""

    def __init__(self) -> None:
        self._norms: dict[int, Tensor] = {}  # by the weight's number

    def add(self, number: int, gradient: Tensor) -> None:
        self._norms[number] = torch.linalg.vector_norm(gradient, dtype=torch.float32)

    def total(self) -> Tensor:
        """Return the norm of all gradients together, an fp32 scalar on their device.

        Raises:
            ValueError: there was no gradient.
        """
        if not self._norms:
            raise ValueError("step_in_backward: no weight got a gradient")
        return torch.linalg.vector_norm(torch.stack([norm for _, norm in sorted(self._norms.items())]))


@contextmanager
def step_in_backward(optimizer: AdamW) -> Iterator[GradientNorms]:
    """Update each weight during a backward in this context, as soon as its gradient is complete, and free the gradient.

    Weights and state get the same bits as from `optimizer.step()` after the backward. `optimizer.grad_scale` divides
    each gradient, and stays until `optimizer.step()`, which has nothing else to do then. (PyTorch's tutorials call this
    an optimizer step in the backward.)

    It is for one backward per step on one device. Nothing can look at all gradients before the weights change, so they
    cannot be clipped by their norm, summed over several backwards, or exchanged with other devices.

    Yields:
        The norms of the gradients before `grad_scale` divides them.

    Raises:
        TypeError: another optimizer, which cannot update one weight by itself.
    """
    if not isinstance(optimizer, AdamW):
        kind = type(optimizer)
        raise TypeError(f"optimizer={kind.__module__}.{kind.__qualname__}: must be a flash_train.optim.AdamW")
    norms = GradientNorms()
    places: dict[Tensor, tuple[int, dict[str, Any]]] = {}
    for group in optimizer.param_groups:
        places |= {weight: (len(places) + i, group) for i, weight in enumerate(group["params"])}

    def update(weight: Tensor) -> None:
        number, group = places[weight]
        assert weight.grad is not None  # the hook runs once it is accumulated
        norms.add(number, weight.grad)
        optimizer.step_one(weight, number, group)
        torch.autograd.graph.increment_version(weight)  # a graph that still needs the old weight raises
        weight.grad = None

    handles = [weight.register_post_accumulate_grad_hook(update) for weight in places if weight.requires_grad]
    try:
        yield norms
    finally:
        for handle in handles:
            handle.remove()
