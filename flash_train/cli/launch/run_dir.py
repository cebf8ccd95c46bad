"""Run directories: a new name for each new run, and a lock that keeps a second run from writing to one."""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import IO

from flash_train.cli.config.environment import is_first_process
from flash_train.cli.config.errors import UsageError, blame
from flash_train.cli.config.overrides import CommandLine
from flash_train.cli.config.paths import make_folder
from flash_train.output import LOGGER

if sys.platform == "win32":
    fcntl = None
else:
    import fcntl

LOCK = ".lock"


def make_run_dir(line: CommandLine) -> None:
    """Create the run directory that a command line names: Hydra would end in a traceback where it cannot be created.

    Raises:
        UsageError: it cannot be created.
    """
    given = line.given("run_dir")
    if given and "${" not in given and not line.shows:  # Hydra alone knows which folder an interpolation names
        make_folder("run_dir", Path(given))


def new_folder(wanted: Path) -> Path:
    """Create a folder for a run: `wanted`, or if that exists `wanted_2`, and so on."""
    make_folder("run_dir", wanted.parent)
    for number in count(1):
        path = wanted if number == 1 else wanted.with_name(f"{wanted.name}_{number}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError("not reached")


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Lock `run_dir` for the length of the block; the system releases the lock if this process is killed.

    Only the first process of a run takes the lock. Forked processes do not inherit a lock of `fcntl`, so workers that
    outlive a killed run hold none.

    Raises:
        UsageError: another run has locked the folder, or it cannot be created.
    """
    if not is_first_process():
        yield
        return
    make_folder("run_dir", run_dir)
    path = run_dir / LOCK
    with blame(f"run_dir={run_dir}"):
        file = _lock(path, run_dir)
    if file is None:
        LOGGER.warning(
            "run_dir=%s: this file system has no locks; nothing keeps a second run from writing there", run_dir
        )
        yield
        return
    with file:
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # while it is locked: later the file may be another run's


def _lock(path: Path, run_dir: Path) -> IO[str] | None:
    """Open and lock the file at `path`, and write this process's name to it; None if there are no locks."""
    while fcntl is not None:
        with ExitStack() as closing:
            file = closing.enter_context(open(path, "a+", encoding="utf-8"))
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_there = path.exists() and os.path.samestat(os.fstat(file.fileno()), os.stat(path))
            except (BlockingIOError, PermissionError) as error:
                file.seek(0)
                raise UsageError(
                    f"run_dir={run_dir}: another run is writing there ({file.read().strip() or 'a process'}); "
                    "allowed: another folder, or this one once that run has ended"
                ) from error
            except OSError as error:
                from flash_train.data.lock import UNSUPPORTED  # imports PyTorch

                if error.errno not in UNSUPPORTED:
                    raise
                path.unlink(missing_ok=True)
                return None
            if is_there:  # otherwise its last owner has removed it, and another run may have created a new one
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
                file.flush()
                closing.pop_all()
                return file
    return None
