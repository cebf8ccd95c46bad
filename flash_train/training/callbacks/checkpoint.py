"""Checkpoints by optimizer step, written whole or not at all."""

import os
import re
from pathlib import Path
from typing import IO, Any

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint

from flash_train.files import remove_temporary, replacing
from flash_train.output import say
from flash_train.training.callbacks.base import StepCallback

NAME = re.compile(r"step-\d{6,}\.ckpt")
BRANCH = "branch"  # a checkpoint's entry: how often runs in its folder had gone back to an earlier checkpoint by then


def checkpoints_by_step(folder: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints in `folder`, by their steps."""
    found = [path for path in Path(folder).glob("step-*.ckpt") if NAME.fullmatch(path.name)]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    """The optimizer step in the name of a checkpoint."""
    return int(path.stem.removeprefix("step-"))


def newest_checkpoint(folder: str | os.PathLike[str]) -> Path:
    """The checkpoint to resume from: the last one of the newest branch that is whole.

    A branch begins when a run goes back to an earlier checkpoint; each checkpoint says what branch it is of. Times of
    files do not count: copies and clocks that were set back change them.

    Raises:
        FileNotFoundError: there is none.
        ValueError: there are some, and none can be read.
    """
    found = checkpoints_by_step(folder)
    if not found:
        raise FileNotFoundError(f"no checkpoint in {folder}: expected files named like step-000100.ckpt")
    places = {path: place for path in found if (place := place_of(path)) is not None}
    if not places:
        raise ValueError(f"{found[-1]} is not a checkpoint of this program, or is damaged, as are all in its folder")
    return max(places, key=lambda path: (places[path][0], step_of(path)))


def place_of(path: Path) -> tuple[int, int] | None:
    """Branch and step of a checkpoint, by which checkpoints are ordered; None for a file that cannot be read as one."""
    try:
        checkpoint = _load(path)
        return int(checkpoint.get(BRANCH, 0)), int(checkpoint["global_step"])  # earlier versions have no branch
    except ValueError:
        return None


def branch_of(path: Path) -> int | None:
    """The branch that a checkpoint is of; None for a file that cannot be read as one."""
    place = place_of(path)
    return None if place is None else place[0]


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a run of `CausalLMModule` saved, its tensors mapped from the file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is something else, or the checkpoint of another module.
    """
    checkpoint = _load(path)
    if not isinstance(checkpoint.get("hyper_parameters", {}).get("model"), dict):
        raise ValueError(f"{path} does not describe its model: it was not written by CausalLMModule; give one that was")
    return checkpoint


def _load(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (FileNotFoundError, PermissionError, MemoryError):
        raise
    except Exception as error:  # what a damaged file makes of the unpickler has any type
        raise ValueError(f"{path} is not a checkpoint of this program") from error
    if not isinstance(checkpoint, dict) or "global_step" not in checkpoint:
        raise ValueError(f"{path} is not a checkpoint of this program")
    return checkpoint


class StepCheckpoint(StepCallback, Checkpoint):
    """Saves `step-000100.ckpt` every `every` optimizer steps, and whenever training is about to stop.

    Unlike `ModelCheckpoint`, which it stands in for, it keeps no list in the checkpoint: the folder is the list, so
    that what earlier runs left there is counted too. Where a checkpoint cannot be written, as on a full disk, it says
    so in a line, the older ones stay, and training continues; it tries once more when training ends.

    Args:
        folder: made if it doesn't exist.
        every: optimizer steps between two checkpoints; None: only when training stops.
        keep: how many to keep, the newest up to the present step; None keeps all. One of a later step is never removed.

    Attributes:
        unsaved: why the newest checkpoint is not there; None where it is.
    """

    def __init__(self, folder: str | os.PathLike[str], *, every: int | None = None, keep: int | None = 2) -> None:
        for name, value in (("every", every), ("keep", keep)):
            if value is not None and value < 1:
                raise ValueError(f"checkpoint {name}={value} is out of range: it must be 1 or greater, or null")
        self.folder = Path(folder)
        self.every = every
        self.keep = keep
        self.unsaved: str | None = None
        self._saved_step = 0
        self._branch = 0

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint[BRANCH] = self._branch

    def on_load_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self._saved_step = checkpoint["global_step"]  # what is resumed lies on the disk already
        self._branch = checkpoint.get(BRANCH, 0)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        self._saved_step = trainer.global_step
        if trainer.is_global_zero:
            remove_temporary(self.folder, ["step-"])  # of a run that was killed as it wrote
            further = [path for path in checkpoints_by_step(self.folder) if step_of(path) > trainer.global_step]
            passed = [branch for path in further if (branch := branch_of(path)) is not None]
            if passed:
                self._branch = max(self._branch, max(passed) + 1)

    def on_step_end(self, trainer: Trainer, pl_module: Any) -> None:
        step = trainer.global_step
        due = self.every is not None and step % self.every == 0
        if due or trainer.should_stop or step == trainer.max_steps:
            self.save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        # A signal came during the validation: the run stops at this step.
        in_training = trainer.state.fn == "fit" and not trainer.sanity_checking
        if in_training and trainer.should_stop and trainer.global_step != self._saved_step:
            self.save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        # An end that no step foresaw, such as the end of the last epoch, or a checkpoint that could not be written.
        if trainer.global_step != self._saved_step:
            self.save(trainer)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}.ckpt"

    def save(self, trainer: Trainer) -> None:
        """Write the checkpoint of the present step, then remove the oldest beyond `keep`. All ranks call it."""
        step = trainer.global_step
        path = self.path(step)
        try:
            trainer.save_checkpoint(path, weights_only=False)
            self.unsaved = None
        except OSError as error:
            before, self.unsaved = self.unsaved, f"{path} not written ({error.strerror or error})"
            if self.unsaved != before:
                say(f"{self.unsaved}; the run continues")
            trainer.strategy.barrier("Trainer.save_checkpoint")  # at which the other ranks wait
        if trainer.strategy.broadcast(self.unsaved) is not None:  # the first rank's, which writes
            return
        self._saved_step = step
        if self.keep is not None and trainer.is_global_zero:
            past = [other for other in checkpoints_by_step(self.folder) if step_of(other) <= step]
            for old in past[: -self.keep]:
                old.unlink(missing_ok=True)


class AtomicCheckpointIO(CheckpointIO):
    """Writes a checkpoint beside its place and moves it there once it is on the disk; reads plain values only.

    Lightning's own builds the whole file in memory first, and unpickles whatever the file says.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        if storage_options is not None:
            raise TypeError(f"AtomicCheckpointIO takes no storage_options, got {storage_options!r}")
        with replacing(path) as temporary, open(temporary, "wb") as file:
            _save(checkpoint, file)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"no checkpoint at {path}")
        # Mapped, so that weights go from the file to the device without a second copy in memory.
        return torch.load(path, map_location=map_location, weights_only=True, mmap=True)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        Path(path).unlink(missing_ok=True)


class _Writer:
    """A file for `torch.save`, whose end of the archive can raise a RuntimeError in place of the system's error."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self.file.flush()


def _save(checkpoint: dict[str, Any], file: IO[bytes]) -> None:
    writer = _Writer(file)
    try:
        torch.save(checkpoint, writer)  # type: ignore[arg-type]
    except RuntimeError:
        if writer.error is None:
            raise
        raise writer.error from None
