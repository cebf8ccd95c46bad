"""One optimizer step on several ranks, and the same step on one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from flash_train.attention.kernels.families import is_own
from flash_train.distributed.dims import data_share
from flash_train.model import ModelConfig, Transformer
from flash_train.model.ops import IGNORE_INDEX
from flash_train.precision import PRECISIONS
from flash_train.training.batch import Batch
from flash_train.training.callbacks.step_seed import seed_of_rows
from flash_train.training.module import CausalLMModule
from flash_train.training.optimizer import OptimizerConfig

LIMIT = 3.0  # times one device's own error
#: least error that counts as one device's own (it may be 0 by chance), relative to the loss or the largest gradient
FLOOR = {"fp32": 2e-6, "bf16-mixed": 4e-3, "bf16-true": 4e-3, "fp8": 4e-3}


@dataclass(frozen=True)
class StepValues:
    """What a step computes.

    Attributes:
        loss: mean over the labelled tokens, in nats.
        gradients: of this mean, by the weight's name; on the CPU.
    """

    loss: float
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class CheckedStep:
    """The step to compare: a model, with weights drawn from the seed, and the rows of all data ranks.

    Attributes:
        batches: one for each data rank, as `flash_train.data.dataset.collate` makes them, with ``places``.
        precision: a name of `flash_train.precision.PRECISIONS`.
        attention, memory: as for `Transformer`.
        seed: of the weights and of dropout.
        context: how many ranks share a row.
    """

    model: ModelConfig
    batches: Sequence[Batch]
    precision: str
    attention: str
    memory: str
    seed: int
    context: int = 1

    @property
    def shares_mask(self) -> bool:
        return self.context > 1 and self.model.attention_dropout > 0

    def draw_weights(self, model: Transformer) -> None:
        torch.manual_seed(self.seed)
        model.draw_weights()

    def module(self) -> _KeepsGradients:
        """Return the module that a Trainer on several ranks takes the step with; `init_module` may place it."""
        module = _KeepsGradients(
            self.model, OptimizerConfig(gradient_clip=None), attention=self.attention, memory=self.memory
        )
        module.first_weights = self.draw_weights
        return module


class _KeepsGradients(CausalLMModule):
    """Keeps the gradients of the step on the first rank."""

    values: StepValues | None = None
    validation_step: Any = LightningModule.validation_step  # none: Lightning warns about one without rows

    def configure_gradient_clipping(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        super().configure_gradient_clipping(optimizer, *args, **kwargs)
        assert self.last_step is not None
        divisor = getattr(optimizer, "grad_scale", None)  # a fused step divides by it
        gradients = {}
        for name, parameter in self.model.named_parameters():
            gradient: Any = parameter.grad
            if hasattr(gradient, "full_tensor"):  # all ranks send their parts
                gradient = gradient.full_tensor()
            if self.trainer.is_global_zero:
                gradients[name] = (gradient if divisor is None else gradient / divisor).cpu()
        self.values = StepValues(float(self.last_step.loss), gradients)


class _Rows(LightningDataModule):
    def __init__(self, batches: Sequence[Batch]) -> None:
        super().__init__()
        self.batches = batches

    def train_dataloader(self) -> DataLoader:
        assert self.trainer is not None
        rank, ranks = data_share(self.trainer.strategy)
        return DataLoader(self.batches[rank::ranks], batch_size=None)  # type: ignore[arg-type]


def take_step(step: CheckedStep, module: _KeepsGradients, trainer: Trainer) -> StepValues:
    """Take the step with a Trainer of ``max_steps=1``, on all its ranks; only the first rank gets the gradients."""
    trainer.fit(module, datamodule=_Rows(step.batches))
    assert module.values is not None
    return module.values


def take_step_alone(step: CheckedStep, device: torch.device, *, exact: bool) -> StepValues:
    """Take the step in this process, row by row, without a Trainer.

    If ranks share a row, standard and chunked attention draw the same dropout mask as this project's kernels; on one
    device they use PyTorch's generator. So the reference replaces them here: it draws the ranks' mask.

    Args:
        exact: compute in fp32, from the weights that the precision rounds.
    """
    precision, outside = PRECISIONS[step.precision], torch.get_default_dtype()
    attention = "reference" if step.shares_mask and not is_own(step.attention) else step.attention
    torch.set_default_dtype(precision.weight_dtype)
    try:
        with device:
            module = CausalLMModule(step.model, attention=attention, memory=step.memory)
            step.draw_weights(module.model)
    finally:
        torch.set_default_dtype(outside)
    model: Any = module.model
    if exact:
        model.float()
    mixed = not exact and precision.compute != precision.weights
    total, count = 0.0, 0
    labelled = [batch for batch in step.batches if (batch["labels"] != IGNORE_INDEX).any()]
    for batch in labelled or step.batches[:1]:  # the others add nothing to the loss or the gradients
        batch = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in batch.items()}
        torch.manual_seed(seed_of_rows(step.seed, batch["places"]))
        with torch.autocast(device.type, precision.compute_dtype, enabled=mixed):
            loss, n_tokens = model.loss(batch["tokens"], batch["labels"], **module.model_arguments(batch))
        loss.backward()
        total, count = total + loss.item(), count + int(n_tokens)
    count = max(1, count)
    return StepValues(total / count, {name: (p.grad / count).cpu() for name, p in model.named_parameters()})


@dataclass(frozen=True)
class Agreement:
    """How far a step on several ranks is from the step on one device.

    Attributes:
        losses: on several ranks, and on one device.
        error: the largest error of loss and gradients, as a multiple of one device's own error.
        worst: the name of the tensor with this error.
    """

    losses: tuple[float, float]
    error: float
    worst: str

    @property
    def holds(self) -> bool:
        return self.error <= LIMIT


def compare(ranks: StepValues, alone: StepValues, exact: StepValues, precision: str) -> Agreement:
    """Compare a step on several ranks with the same step on one device.

    An error is the largest absolute difference from `exact`, a step in fp32. One device's own error is the error of
    `alone`, but at least `FLOOR` times the loss or the largest gradient.
    """
    floor = FLOOR[precision]
    scale = max(float(gradient.abs().max()) for gradient in exact.gradients.values())
    allowed = max(abs(alone.loss - exact.loss), floor * abs(exact.loss))
    found = [(abs(ranks.loss - exact.loss) / allowed, "loss")]
    for name, right in exact.gradients.items():
        own, theirs = (float((x.gradients[name] - right).abs().max()) for x in (alone, ranks))
        found.append((theirs / max(own, floor * scale), name))
    error, worst = max(found, key=lambda pair: pair[0] if pair[0] == pair[0] else float("inf"))
    return Agreement((ranks.loss, alone.loss), error, worst)
