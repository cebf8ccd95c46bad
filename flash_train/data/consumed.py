"""Counts the training batches that a run has consumed. A resumed run continues after them."""

from dataclasses import dataclass

import lightning

from flash_train.data.lightning_counts import drop_loader, drop_pending_batches, pending_batches, processed_batches


@dataclass
class _Stream:
    """A training stream: it begins at batch `start`, when `trainer` has processed `processed` batches.

    `processed` is None until the trainer's first epoch begins, because its counts may not be restored before.
    """

    trainer: lightning.Trainer | None
    start: int
    processed: int | None = None
    taken: int = 0  # batches taken from the loader, in a loop without a Trainer


class ConsumedBatches:
    """Counts this rank's consumed batches since the beginning of the run.

    With a Trainer, a batch is consumed when its optimizer step is done. Batches of an unfinished accumulation don't
    count, because no checkpoint has their gradients. Without a Trainer, a batch is consumed when it is taken from its
    loader.
    """

    def __init__(self) -> None:
        self._resume_at = 0  # the batch at which the next stream begins
        self._stream: _Stream | None = None

    def count(self, trainer: lightning.Trainer | None) -> int:
        """Return the number of batches consumed so far."""
        stream = self._stream
        if stream is None or stream.trainer is not trainer:
            return self._resume_at
        if trainer is None:
            return stream.start + stream.taken
        if stream.processed is None:
            return stream.start
        processed = processed_batches(trainer) - stream.processed
        return stream.start + processed - min(pending_batches(trainer), processed)

    def begin_stream(self, trainer: lightning.Trainer | None) -> None:
        """Begin a new training loader at the first batch that is not consumed."""
        self._stream = _Stream(trainer, self.count(trainer))
        self._resume_at = 0

    def begin_epoch(self) -> None:
        """Note how many batches the trainer has processed, in whole steps, when the first epoch of a fit begins."""
        stream = self._stream
        if stream is not None and stream.processed is None and stream.trainer is not None:
            drop_pending_batches(stream.trainer)
            stream.processed = processed_batches(stream.trainer)

    def take(self) -> None:
        """Count a batch that a loop without a Trainer takes from its loader."""
        if self._stream is not None:
            self._stream.taken += 1

    def restore(self, consumed: int, trainer: lightning.Trainer | None) -> None:
        """Make the next stream begin after `consumed` batches."""
        self._resume_at = consumed
        if trainer is not None and self._stream is not None and self._stream.trainer is trainer:
            drop_loader(trainer)
        self._stream = None
