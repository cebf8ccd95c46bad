"""The validation that a run owes: due at the step of its checkpoint, and ended by nothing but the run's end."""

from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loops.fit_loop import _FitLoop

from flash_train.training.callbacks.base import find_callback
from flash_train.training.callbacks.record import RunRecord

DUE = "validation_due"  # a checkpoint's entry: whether a validation was due right after it was written


class MissedValidation(Callback):
    """When a run is resumed, does the validation that was due at its checkpoint and that its metrics.csv lacks.

    A checkpoint is written before the validation of the same step, so that a validation can be killed or cut short
    without loss. `RunRecord` (which must be there, before this callback) knows whether it has ended. Validations by
    epochs, of a `Trainer` with `check_val_every_n_epoch`, are not looked for.
    """

    def __init__(self) -> None:
        self._due = False

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        record = find_callback(trainer, RunRecord, before=self)
        if record is None:
            raise ValueError("MissedValidation needs RunRecord before it among the trainer's callbacks")
        self._record = record

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        at_end = trainer.global_step == trainer.max_steps
        before_stop = trainer.should_stop and not getattr(pl_module, "skip_validation", False)
        checkpoint[DUE] = at_end or before_stop or _by_interval(trainer)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self._due = checkpoint.get(DUE, checkpoint["global_step"] == trainer.max_steps)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        missed = self._due and trainer.enable_validation and self._record.lacks_validation(trainer.global_step)
        self._due = False
        if not trainer.strategy.broadcast(missed):  # the first rank's, which has the table
            return
        loop = trainer.fit_loop.epoch_loop.val_loop
        loop.restarting = False  # all batches, whatever the counts in the checkpoint are
        trainer.validating = True
        loop.run()
        trainer.training = True


class ClosingFitLoop(_FitLoop):
    """Lightning's, which does nothing where `max_steps` are done; this one still closes a run that never ended.

    No step is taken: training starts and ends, with what the callbacks do then (`MissedValidation`, `RunRecord`).
    """

    @property
    def skip(self) -> bool:
        return super().skip and not self._is_to_be_closed()

    def _is_to_be_closed(self) -> bool:
        trainer = self.trainer
        record = find_callback(trainer, RunRecord)
        unfinished = record is not None and trainer.ckpt_path is not None and record.is_unfinished()
        return trainer.strategy.broadcast(unfinished and trainer.global_step == trainer.max_steps)


def _by_interval(trainer: Trainer) -> bool:
    """Whether a validation is due at the batches done, where it goes by batches."""
    every, counts = trainer.val_check_interval, trainer.fit_loop.epoch_loop.batch_progress
    by_batches = trainer.check_val_every_n_epoch is None and isinstance(every, int)
    return by_batches and counts.total.processed % every == 0  # type: ignore[attr-defined]
