"""Messages, and output that cannot fail a run: a closed terminal or pipe, a full disk, a limited encoding.

Messages go to `logging.getLogger("flash_train")`. A program that configures logging handles them there. In any other
program they appear on stderr, one per line, after the prefix `flash-train: `.
"""

import logging
import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

PREFIX = "flash-train: "
LOGGER = logging.getLogger("flash_train")


class LastingStream:
    """A text stream whose `write` and `flush` never raise: output that cannot be written is dropped.

    Characters that the encoding lacks are written as escapes, such as `\\xe9` or `\\u2026`. All other attributes
    come from the underlying stream.

    Args:
        stream: returns the stream to write to, or None if the process has none. It is called at every use.
    """

    def __init__(self, stream: Callable[[], TextIO | None]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):  # the terminal is gone, the disk is full, or the stream is closed
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


def _current_stream(name: str) -> TextIO | None:
    """Return the current `sys.stdout` or `sys.stderr`, without the proxy that a running progress bar puts there."""
    stream = getattr(sys, name)
    return getattr(stream, "rich_proxied_file", stream)


STDOUT = cast("TextIO", LastingStream(lambda: _current_stream("stdout")))
STDERR = cast("TextIO", LastingStream(lambda: _current_stream("stderr")))


class MessageHandler(logging.StreamHandler):
    """Writes messages to stderr, each on one line after `PREFIX`.

    It stays silent if the program has set up logging itself, on this package's logger or on the root logger, unless
    `show_messages` has been called.
    """

    def __init__(self) -> None:
        super().__init__(STDERR)
        self.always = False

    def filter(self, record: logging.LogRecord) -> Any:
        others = [*LOGGER.handlers, *(logging.getLogger().handlers if LOGGER.propagate else [])]
        return super().filter(record) if self.always or others == [self] else False

    def format(self, record: logging.LogRecord) -> str:
        return PREFIX + super().format(record)


_HANDLER = MessageHandler()
LOGGER.addHandler(_HANDLER)
if LOGGER.level == logging.NOTSET:  # the root logger's level would hide messages below a warning
    LOGGER.setLevel(logging.INFO)


def counted(number: int, noun: str) -> str:
    """A number with its noun, in the plural unless it is 1."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def show_messages() -> None:
    """Show messages on stderr even if a library has set up logging. Commands call this, since they own the process."""
    _HANDLER.always = True


def say(text: str) -> None:
    """Log a message that is not an error."""
    LOGGER.info("%s", text)


def say_in_handler(text: str) -> None:
    """Write a message from a signal handler, unless the write would block.

    It bypasses the logger and `print`: the signal may have interrupted either of them in the middle of a write.
    """
    with suppress(AttributeError, OSError, ValueError):  # stderr is missing, closed, or has no file descriptor
        number = sys.stderr.fileno()
        if LOGGER.isEnabledFor(logging.INFO) and select.select([], [number], [], 0)[1]:
            os.write(number, f"\n{PREFIX}{text}\n".encode())


@contextmanager
def lasting_output() -> Iterator[None]:
    """Make printing to `sys.stdout` or `sys.stderr` never raise in the block. A command wraps all its work in it."""
    before = sys.stdout, sys.stderr
    out, err = before
    sys.stdout = cast("TextIO", LastingStream(lambda: out))
    sys.stderr = cast("TextIO", LastingStream(lambda: err))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in before:
            _flush_or_drop(stream)


def _flush_or_drop(stream: TextIO | None) -> None:
    """Flush `stream`, or drop its buffer: if Python fails to flush it at exit, the exit status becomes 120."""
    if stream is None:
        return
    try:
        stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):  # the stream is closed or has no file descriptor: nothing is buffered
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
