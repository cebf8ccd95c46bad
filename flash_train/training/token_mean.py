"""The mean loss per labelled token of an optimizer step, exact over micro-batches and ranks."""

import math

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return float64, which adds up the losses of a million tokens without notable rounding error; fp32 on MPS."""
    return torch.float32 if device.type == "mps" else torch.float64


class TokenMean:
    """Gives every labelled token of a step the same weight, however tokens are spread over micro-batches and ranks.

    Lightning averages losses over micro-batches and gradients over ranks, which would weigh a micro-batch with few
    labels as much as one with many. Here each micro-batch contributes its sum over tokens, divided by a constant. When
    the step's true token count is known, `finish` returns the factor that replaces the constant by this count.

    Attributes:
        rank_loss: of the last step, this rank's part of the loss: a sum over its tokens.
        divisor: the constant, the same on all ranks; 0 before `agree`. It is a power of two, so that no bit of the
            result depends on it, and near the positions of a micro-batch, so that an fp16 loss is near its mean.
    """

    def __init__(self) -> None:
        self.rank_loss: Tensor | None = None
        self.begin()

    def begin(self) -> None:
        """Begin a training: forget the micro-batches so far, and the constant."""
        self._sums: Tensor | None = None  # (2,): loss, labelled tokens
        self.divisor = 0.0

    def agree(self, n_positions: int, trainer: Trainer, device: torch.device) -> None:
        """Choose the constant at the first micro-batch of a training; all ranks call it together.

        Args:
            n_positions: positions of this rank's micro-batch, with and without labels.
        """
        if self.divisor == 0:
            total = torch.tensor(float(n_positions), device=device)
            total = _sum_over_ranks(total, trainer)
            self.divisor = 2.0 ** round(math.log2(max(1.0, total.item() / trainer.world_size)))

    def add(self, loss_sum: Tensor, n_tokens: Tensor) -> Tensor:
        """Count a micro-batch.

        Args:
            loss_sum: scalar, nats summed over the labelled tokens.
            n_tokens: scalar, the number of labelled tokens.

        Returns:
            The scalar to run backward from.
        """
        dtype = sum_dtype(loss_sum.device)
        sums = torch.stack([loss_sum.detach().to(dtype), n_tokens.to(dtype)])
        self._sums = sums if self._sums is None else self._sums + sums
        return loss_sum / self.divisor

    def finish(self, trainer: Trainer) -> tuple[Tensor, Tensor]:
        """End the step; all ranks call it together.

        Returns:
            The step's mean loss in nats per labelled token, and the factor that turns the accumulated gradients into
            the gradients of this mean. Scalars on the training device.
        """
        assert self._sums is not None
        self.rank_loss = self._sums[0].clone()  # the reduction changes the sums
        loss_sum, n_tokens = _sum_over_ranks(self._sums, trainer).unbind()
        self._sums = None
        n_tokens = n_tokens.clamp(min=1)  # a step without any label has loss 0 and gradient 0
        # Lightning divided the loss by the number of micro-batches, and averaged the gradients over the ranks.
        factor = self.divisor * trainer.accumulate_grad_batches * trainer.world_size / n_tokens
        return loss_sum / n_tokens, factor


def _sum_over_ranks(x: Tensor, trainer: Trainer) -> Tensor:
    """Return the sum of a tensor over all ranks, in the same memory where that is possible."""
    if trainer.world_size > 1:
        if not dist.is_initialized():
            return trainer.strategy.reduce(x, reduce_op="sum")
        dist.all_reduce(x)  # the strategy's `reduce` would have the host wait for all ranks first
    return x
