"""Where things are: the configuration folder, and what lies in a run directory."""

import os
from pathlib import Path

import flash_train
from flash_train.cli.config.errors import UsageError

CHECKPOINTS = "checkpoints"
RECORD = ("metrics.csv", "summary.json")  # as `RunRecord` calls them


def conf_dir() -> Path:
    """Folder of the configuration files: `flash_train/conf` in a wheel, `conf` beside the package in a checkout."""
    package = Path(flash_train.__file__).resolve().parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "train.yaml").is_file():
            return folder
    raise FileNotFoundError(f"no configuration found at {package / 'conf'} or {package.parent / 'conf'}")


def run_dir_of(checkpoint: Path) -> Path | None:
    """The run directory that a checkpoint lies in; None for one that was moved elsewhere."""
    if checkpoint in slurm_checkpoints(checkpoint.parent):
        return checkpoint.parent
    return checkpoint.parent.parent if checkpoint.parent.name == CHECKPOINTS else None


def unusable(folder: Path) -> str | None:
    """Why no file can be written in a folder, which need not exist yet; None where one can."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        return f"{there} is a file"
    return None if os.access(there, os.W_OK | os.X_OK) else f"{there} is not writable"


def require_usable(key: str, folder: Path) -> None:
    """Refuse a folder in which no file can be written."""
    if reason := unusable(folder):
        raise UsageError(f"{key}={folder}: {reason}; allowed: a folder to write in, new or not")


def require_no_run(run_dir: Path, ways: str = "another folder") -> None:
    """Refuse a directory whose run would be overwritten.

    Args:
        ways: what is allowed in its place.
    """
    if holds_run(run_dir):
        raise UsageError(f"run_dir={run_dir}: holds a run; allowed: {ways}")


def slurm_checkpoints(run_dir: Path) -> list[Path]:
    """What Lightning's own handler has saved there before SLURM ended a job, oldest first."""
    found = [path for path in run_dir.glob("hpc_ckpt_*.ckpt") if path.stem.removeprefix("hpc_ckpt_").isdigit()]
    return sorted(found, key=lambda path: int(path.stem.removeprefix("hpc_ckpt_")))


def holds_checkpoint(run_dir: Path) -> bool:
    """Whether a run has saved a checkpoint there, with which it can go on."""
    return any((run_dir / CHECKPOINTS).glob("*.ckpt")) or bool(slurm_checkpoints(run_dir))


def holds_run(run_dir: Path) -> bool:
    """Whether a run has left a checkpoint or its record there, which another would overwrite."""
    return holds_checkpoint(run_dir) or any((run_dir / name).is_file() for name in RECORD)
