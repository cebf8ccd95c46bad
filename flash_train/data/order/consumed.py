"""Counts the training rows that a run has consumed. A resumed run continues after them, on any number of ranks."""

from dataclasses import dataclass

import lightning

from flash_train.data.order.lightning_counts import (
    drop_loader,
    drop_pending_batches,
    pending_batches,
    processed_batches,
)


@dataclass
class _Stream:
    """A training stream: it begins at row `start`, when `trainer` has processed `processed` batches.

    `processed` is None until the trainer's first epoch begins, because its counts may not be restored before.
    """

    trainer: lightning.Trainer | None
    start: int
    processed: int | None = None
    taken: int = 0  # batches taken from the loader, in a loop without a Trainer


class ConsumedRows:
    """Counts the rows that all ranks together have consumed since the beginning of the run.

    A row is consumed when its optimizer step is done. Batches of an unfinished accumulation don't count, because no
    checkpoint has their gradients. With a Trainer, Lightning counts the steps. Without one, a step is done when all its
    batches are taken from the loader.
    """

    def __init__(self) -> None:
        self._resume_at = 0  # the row at which the next stream begins
        self._stream: _Stream | None = None

    def count(self, trainer: lightning.Trainer | None, rows_per_batch: int, accumulate: int) -> int:
        """Return the number of rows consumed so far.

        Args:
            rows_per_batch: rows of a batch, on all ranks together.
            accumulate: batches per optimizer step in a loop without a Trainer.
        """
        stream = self._stream
        if stream is None or stream.trainer is not trainer:
            return self._resume_at
        return stream.start + self._batches(stream, accumulate) * rows_per_batch

    def unfinished(self, trainer: lightning.Trainer | None, accumulate: int) -> int:
        """Return how many batches of the present optimizer step a loop without a Trainer has taken."""
        stream = self._stream
        return stream.taken % accumulate if stream and trainer is None and stream.trainer is None else 0

    def begin_stream(self, trainer: lightning.Trainer | None, rows_per_batch: int, accumulate: int) -> None:
        """Begin a new training loader at the first row that is not consumed."""
        self._stream = _Stream(trainer, self.count(trainer, rows_per_batch, accumulate))
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

    def restore(self, rows: int, trainer: lightning.Trainer | None) -> None:
        """Make the next stream begin after `rows` rows."""
        self._resume_at = rows
        if trainer is not None and self._stream is not None and self._stream.trainer is trainer:
            drop_loader(trainer)
        self._stream = None

    def _batches(self, stream: _Stream, accumulate: int) -> int:
        """Count the batches of a stream's finished steps."""
        if stream.trainer is None:
            return stream.taken - stream.taken % accumulate
        if stream.processed is None:
            return 0
        processed = processed_batches(stream.trainer) - stream.processed
        return processed - min(pending_batches(stream.trainer), processed)
