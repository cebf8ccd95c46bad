"""Repeats a validation that was due at a checkpoint's step and did not complete."""

from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loops.fit_loop import _FitLoop

from flash_train.training.callbacks.base import find_callback, will_stop
from flash_train.training.callbacks.record import RunRecord, is_unfinished

DUE = "validation_due"  # an entry of a checkpoint: whether a validation was due right after it was written


class MissedValidation(Callback):
    """When a run is resumed, runs the validation that was due at its checkpoint and is missing from its metrics.csv.

    A checkpoint is written before the validation of the same step, so a validation can be killed or cut short without
    loss. `RunRecord`, which must run before this callback, knows whether the validation completed. With
    `Trainer(check_val_every_n_epoch=...)`, validations at the end of epochs are not repeated.
    """

    def __init__(self) -> None:
        self._due = False

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        record = find_callback(trainer, RunRecord, before=self)
        if record is None:
            raise ValueError(
                "MissedValidation needs RunRecord before it: Trainer(callbacks=[RunRecord(...), MissedValidation()])"
            )
        self._record = record

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        at_end = trainer.global_step == trainer.max_steps
        before_stop = will_stop(trainer) and not getattr(pl_module, "skip_validation", False)
        checkpoint[DUE] = at_end or before_stop or _is_due_by_interval(trainer)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self._due = checkpoint.get(DUE, checkpoint["global_step"] == trainer.max_steps)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        missed = self._due and trainer.enable_validation and self._record.lacks_validation(trainer.global_step)
        self._due = False
        if not trainer.strategy.broadcast(missed):  # only the first rank has the table
            return
        loop = trainer.fit_loop.epoch_loop.val_loop
        loop.restarting = False  # all batches, even if the checkpoint's counts say that some are done
        trainer.validating = True
        loop.run()
        trainer.training = True


class CompletingFitLoop(_FitLoop):
    """A fit loop that completes the record of a run that has done all its steps but was killed before its end.

    Lightning's loop does nothing once `max_steps` are done. This one starts and ends training without taking a step,
    so that `MissedValidation` validates and `RunRecord` writes the summary.
    """

    @property
    def skip(self) -> bool:
        return super().skip and not self._lacks_end()

    def _lacks_end(self) -> bool:
        trainer = self.trainer
        record = find_callback(trainer, RunRecord)
        unfinished = record is not None and trainer.ckpt_path is not None and is_unfinished(record.run_dir)
        return trainer.strategy.broadcast(unfinished and trainer.global_step == trainer.max_steps)


def _is_due_by_interval(trainer: Trainer) -> bool:
    """Whether a validation is due after the batches so far; False if the trainer validates by epochs."""
    every, counts = trainer.val_check_interval, trainer.fit_loop.epoch_loop.batch_progress
    by_batches = trainer.check_val_every_n_epoch is None and isinstance(every, int)
    return by_batches and counts.total.processed % every == 0  # type: ignore[attr-defined]
