"""Lightning's counts of training batches, and the epoch hook of its loaders."""

from collections.abc import Callable
from typing import Any

import lightning


def processed_batches(trainer: lightning.Trainer) -> int:
    """Count the training batches of all epochs, including those before the run was resumed.

    The count goes up after a batch's optimizer step and before `on_train_batch_end`.
    """
    return _counts(trainer).total.processed


def pending_batches(trainer: lightning.Trainer) -> int:
    """Count the processed batches of an unfinished accumulation, that is, those that have no optimizer step yet."""
    processed = _counts(trainer).current.processed
    if isinstance(trainer.limit_train_batches, int) and processed == trainer.limit_train_batches:
        return 0  # the optimizer steps at the end of Lightning's epoch, even if fewer batches are accumulated
    return processed % trainer.accumulate_grad_batches


def batches_of_epoch(trainer: lightning.Trainer) -> int:
    """Count the batches of Lightning's current epoch that have an optimizer step."""
    return _counts(trainer).current.processed - pending_batches(trainer)


class EpochStart:
    """Calls `function` when an epoch of Lightning's begins, after a checkpoint's counts are restored.

    Lightning then calls `set_epoch` of `loader.batch_sampler.sampler`; this object stands for both samplers. The
    loader itself can be requested earlier, before counts are restored: for `trainer.estimated_stepping_batches`.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self.function, self.sampler = function, self

    def set_epoch(self, epoch: int) -> None:
        self.function()


def never_validates(trainer: lightning.Trainer) -> bool:
    """Whether `fit` would validate only at the end of an epoch, which endless batches never reach."""
    if trainer.state.fn != "fit" or isinstance(trainer.limit_train_batches, int):
        return False
    interval = getattr(trainer, "val_check_interval", None)  # absent if the interval is a time
    return trainer.enable_validation and isinstance(interval, float) and interval == 1.0  # 1: after each batch


def drop_loader(trainer: lightning.Trainer) -> None:
    """Make Lightning request the training loader again; the current one may have fetched batches already."""
    trainer.fit_loop._combined_loader = None


def drop_pending_batches(trainer: lightning.Trainer) -> None:
    """Remove pending batches from Lightning's counts, because no checkpoint has their gradients.

    Call it when the first epoch begins: counts are restored by then, and no batch has been counted yet. Otherwise the
    first accumulation of a resumed run would be short by this many batches. With endless epochs, the counts are set as
    if every earlier step had accumulated as many batches as now, because validation intervals are counted in batches.
    """
    if trainer.lightning_module is None or not trainer.lightning_module.automatic_optimization:
        return  # no run, or the module makes its own steps
    loop, steps = trainer.fit_loop.epoch_loop, trainer.global_step
    current, total = _counts(trainer).current, _counts(trainer).total
    if isinstance(trainer.limit_train_batches, int):
        pending = pending_batches(trainer)
        epoch, run = current.processed - pending, total.processed - pending
    else:
        epoch = run = steps * trainer.accumulate_grad_batches
    if (epoch, run) == (current.processed, total.processed):
        return
    for progress, count in ((current, epoch), (total, run)):
        progress.ready = progress.started = progress.processed = count
        progress.completed = count - 1 if epoch else count
    if epoch:  # as in a checkpoint from `on_train_batch_end`; Lightning then counts the batch and step as completed
        loop._batches_that_stepped = steps - 1
    else:
        loop.restarting = False
    loop.update_restart_stage()  # Lightning derives it from these counts, and may already have done so


def _counts(trainer: lightning.Trainer) -> Any:
    return trainer.fit_loop.epoch_loop.batch_progress
