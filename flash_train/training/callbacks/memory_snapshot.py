"""Records the memory use of whole optimizer steps during training."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from flash_train.distributed.sharding import local
from flash_train.precision import lightning_compute_dtype
from flash_train.profiling.memory.allocations import MemoryProfile, Recording, profile_of
from flash_train.records.memory_use import begin_peak
from flash_train.training.callbacks.base import RecordingCallback, find_callback, require
from flash_train.training.callbacks.throughput import Throughput


@dataclass(frozen=True)
class RecordedStep:
    """A recorded optimizer step.

    Args:
        step: its number, counted from 1.
        profile: its allocations.
        allocated_bytes: the CUDA allocator's own peak of allocated memory; None elsewhere.
        reserved_bytes: the most memory that the CUDA allocator held; None elsewhere.
        lengths: lengths of the documents in the step's first batch; None for plain rows.
        snapshot: the CUDA allocator's snapshot, for PyTorch's memory viewer.
    """

    step: int
    profile: MemoryProfile
    allocated_bytes: int | None
    reserved_bytes: int | None
    lengths: tuple[int, ...] | None
    snapshot: Any


class SnapshotOnError(Callback):
    """Keeps the CUDA allocator's snapshot from the moment when memory ran out.

    Lightning frees the device before the error reaches the caller, so only a callback can take it. This must be the
    first callback, because another one may end the allocator's recording.

    Attributes:
        snapshot: for PyTorch's memory viewer; None if memory never ran out.
    """

    def __init__(self) -> None:
        self.snapshot: Any = None

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        if isinstance(exception, torch.OutOfMemoryError) and pl_module.device.type == "cuda":
            self.snapshot = torch.cuda.memory._snapshot(pl_module.device)


class MemorySnapshot(RecordingCallback):
    """Records the memory of whole optimizer steps on the first rank. The module must have a `model`.

    `receive` gets a `RecordedStep`. See `RecordingCallback` for the arguments and errors.
    """

    received = "RecordedStep"

    def __init__(
        self, receive: Callable[[RecordedStep], None], *, every: int | None = None, steps: Iterable[int] = ()
    ) -> None:
        super().__init__(receive, every=every, steps=steps)
        self.recording: Recording | None = None
        self._open = ExitStack()

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        require(self, pl_module, "model")

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.recording is None and trainer.is_global_zero and self.is_due(trainer.global_step + 1):
            self._begin(trainer, pl_module, batch)
        self._phase("forward")

    def on_before_backward(self, trainer: Trainer, pl_module: Any, loss: Tensor) -> None:
        self._phase("backward")

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        self._phase("step")

    def on_step_end(self, trainer: Trainer, pl_module: Any) -> None:
        recording = self.recording
        if recording is None:
            return
        self._phase("end")
        if throughput := find_callback(trainer, Throughput):
            throughput.pause(trainer, pl_module)
        self._end()
        computes_in = lightning_compute_dtype(trainer.precision) or pl_module.dtype  # 64-true is not in our table
        peaks: tuple[int | None, int | None] = (None, None)
        if recording.device.type == "cuda":
            stats = torch.cuda.memory_stats(recording.device)
            peaks = stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"]
        profile = profile_of(recording, pl_module.model, computes_in.itemsize)
        self.receive(RecordedStep(trainer.global_step, profile, *peaks, self._lengths, recording.snapshot))

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._end()  # training may end between the micro-batches of a step

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        self._end()

    def _begin(self, trainer: Trainer, pl_module: Any, batch: Any) -> None:
        device = pl_module.device
        self.recording = Recording(device, _lasting_tensors(trainer, pl_module, batch))
        lengths = batch.get("lengths")
        self._lengths = tuple(map(int, lengths)) if lengths is not None else None
        begin_peak(device)
        self._open.enter_context(self.recording.recording(pl_module.model))

    def _end(self) -> None:
        self._open.close()
        self.recording = None

    def _phase(self, name: str) -> None:
        if self.recording is not None:
            self.recording.scopes.begin(name)


def _lasting_tensors(trainer: Trainer, pl_module: Any, batch: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of this rank that outlive a step, each with the name of its category."""
    for parameter in pl_module.parameters():
        yield "weights", local(parameter)
    for optimizer in trainer.optimizers:
        for state in optimizer.state.values():
            yield from (("optimizer state", local(value)) for value in state.values() if isinstance(value, Tensor))
    yield from (("batch and tables", value) for value in batch.values() if isinstance(value, Tensor))
