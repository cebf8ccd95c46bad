"""A user's mistake ends in one line that names the key, what was given and what is allowed. A bug has a traceback."""

import argparse
import difflib
import os
import re
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import flash_train
from flash_train.cli.config.pages import OUT_OF_MEMORY as OUT_OF_MEMORY_PAGE
from flash_train.cli.config.pages import page_of
from flash_train.output import LOGGER, lasting_output, show_messages

#: the messages of PyTorch's allocators, CUDA's driver, cuBLAS, C++ and Python
OUT_OF_MEMORY = re.compile(
    r"out of (\w+ )?memory|can(no|')t allocate memory|ALLOC_FAILED|bad_alloc|MemoryError",
    re.IGNORECASE,
)
NAMES_A_KEY = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)+ |[a-z0-9_.]+=")  # "model.width must …", "seq_len=3: …"


class UsageError(Exception):
    """A mistake in the command line or in a file that it names; its text is the one line that the user sees."""

    status = 1  #: the exit status of the process
    page: str | None = None  #: of the documentation; None: the page of the first key that the text names


class UnavailableError(UsageError):
    """The command is right, but this machine can't run it."""

    status = 3


class OutOfMemoryError(UsageError):
    """A run needs more memory than the machine has."""

    status = 4
    page = f"docs/{OUT_OF_MEMORY_PAGE}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory is exhausted, whichever library raised it."""
    return isinstance(error, RuntimeError | MemoryError) and bool(
        OUT_OF_MEMORY.search(f"{type(error).__name__}: {error}")
    )


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """` (did you mean …?)`, or nothing if no allowed name is close."""
    close = difflib.get_close_matches(given, list(allowed), n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""


@contextmanager
def blame(key: str, kind: type[UsageError] = UsageError) -> Iterator[None]:
    """Turn errors that the library raises on bad input into a `UsageError` that names a configuration key."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        text = " ".join(str(error).split())
        raise kind(text if NAMES_A_KEY.match(text) else f"{key}: {text}") from error


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Wrap a command: failing output stops nothing (`lasting_output`), and a mistake is one line (`_in_one_line`)."""
    show_messages()
    with lasting_output(), _in_one_line():
        yield


@contextmanager
def _in_one_line() -> Iterator[None]:
    """Log a `UsageError` as one line and exit with its status. With HYDRA_FULL_ERROR=1 it is raised.

    Ctrl-C also logs a line and exits with 128 + SIGINT, unless the running code handles it.
    """
    try:
        yield
    except KeyboardInterrupt:
        LOGGER.error("stopped")
        sys.exit(128 + signal.SIGINT)
    except UsageError as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        fail(error)


def helpful_page(error: UsageError) -> str | None:
    """Return the page of the documentation that helps."""
    return error.page or page_of(str(error))


def line_of(error: UsageError) -> str:
    """Return an error as one line, with the page that helps."""
    text, page = " ".join(str(error).split()), helpful_page(error)
    return f"{text} (see {page})" if page else text


def fail(error: UsageError) -> NoReturn:
    """Log an error as one line, and exit with its status."""
    LOGGER.error("%s", line_of(error))
    sys.exit(error.status)


class ArgumentParser(argparse.ArgumentParser):
    """A parser that raises `UsageError` for a mistake, knows `--version`, and names a page at the end of its help."""

    def __init__(self, *, page: str | None = None, **options: Any) -> None:
        epilog = None if page is None else f"Documentation: {page}"
        if options.get("description"):
            options["description"] = options["description"].replace("``", "`")  # a docstring's way to mark code
        super().__init__(epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self.add_argument("--version", action="version", version=f"flash-train {flash_train.__version__}")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(text or repr(text) for text in unknown)}")
        return parsed

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; --help lists what is allowed")
