"""Checkpoints by optimizer step, each written whole or not at all."""

import os
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint

from flash_train.checks import as_integer
from flash_train.distributed.background import BackgroundWriter, write_with
from flash_train.distributed.checkpoint import (
    is_sharded_checkpoint,
    load_whole,
    make_way_for_file,
    read_values,
    remove_checkpoint,
    write_archive,
)
from flash_train.files import remove_temporary, replacing
from flash_train.output import say
from flash_train.training.callbacks.base import StepCallback, is_trial, will_stop
from flash_train.training.callbacks.nonfinite import NonFiniteLossError

NAME = re.compile(r"step-\d{6,}\.ckpt")
# An entry of a checkpoint: the number of its branch (see `newest_checkpoint`)
BRANCH = "branch"


def checkpoints_by_step(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the checkpoints in `folder`, sorted by step."""
    found = [path for path in Path(folder).glob("step-*.ckpt") if NAME.fullmatch(path.name)]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    """Return the optimizer step in the name of a checkpoint."""
    return int(path.stem.removeprefix("step-"))


def newest_checkpoint(folder: str | os.PathLike[str]) -> Path:
    """Return the checkpoint to resume from: the last readable one of the newest branch.

    A branch begins when a run resumes from a checkpoint that is not the last; each checkpoint stores its branch. File
    times are not used: copying changes them, and clocks can be set back.

    Raises:
        FileNotFoundError: the folder has no checkpoint.
        ValueError: none of its checkpoints can be read.
    """
    found = checkpoints_by_step(folder)
    if not found:
        raise FileNotFoundError(f"no checkpoint in {folder}: expected files named like step-000100.ckpt")
    branches = {path: order[0] for path in found if (order := branch_and_step(path)) is not None}
    if not branches:
        raise ValueError(f"{folder}: none of its checkpoints can be read; the last one is {found[-1].name}")
    return max(branches, key=lambda path: (branches[path], step_of(path)))


def branch_and_step(path: Path) -> tuple[int, int] | None:
    """Return a checkpoint's branch and step, which sort checkpoints by age; None if the file cannot be read."""
    try:
        checkpoint = _load(path, weights=False)
        return int(checkpoint.get(BRANCH, 0)), int(checkpoint["global_step"])  # earlier versions stored no branch
    except ValueError:
        return None


def read_checkpoint(path: str | os.PathLike[str], *, weights: bool = True) -> dict[str, Any]:
    """Return the contents of a checkpoint that `CausalLMModule` wrote; its tensors are mapped from the file.

    Args:
        path: a file, or the folder of a sharded checkpoint.
        weights: False may leave out the weights and the optimizer's state, which takes time and memory in a folder.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not a checkpoint, or another module wrote it.
    """
    checkpoint = _load(path, weights=weights)
    if not isinstance(checkpoint.get("hyper_parameters", {}).get("model"), dict):
        raise ValueError(f"{path} does not describe its model: must be a checkpoint that CausalLMModule wrote")
    return checkpoint


def _load(path: str | os.PathLike[str], *, weights: bool) -> dict[str, Any]:
    path = Path(path)
    try:
        if is_sharded_checkpoint(path):
            return load_whole(path) if weights else read_values(path)
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (FileNotFoundError, PermissionError, MemoryError):
        raise
    except Exception as error:  # a damaged file can make the unpickler raise any type
        raise ValueError(f"{path} is not a checkpoint of this program") from error
    if not isinstance(checkpoint, dict) or "global_step" not in checkpoint:
        raise ValueError(f"{path} is not a checkpoint of this program")
    return checkpoint


class StepCheckpoint(StepCallback, Checkpoint):
    """Saves `step-000100.ckpt` every `every` optimizer steps, and whenever training is about to stop.

    It also saves if the next batch cannot be read, where training has one process: no other one is within a step then.

    It replaces `ModelCheckpoint`. `Trainer.test()` and the like, without a model, take the newest checkpoint, as with a
    `ModelCheckpoint` that monitors nothing. Lightning's `ckpt_path="last"` does not look for these checkpoints: pass
    `newest_checkpoint(folder)`. It keeps no list of checkpoints but reads the folder, so it also counts checkpoints
    that earlier runs left there. If a checkpoint cannot be written, for example because the disk is full, it prints a
    line, keeps the older ones, and training continues; it tries again when training ends. An older one that cannot be
    removed is left, after a line. With `Trainer(fast_dev_run=...)` it saves nothing, as `ModelCheckpoint` does.

    With `asynchronous`, training waits only until the checkpoint is copied to the host's memory, which must have room
    for it: each process takes as much as it writes. A thread writes the copy. The next checkpoint, and the end of
    training, wait for it. A run that is killed before the copy is written still has the previous checkpoint.

    Args:
        folder: created if it doesn't exist.
        every: optimizer steps between two checkpoints; None saves only when training stops.
        keep: how many checkpoints to keep, the newest up to the current step; None keeps all. Those that could not be
            read when training began do not count. Checkpoints of later steps are never removed.
        asynchronous: write while training continues. Needs `AtomicCheckpointIO` or `ShardedStrategy`.

    Attributes:
        unsaved: why the newest checkpoint could not be written; None if it was.
        best_model_path: the newest checkpoint that this callback wrote, by the name that Lightning reads; "" at first.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        every: int | None = None,
        keep: int | None = 2,
        asynchronous: bool = False,
    ) -> None:
        self.folder = Path(folder)
        self.every = as_integer("every", every, 1, or_none="or null to save when training stops")
        self.keep = as_integer("keep", keep, 1, or_none="or null to keep all")
        self.unsaved: str | None = None
        self.best_model_path = ""
        self._saved_step = 0
        self._in_batch = False
        self._branch = 0
        self._damaged: set[Path] = set()  # those that could not be read when training began
        self._writer = BackgroundWriter() if asynchronous else None
        self._writing: Path | None = None  # the checkpoint that the thread writes
        self._not_removed: set[Path] = set()  # each is reported once

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint[BRANCH] = self._branch

    def on_load_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self._saved_step = checkpoint["global_step"]  # the checkpoint that is being resumed is on the disk
        self._branch = checkpoint.get(BRANCH, 0)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        self._saved_step, self._in_batch = trainer.global_step, False
        if trainer.is_global_zero and not is_trial(trainer):
            remove_temporary(self.folder, ["step-"])  # from a run that was killed while it wrote
            now, paths = trainer.global_step, checkpoints_by_step(self.folder)
            # Reading takes time, so earlier ones are read only if some of them are to be removed
            found = {path: branch_and_step(path) for path in paths if self.keep is not None or step_of(path) > now}
            self._damaged = {path for path, order in found.items() if order is None}
            branches = [order[0] for path, order in found.items() if order and step_of(path) > now]
            if branches:
                self._branch = max(self._branch, max(branches) + 1)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._in_batch = True

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._in_batch = False
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        is_whole = trainer.training and not self._in_batch and trainer.global_step not in (0, self._saved_step)
        is_useful = isinstance(exception, Exception) and not isinstance(exception, NonFiniteLossError)
        if is_useful and is_whole and trainer.world_size == 1:
            self.save(trainer)
            self._await_written(trainer)

    def on_step_end(self, trainer: Trainer, pl_module: Any) -> None:
        step = trainer.global_step
        due = self.every is not None and self.has_reached(self.every)
        if due or will_stop(trainer) or step == trainer.max_steps:
            self.save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        # A signal arrived during the validation: the run stops at this step.
        in_training = trainer.state.fn == "fit" and not trainer.sanity_checking
        if in_training and will_stop(trainer) and trainer.global_step != self._saved_step:
            self.save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        # The last epoch ended, which no step announces, or the checkpoint could not be written before.
        self._await_written(trainer)
        if trainer.global_step != self._saved_step:
            self.save(trainer)
            self._await_written(trainer)
        if self._writer is not None:
            self._writer.close()

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}.ckpt"

    def save(self, trainer: Trainer) -> None:
        """Write the checkpoint of the current step, then remove the oldest beyond `keep`. All ranks call it."""
        if is_trial(trainer):
            return
        path = self.path(trainer.global_step)
        remove_old = partial(self._remove_old, trainer.global_step) if trainer.is_global_zero else lambda: None
        if self._writer is not None:
            self._await_written(trainer)
            self._writer.after, self._writing = remove_old, path
            self._saved_step = trainer.global_step
            trainer.save_checkpoint(path, weights_only=False, storage_options=self._writer)
            return
        found = None
        try:
            trainer.save_checkpoint(path, weights_only=False)
        except OSError as error:
            found = error
            trainer.strategy.barrier("Trainer.save_checkpoint")  # the other ranks wait at this barrier
        else:
            remove_old()
        self._take_outcome(trainer, path, found)

    def _await_written(self, trainer: Trainer) -> None:
        """Wait for the checkpoint that the thread writes, if there is one. All ranks call it."""
        if self._writer is not None and self._writing is not None:
            path, self._writing = self._writing, None
            error = self._writer.wait()
            if error is not None and not isinstance(error, OSError):
                raise error
            self._take_outcome(trainer, path, error)

    def _take_outcome(self, trainer: Trainer, path: Path, error: OSError | None) -> None:
        """Note whether a checkpoint could be written, on all ranks; maybe only the first one wrote.

        The first rank says why not. Another rank says it if only that rank has an error.
        """
        before, self.unsaved = self.unsaved, None
        if error is not None:
            self.unsaved = f"{path} not written ({error.strerror or error})"
        written = trainer.strategy.broadcast(self.unsaved) is None
        if self.unsaved not in (None, before) and (trainer.is_global_zero or written):
            say(f"{self.unsaved}; the run continues")
        self._saved_step = step_of(path) if written else -1
        if written:
            self.best_model_path = str(path)

    def _remove_old(self, step: int) -> None:
        self._damaged.discard(self.path(step))
        if self.keep is not None:
            candidates = [other for other in checkpoints_by_step(self.folder) if step_of(other) <= step]
            kept = [other for other in candidates if other not in self._damaged][-self.keep :]
            for old in candidates[: candidates.index(kept[0])]:
                try:
                    remove_checkpoint(old)
                except OSError as error:
                    if old not in self._not_removed:
                        self._not_removed.add(old)
                        say(f"{old} not removed ({error.strerror or error}); the run continues")


class AtomicCheckpointIO(CheckpointIO):
    """Writes a checkpoint to a temporary file and renames it once it is on the disk; loads with `weights_only=True`.

    Lightning's default builds the whole file in memory first, and unpickles arbitrary objects. A sharded checkpoint of
    the same path, from a run on several devices, is replaced.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        write_with(storage_options, checkpoint, _write, path=path)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        path = Path(path)
        if is_sharded_checkpoint(path):
            return load_whole(path)
        if not path.is_file():
            raise FileNotFoundError(f"no checkpoint at {path}")
        # Mapped into memory, so that weights go from the file to the device without a second copy.
        return torch.load(path, map_location=map_location, weights_only=True, mmap=True)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        remove_checkpoint(Path(path))


def _write(checkpoint: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    with replacing(path) as temporary:
        with open(temporary, "wb") as file:
            write_archive(checkpoint, file)
        make_way_for_file(Path(path))
