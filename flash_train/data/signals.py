"""Signals in the processes that load batches: only the main process handles a signal to stop."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

HAS_SENDER = hasattr(signal, "sigwaitinfo")  # Linux: a process can find out who sent a signal
NAMES = ("SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", *(["SIGTERM"] if HAS_SENDER else []))
#: Terminals, shells, schedulers and service managers send these to every process of a run
STOPPING = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]


@contextmanager
def started_without_signals() -> Iterator[None]:
    """Keep the signals in STOPPING from processes started in this block; this process gets them after it."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    if _start_method() == "forkserver":
        # Started in the block, it would keep the mask, and every later child process would inherit it.
        from multiprocessing import forkserver

        forkserver.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_signals_to_main(worker: int) -> None:
    """Make a worker ignore the signals in STOPPING, and end it with the main process. Called when it starts.

    A SIGTERM from the main process ends it, too: PyTorch sends one to workers that do not end by themselves. PyTorch's
    own handler would end the worker on any other SIGTERM, and the run would then end before it has saved anything.
    """
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # a spawned process may have lost the mask
    main = multiprocessing.parent_process()  # not `os.getppid()`: this may be a fork server
    if main is None:
        return
    # PyTorch's worker compares `os.getppid()` with its first value, and so misses an end before that
    threading.Thread(target=_end_after, args=(main,), daemon=True).start()
    if HAS_SENDER:
        threading.Thread(target=_end_on_sigterm, args=(main.pid,), daemon=True).start()


def _start_method() -> str:
    """Return how Python starts processes, without choosing the default if nothing has been chosen yet."""
    return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


def _end_after(main: multiprocessing.process.BaseProcess) -> None:
    main.join()
    os._exit(1)


def _end_on_sigterm(main: int) -> None:
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != main:
        pass
    os._exit(0)  # as in PyTorch's handler: another status would be reported as an error
