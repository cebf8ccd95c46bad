"""Paths: the configuration folder, and the files of a run directory."""

import os
from pathlib import Path

import flash_train
from flash_train.cli.config.errors import UsageError

CHECKPOINTS = "checkpoints"
RECORD = ("metrics.csv", "summary.json")  # the files of `RunRecord`


def conf_dir() -> Path:
    """Folder of the configuration files: `flash_train/conf` in a wheel, `conf` next to the package in a checkout."""
    package = Path(flash_train.__file__).resolve().parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "train.yaml").is_file():
            return folder
    raise FileNotFoundError(f"no configuration found at {package / 'conf'} or {package.parent / 'conf'}")


def run_dir_of(checkpoint: Path) -> Path | None:
    """The run directory that contains a checkpoint; None if the file was moved elsewhere."""
    if checkpoint in slurm_checkpoints(checkpoint.parent):
        return checkpoint.parent
    return checkpoint.parent.parent if checkpoint.parent.name == CHECKPOINTS else None


def unusable(folder: Path) -> str | None:
    """Why files cannot be written to a folder, which need not exist yet; None if they can."""
    try:
        there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    except OSError as error:  # a name that is too long, or a folder that cannot be searched
        return str(error.strerror)
    if not there.is_dir():
        return f"{there} is a file"
    return None if os.access(there, os.W_OK | os.X_OK) else f"{there} is not writable"


def require_usable(key: str, folder: Path) -> None:
    """Raise if files cannot be written to a folder."""
    if reason := unusable(folder):
        raise UsageError(f"{key}={folder}: {reason}; allowed: a folder to write in, new or not")


def make_folder(key: str, folder: Path) -> None:
    """Create a folder with its parents, if it is missing.

    Raises:
        UsageError: it cannot be created. `unusable` does not foresee everything: no one can create a folder in /proc.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{key}={folder}: cannot be created ({error.strerror}); allowed: a folder to write in, new or not"
        ) from error


def require_no_run(run_dir: Path, ways: str = "another folder") -> None:
    """Raise if a directory holds a run, which another would overwrite.

    Args:
        ways: what the message allows instead.
    """
    if holds_run(run_dir):
        raise UsageError(f"run_dir={run_dir}: holds a run; allowed: {ways}")


def slurm_checkpoints(run_dir: Path) -> list[Path]:
    """Checkpoints that Lightning's own handler saved before SLURM ended a job, oldest first."""
    found = [path for path in run_dir.glob("hpc_ckpt_*.ckpt") if path.stem.removeprefix("hpc_ckpt_").isdigit()]
    return sorted(found, key=lambda path: int(path.stem.removeprefix("hpc_ckpt_")))


def holds_checkpoint(run_dir: Path) -> bool:
    """Whether a run has saved a checkpoint there to continue from."""
    return any((run_dir / CHECKPOINTS).glob("*.ckpt")) or bool(slurm_checkpoints(run_dir))


def holds_run(run_dir: Path) -> bool:
    """Whether a run has left a checkpoint or a record there."""
    return holds_checkpoint(run_dir) or any((run_dir / name).is_file() for name in RECORD)
