"""Ctrl-C, SIGTERM and SIGHUP in a command that continues where it was stopped."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from flash_train.cli.run.claim import claimed

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Interrupted(Exception):
    """A signal asks the command to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def going_on_later(run_dir: Path) -> Iterator[None]:
    """Within it a signal ends the process, with one line that says how to go on; cleaning up is not disturbed.

    Another command with the same `run_dir` is refused meanwhile.
    """
    try:
        with claimed(run_dir), signals():
            yield
    except Interrupted as stop:
        print(f"stopped by {stop}; to go on, give the same arguments and run_dir={run_dir}", file=sys.stderr)
        sys.exit(128 + stop.number)


@contextmanager
def signals() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP raise `Interrupted`, once: what follows until the process ends is cleaning up.

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
