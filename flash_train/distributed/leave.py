"""The end of a process that used gloo."""

from __future__ import annotations

import time
from pathlib import Path

from lightning.fabric.utilities.distributed import _destroy_dist_connection

GLOO_THREAD = "pt_gloo_runloop"  # name of the threads in which PyTorch runs gloo's collectives
THREADS = Path("/proc/self/task")  # exists under Linux


def leave_groups() -> None:
    """Destroy the process groups, and wait until gloo's threads are idle.

    PyTorch's caches keep the groups, and so their threads. A thread may still have to free the tensors of the last
    collective; for that it needs the interpreter, and aborts the process if the interpreter is gone.
    """
    _destroy_dist_connection()
    wait_for_threads(GLOO_THREAD, seconds=10)


def wait_for_threads(name: str, seconds: float) -> None:
    """Wait, at most ``seconds``, until no thread of this process with that name has work to do."""
    deadline = time.monotonic() + seconds
    while True:
        time.sleep(0.01)  # releases the GIL, so that a waiting thread gets it
        if not _busy(name) or time.monotonic() > deadline:
            return


def _busy(name: str) -> bool:
    for thread in THREADS.glob("*"):
        try:
            found, state = (
                (thread / "comm").read_text().strip(),
                (thread / "stat").read_text().rpartition(")")[2].split()[0],
            )
        except OSError:  # the thread has ended
            continue
        if found == name and state == "R":
            return True
    return False
