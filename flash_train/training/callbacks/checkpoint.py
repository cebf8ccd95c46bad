"""Checkpoints by optimizer step, written whole or not at all."""

import os
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint

from flash_train.training.callbacks.base import StepCallback

NAME = re.compile(r"step-\d{6,}\.ckpt")


def checkpoints_by_age(folder: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints in `folder`, oldest first by the time they were written.

    By time, not by step: after going back to an earlier checkpoint, the steps ahead belong to an abandoned branch.
    """
    found = [path for path in Path(folder).glob("step-*.ckpt") if NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name))


def step_of(path: Path) -> int:
    """The optimizer step in the name of a checkpoint."""
    return int(path.stem.removeprefix("step-"))


def newest_checkpoint(folder: str | os.PathLike[str]) -> Path:
    """The checkpoint that was written last.

    Raises:
        FileNotFoundError: there is none.
    """
    if found := checkpoints_by_age(folder):
        return found[-1]
    raise FileNotFoundError(f"no checkpoint in {folder}: expected files named like step-000100.ckpt")


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a run of `CausalLMModule` saved, its tensors mapped from the file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is something else, or the checkpoint of another module.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"{path} is not a checkpoint of this program") from error
    if not isinstance(checkpoint, dict) or "global_step" not in checkpoint:
        raise ValueError(f"{path} is not a checkpoint of this program")
    if not isinstance(checkpoint.get("hyper_parameters", {}).get("model"), dict):
        raise ValueError(f"{path} does not describe its model: it was not written by CausalLMModule; give one that was")
    return checkpoint


class StepCheckpoint(StepCallback, Checkpoint):
    """Saves `step-000100.ckpt` every `every` optimizer steps, and whenever training is about to stop.

    Unlike `ModelCheckpoint`, which it stands in for, it keeps no list in the checkpoint: the folder is the list, so
    that what earlier runs left there is counted too.

    Args:
        folder: made if it doesn't exist.
        every: optimizer steps between two checkpoints; None: only when training stops.
        keep: how many to keep, the newest; None keeps all.
    """

    def __init__(self, folder: str | os.PathLike[str], *, every: int | None = None, keep: int | None = 2) -> None:
        for name, value in (("every", every), ("keep", keep)):
            if value is not None and value < 1:
                raise ValueError(f"checkpoint {name}={value} is out of range: it must be 1 or greater, or null")
        self.folder = Path(folder)
        self.every = every
        self.keep = keep
        self._saved_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        self._saved_step = trainer.global_step  # what was resumed lies on the disk already
        if trainer.is_global_zero:
            for half in self.folder.glob(".step-*.ckpt.tmp"):  # of a run that was killed as it wrote
                half.unlink(missing_ok=True)

    def on_step_end(self, trainer: Trainer, pl_module: Any) -> None:
        step = trainer.global_step
        due = self.every is not None and step % self.every == 0
        if due or trainer.should_stop or step == trainer.max_steps:
            self.save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        # An end that no step foresaw, such as that of the last epoch.
        if trainer.global_step != self._saved_step:
            self.save(trainer)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}.ckpt"

    def save(self, trainer: Trainer) -> None:
        """Write the checkpoint of the present step, then remove the oldest beyond `keep`. All ranks call it."""
        path = self.path(trainer.global_step)
        trainer.save_checkpoint(path, weights_only=False)
        self._saved_step = trainer.global_step
        if self.keep is not None and trainer.is_global_zero:
            # This one is the newest whatever the clock says, which may have been set back since the others.
            others = [other for other in checkpoints_by_age(self.folder) if other != path]
            for old in others[: max(0, len(others) - self.keep + 1)]:
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
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            with open(temporary, "wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

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
