"""Ctrl-C and SIGTERM in a command that goes on where it was stopped."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


class Interrupted(Exception):
    """A signal asks the command to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def going_on_later(run_dir: Path) -> Iterator[None]:
    """Within it a signal ends the process, with one line that says how to go on; cleaning up is not disturbed."""
    try:
        with signals():
            yield
    except Interrupted as stop:
        print(f"stopped by {stop}; to go on, give the same arguments and run_dir={run_dir}", file=sys.stderr)
        sys.exit(128 + stop.number)


@contextmanager
def signals() -> Iterator[None]:
    """Ctrl-C and SIGTERM raise `Interrupted`, once: what follows until the end of the process is cleaning up."""

    def stop(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is stop:
            for number, handler in before.items():
                signal.signal(number, handler)
