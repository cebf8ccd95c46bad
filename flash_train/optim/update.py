"""What a step of AdamW computes for weights with the same format and the same number of steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flash_train.optim.state import Format, State


@dataclass(frozen=True)
class Update:
    """A step for some weights, or for this rank's parts of sharded ones.

    Attributes:
        key: the same for the same weights in other steps.
        weights, gradients: contiguous, of the format's dtype.
        states: of the weights, without ``step``.
        numbers, part: what a weight's random numbers depend on: its number, and which part of a sharded weight it is.
        step: counts this step, too.
        grad_scale: scalar that divides the gradients; None for 1.
    """

    key: tuple[str, int, int]
    storage: Format
    weights: list[Tensor]
    gradients: list[Tensor]
    states: list[State]
    numbers: list[int]
    part: int
    step: int
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    seed: int
    grad_scale: Tensor | None

    def check(self) -> None:
        """Raise ValueError for tensors that do not have the format's dtypes or are not where they should be."""
        device = self.weights[0].device
        state_device = torch.device("cpu") if self.storage.on_host else device
        for tensor in (*self.weights, *self.gradients):
            _check(tensor, self.storage.weight, device)
        for state in self.states:
            for name in ("exp_avg", "exp_avg_sq"):
                _check(state[name], self.storage.moment, state_device)


def _check(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> None:
    if not tensor.is_contiguous():
        raise ValueError("AdamW: a weight or a moment is no longer contiguous; build the optimizer after the change")
    if tensor.dtype != dtype or tensor.device != device:
        raise ValueError(
            f"AdamW was built for other weights: {dtype} on {device}, and a tensor is {tensor.dtype} on "
            f"{tensor.device}; build the optimizer after the model is moved and cast"
        )
