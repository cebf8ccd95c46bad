"""The mean loss per labelled token of an optimizer step, exact over micro-batches and ranks."""

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
    """

    def __init__(self) -> None:
        self.rank_loss: Tensor | None = None  # of the last step, this rank's part of the loss: a sum over its tokens
        self.reset()

    def reset(self) -> None:
        """Forget the micro-batches so far."""
        self._sums: Tensor | None = None  # (2,): loss, labelled tokens
        self._divisor = 0

    def add(self, loss_sum: Tensor, n_tokens: Tensor, n_positions: int) -> Tensor:
        """Count a micro-batch.

        Args:
            loss_sum: scalar, nats summed over the labelled tokens.
            n_tokens: scalar, the number of labelled tokens.
            n_positions: positions of the batch, with and without labels.

        Returns:
            The scalar to run backward from.
        """
        dtype = sum_dtype(loss_sum.device)
        sums = torch.stack([loss_sum.detach().to(dtype), n_tokens.to(dtype)])
        self._sums = sums if self._sums is None else self._sums + sums
        # `finish` cancels the divisor, so any constant would do. This one keeps an fp16 loss near its mean.
        self._divisor = self._divisor or n_positions
        return loss_sum / self._divisor

    def finish(self, trainer: Trainer) -> tuple[Tensor, Tensor]:
        """End the step; all ranks call it together.

        Returns:
            The step's mean loss in nats per labelled token, and the factor that turns the accumulated gradients into
            the gradients of this mean. Scalars on the training device.
        """
        assert self._sums is not None
        self.rank_loss = self._sums[0].clone()  # the reduction changes the sums
        if trainer.world_size > 1:
            if dist.is_initialized():
                dist.all_reduce(self._sums)  # the strategy's `reduce` would have the host wait for all ranks first
            else:
                self._sums = trainer.strategy.reduce(self._sums, reduce_op="sum")
        loss_sum, n_tokens = self._sums.unbind()
        n_tokens = n_tokens.clamp(min=1)  # a step without any label has loss 0 and gradient 0
        # Lightning divided the loss by the number of micro-batches, and averaged the gradients over the ranks.
        factor = self._divisor * trainer.accumulate_grad_batches * trainer.world_size / n_tokens
        self.reset()
        return loss_sum / n_tokens, factor
