"""Stops a run at the first nan or inf, without waiting for the device at every step."""

import math
from typing import Any

import torch
from lightning.pytorch import Trainer

from flash_train.distributed.peers import name_ranks
from flash_train.training.callbacks.base import HostCopy, StepCallback, require, will_stop


class NonFiniteLossError(RuntimeError):
    """A training step's loss or gradient norm, or the last validation's loss, is nan or inf, on all ranks.

    The message names the step, and the ranks if only some ranks' part of the loss is nan or inf.
    """

    on_all_ranks = True


class NonFiniteLoss(StepCallback):
    """Raises `NonFiniteLossError` for the first step whose loss or gradient norm is nan or inf.

    The update of the last step can ruin the weights, too, and no later step's loss would tell. So the error is also
    raised if the validation after it has a loss that is nan or inf.

    Both numbers are copied to the host while the next step is being queued, and read when the next step ends. So the
    device never idles, the message names the right step, and a checkpoint is written only after its step was read.
    Under a loss scaler (fp16-mixed) gradients overflow now and then by design, so only the loss is checked. The module
    needs `last_step`, as in `CausalLMModule`.
    """

    def __init__(self) -> None:
        self._pending: tuple[int, HostCopy] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        require(self, pl_module, "last_step")
        self._pending = None  # of an earlier fit that ended with an error

    def on_step_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._read(trainer)
        result = pl_module.last_step
        scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        norm = torch.zeros_like(result.loss) if scaled else result.gradient_norm.to(result.loss.dtype)
        rank_loss = getattr(result, "rank_loss", None)
        values = torch.stack([result.loss, norm, result.loss if rank_loss is None else rank_loss])
        self._pending = (result.step, HostCopy(values))
        if values.device.type != "cuda":
            self._read(trainer)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict) -> None:
        self._read(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        step, metrics = trainer.global_step, getattr(pl_module, "validation", {})  # the same on all ranks
        is_last = trainer.state.fn == "fit" and (will_stop(trainer) or step == trainer.max_steps)
        if is_last and not math.isfinite(loss := metrics.get("val/loss", 0.0)):
            self._read(trainer)  # this step's own loss tells more
            raise NonFiniteLossError(
                f"the validation loss is {loss} after step {step}, the last one: lower optimizer.lr or inspect the data"
            )

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._read(trainer)

    def _read(self, trainer: Trainer) -> None:
        if self._pending is None:
            return
        (step, values), self._pending = self._pending, None
        loss, norm, rank_loss = values.read()
        if not math.isfinite(loss):
            where = f"at step {step}{_ranks(trainer, rank_loss)}"
            raise NonFiniteLossError(f"the training loss is {loss} {where}: lower optimizer.lr or inspect the data")
        if not math.isfinite(norm):
            raise NonFiniteLossError(
                f"the gradient norm is {norm} at step {step} (its loss is {loss:.4f}): lower optimizer.lr"
            )


def _ranks(trainer: Trainer, rank_loss: float) -> str:
    """Return the names of the ranks whose loss is not finite, or nothing if all are; all ranks call it."""
    if trainer.world_size == 1:
        return ""
    marks = torch.zeros(trainer.world_size, device=trainer.strategy.root_device)
    marks[trainer.global_rank] = not math.isfinite(rank_loss)
    ranks = trainer.strategy.reduce(marks, reduce_op="sum").nonzero().flatten().tolist()
    return f" on {name_ranks(ranks)}" if 0 < len(ranks) < trainer.world_size else ""
