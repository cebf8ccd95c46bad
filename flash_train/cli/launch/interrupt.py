"""Ctrl-C, SIGTERM and SIGHUP in a command that can be started again and then continues."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from flash_train.cli.launch.run_dir import locked
from flash_train.output import LOGGER

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Interrupted(Exception):
    """A signal asks the command to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def resumable(run_dir: Path) -> Iterator[None]:
    """Within the block, a signal ends the process after its cleanup, with a message that says how to continue.

    `run_dir` is locked: another command with the same directory raises `UsageError`.
    """
    try:
        with locked(run_dir), signals():
            yield
    except Interrupted as stop:
        LOGGER.error("stopped by %s; to continue, give the same arguments and run_dir=%s", stop, run_dir)
        sys.exit(128 + stop.number)


@contextmanager
def signals() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP raise `Interrupted`. After the first, further signals are ignored during the cleanup.

    A SIGHUP that the process ignores (`nohup`) stays ignored.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(number)

    heard = [n for n in SIGNALS if n == signal.SIGINT or signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in heard}
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is stop:
            for number, handler in before.items():
                signal.signal(number, handler)
