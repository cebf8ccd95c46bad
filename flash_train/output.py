"""Output that a run survives: a terminal that is gone, a pipe that is closed, a full disk, an encoding too small."""

import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast


class LastingStream:
    """A text stream whose `write` and `flush` never raise: what cannot be written is dropped.

    Characters that the encoding lacks are written as `\\xe9` or `\\u2026`. Everything else is asked of the stream.

    Args:
        stream: returns the stream to write to, or None where the process has none; called at every use.
    """

    def __init__(self, stream: Callable[[], TextIO | None]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):  # gone, full, or closed
            if (stream := self._stream()) is not None:
                try:
                    stream.write(text)
                except UnicodeEncodeError:
                    encoding = stream.encoding or "ascii"
                    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            if (stream := self._stream()) is not None:
                stream.flush()

    def isatty(self) -> bool:
        stream = self._stream()
        with suppress(ValueError):
            return stream is not None and stream.isatty()
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream(), name)


def _current(name: str) -> TextIO | None:
    """`sys.stdout` or `sys.stderr` as it is now, without the proxy that a running progress bar puts there."""
    stream = getattr(sys, name)
    return getattr(stream, "rich_proxied_file", stream)


STDOUT = cast("TextIO", LastingStream(lambda: _current("stdout")))
STDERR = cast("TextIO", LastingStream(lambda: _current("stderr")))


@contextmanager
def lasting_output() -> Iterator[None]:
    """Within it nothing that anybody prints to `sys.stdout` or `sys.stderr` can raise; for the length of a command."""
    before = sys.stdout, sys.stderr
    out, err = before
    sys.stdout = cast("TextIO", LastingStream(lambda: out))
    sys.stderr = cast("TextIO", LastingStream(lambda: err))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in before:
            _empty(stream)


def _empty(stream: TextIO | None) -> None:
    """Write out what `stream` has buffered, or drop it: at the interpreter's exit it would make exit status 120."""
    try:
        if stream is not None:
            stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):  # closed, or without a descriptor: nothing is left to be written then
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def say(text: str) -> None:
    """One line on stderr."""
    print(text, file=STDERR, flush=True)


def say_in_handler(text: str) -> None:
    """A line on stderr from a signal handler: past `print`, which may be under way, and only if nothing blocks."""
    with suppress(AttributeError, OSError, ValueError):  # no stderr, one that is gone, or one without a descriptor
        number = sys.stderr.fileno()
        if select.select([], [number], [], 0)[1]:
            os.write(number, f"\n{text}\n".encode())
