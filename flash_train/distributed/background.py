"""Writes checkpoints in the background, from a copy in the host's memory, while training continues."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint._state_dict_stager import StateDictStager

Write = Callable[[Mapping[str, Any]], None]


def write_with(storage_options: Any, checkpoint: Mapping[str, Any], write: Callable[..., None], **options: Any) -> None:
    """Write a checkpoint now, or with a `BackgroundWriter`.

    Args:
        storage_options: as `Trainer.save_checkpoint` passes it on: None or a `BackgroundWriter`.
        write: takes the checkpoint and `options`.

    Raises:
        TypeError: `storage_options` is something else.
    """
    if storage_options is None:
        write(checkpoint, **options)
    elif isinstance(storage_options, BackgroundWriter):
        storage_options.start(checkpoint, partial(write, **options))
    else:
        raise TypeError(f"storage_options={storage_options!r}: must be None or a BackgroundWriter")


class BackgroundWriter:
    """Copies a checkpoint to the host's memory, and writes the copy in a thread; one checkpoint at a time.

    Give it as `storage_options` to `Trainer.save_checkpoint`: `AtomicCheckpointIO` and `ShardedStrategy` then write
    with it. The copies of tensors are pinned where there is a GPU, and their memory is used again for the next
    checkpoint.

    Attributes:
        after: called in the thread once a checkpoint is written.
    """

    def __init__(self) -> None:
        self.after: Callable[[], None] | None = None
        self._stager: StateDictStager | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._group: ProcessGroup | None = None

    @property
    def group(self) -> ProcessGroup:
        """The group in which the threads of all ranks communicate; all ranks ask for it together.

        They cannot share the groups of the training, whose collectives run at the same time.
        """
        if self._group is None:
            # `new_group` returns an int to ranks outside of the group; here every rank is a member.
            self._group = cast(ProcessGroup, dist.new_group(backend="gloo"))
        return self._group

    def start(self, checkpoint: Mapping[str, Any], write: Write) -> None:
        """Wait for the checkpoint before, copy this one and begin to write it.

        Args:
            checkpoint: nested dictionaries and lists; training may change the tensors once this returns.
            write: called in the thread with the copy.

        Raises:
            BaseException: the error of the checkpoint before, if nobody asked `wait` for it.
        """
        if (error := self.wait()) is not None:
            raise error
        copy = self._copy(checkpoint)
        # Where there are other ranks, a thread that waits for them must not keep the process from ending.
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._thread = threading.Thread(target=self._run, args=(copy, write, device), name="checkpoint", daemon=several)
        self._thread.start()

    def wait(self) -> BaseException | None:
        """Wait until the checkpoint is written; returns the error, once, if it could not be written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        return error

    def close(self) -> None:
        """Wait, and free the host's memory."""
        self.wait()
        if self._stager is not None:
            self._stager.close()
            self._stager = None

    def _run(self, checkpoint: Mapping[str, Any], write: Write, device: int | None) -> None:
        try:
            if device is not None:  # a thread begins on the first GPU, and PyTorch's writer synchronises with its own
                torch.cuda.set_device(device)
            write(checkpoint)
            if self.after is not None:
                self.after()
        except BaseException as error:  # `wait` hands it to the training thread
            self._error = error

    def _copy(self, checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
        gpu = torch.cuda.is_available()
        if self._stager is None:
            # PyTorch's public `DefaultStager` wraps this class. In PyTorch 2.11 and 2.12 it copies only once.
            self._stager = StateDictStager(pin_memory=gpu)
        copy = self._stager.stage(dict(checkpoint), non_blocking=gpu)
        if gpu:
            torch.cuda.synchronize()
        return copy
