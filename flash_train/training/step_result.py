"""What an optimizer step leaves for callbacks to read."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class StepResult:
    """Result of the newest optimizer step. Tensors are scalars on the training device, not yet synchronised.

    Args:
        step: optimizer steps so far, including this one.
        loss: float64 (fp32 on MPS), nats per labelled token over the step's micro-batches on all ranks.
        gradient_norm: fp32, norm of this loss's gradient before clipping.
        learning_rate: the rate that this step used.
        rank_loss: as `loss`, in nats summed over the labelled tokens of this rank; None stands for `loss`.
    """

    step: int
    loss: Tensor
    gradient_norm: Tensor
    learning_rate: float
    rank_loss: Tensor | None = None
