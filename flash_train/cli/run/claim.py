"""A run directory belongs to one run at a time: new names for new runs, and a lock while a run writes."""

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import IO

from flash_train.cli.config.errors import UsageError, blame, tell

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK = ".lock"
RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID")


def is_first_process(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this is the process of a run that writes its files, by the variables that launchers set."""
    return all(environ.get(name, "0") == "0" for name in RANKS)


def new_folder(wanted: Path) -> Path:
    """Make a folder that no other run has: `wanted`, or where that exists `wanted_2` and so on."""
    for number in count(1):
        path = wanted if number == 1 else wanted.with_name(f"{wanted.name}_{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise AssertionError("not reached")


@contextmanager
def claimed(run_dir: Path) -> Iterator[None]:
    """Keep other runs out of `run_dir` for the length of the block; the system does, until this process ends.

    The lock is one of `fcntl`, which forked processes do not inherit: workers that outlive a killed run hold none.

    Raises:
        UsageError: another run has the folder.
    """
    if not is_first_process():
        yield
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / LOCK
    with blame(f"run_dir={run_dir}"):
        file = _lock(path, run_dir)
    if file is None:
        tell(f"run_dir={run_dir}: this file system has no locks; nothing keeps a second run from writing there")
        yield
        return
    with file:
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # while it is locked: after that it may be another's


def _lock(path: Path, run_dir: Path) -> IO[str] | None:
    """The file at `path`, locked and with the name of this process; None where there are no locks."""
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
                from flash_train.data.lock import UNSUPPORTED  # and with it PyTorch

                if error.errno not in UNSUPPORTED:
                    raise
                path.unlink(missing_ok=True)
                return None
            if is_there:  # else who held it before has removed it, and others may hold a new file of that name
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
                file.flush()
                closing.pop_all()
                return file
    return None
