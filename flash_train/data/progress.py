"""Lightning's counts of batches, and where in them a resumed run begins."""

from collections.abc import Callable
from typing import Any

import lightning


def processed_batches(trainer: lightning.Trainer) -> int:
    """Training batches of all epochs, and of before the run was resumed.

    Raised after a batch's optimizer step and before `on_train_batch_end`.
    """
    return _counts(trainer).total.processed


def pending_batches(trainer: lightning.Trainer) -> int:
    """How many of them are of an accumulation still under way, that is, without an optimizer step yet."""
    processed = _counts(trainer).current.processed
    if isinstance(trainer.limit_train_batches, int) and processed == trainer.limit_train_batches:
        return 0  # the optimizer steps at the end of an epoch of Lightning, however many are accumulated
    return processed % trainer.accumulate_grad_batches


def batches_of_epoch(trainer: lightning.Trainer) -> int:
    """How many of them are of the present epoch of Lightning, and have an optimizer step."""
    return _counts(trainer).current.processed - pending_batches(trainer)


class EpochStart:
    """Calls `function` as each epoch of Lightning's begins, after a checkpoint's counts are restored.

    Lightning calls `set_epoch` of `loader.batch_sampler.sampler` then. The loader itself may be asked for earlier: for
    `trainer.estimated_stepping_batches`, before the counts are restored. This object stands for both samplers.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self.function, self.sampler = function, self

    def set_epoch(self, epoch: int) -> None:
        self.function()


def never_validates(trainer: lightning.Trainer) -> bool:
    """Whether a `fit` would validate at the end of an epoch alone, which batches without an end never come to."""
    if trainer.state.fn != "fit" or isinstance(trainer.limit_train_batches, int):
        return False
    interval = getattr(trainer, "val_check_interval", None)  # it has none where the interval is a time
    return trainer.enable_validation and interval == 1.0


def drop_loader(trainer: lightning.Trainer) -> None:
    """Make Lightning ask for the training loader once more: from the one it holds, batches may be fetched already."""
    trainer.fit_loop._combined_loader = None


def begin_a_whole_step(trainer: lightning.Trainer) -> None:
    """Take pending batches back from Lightning's counts, for their gradients are in no checkpoint.

    Called as the first epoch begins: counts are restored by then, and no batch is counted yet. Otherwise the first step
    of a resumed run would be as many batches short. Where epochs have no end, the counts are
    those of a run that had always accumulated as many batches as this one does: validation is due by them.
    """
    if trainer.lightning_module is None or not trainer.lightning_module.automatic_optimization:
        return  # no run, or steps are the module's own affair
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
    if epoch:  # as in a checkpoint of `on_train_batch_end`, after which Lightning counts batch and step as completed
        loop._batches_that_stepped = steps - 1
    else:
        loop.restarting = False
    loop.update_restart_stage()  # Lightning derives it from these counts, and may have done so before


def _counts(trainer: lightning.Trainer) -> Any:
    return trainer.fit_loop.epoch_loop.batch_progress
