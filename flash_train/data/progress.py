"""Lightning's counts of batches, and where in them a resumed run begins."""

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


def begin_a_whole_step(trainer: lightning.Trainer) -> None:
    """Take pending batches back from Lightning's counts, for their gradients are in no checkpoint.

    Otherwise the first step of a resumed run would be as many batches short. Where epochs have no end, the counts are
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


def _counts(trainer: lightning.Trainer) -> Any:
    return trainer.fit_loop.epoch_loop.batch_progress
