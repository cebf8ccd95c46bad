"""Signals and the processes that load batches: a signal that asks a run to stop is the main process's business."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

TELLS_SENDER = hasattr(signal, "sigwaitinfo")  # Linux
NAMES = ("SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", *(["SIGTERM"] if TELLS_SENDER else []))
#: What terminals, shells, schedulers and service managers send to every process of a run
STOPPING = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]


@contextmanager
def started_without_signals() -> Iterator[None]:
    """Processes that are started in this block never receive a signal of STOPPING; this one does after the block."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_signals_to_main(worker: int) -> None:
    """What a worker runs as it starts: signals of STOPPING are ignored, but for a SIGTERM of the main process.

    With that one PyTorch ends workers that do not end by themselves. Its handler in a worker asks for the sender, too,
    and ends the worker on every other SIGTERM; with the worker the run would end, before it has saved anything.
    """
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # a process that was spawned may have lost the mask
    main = multiprocessing.parent_process()  # not `os.getppid()`: that is the server's where one forks the workers
    if TELLS_SENDER and main is not None:
        threading.Thread(target=_end_with_main, args=(main.pid,), daemon=True).start()


def _end_with_main(main: int) -> None:
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != main:
        pass
    os._exit(0)  # as PyTorch's handler does: another status would be reported as an error
