"""A user's mistake ends in one line: the key, what was given, what is allowed. A bug keeps its traceback."""

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
from flash_train.output import lasting_output

#: in the words of PyTorch's allocators, CUDA's driver, cuBLAS, C++ and Python
OUT_OF_MEMORY = re.compile(
    r"out of (\w+ )?memory|can(no|')t allocate memory|ALLOC_FAILED|bad_alloc|MemoryError",
    re.IGNORECASE,
)
NAMES_A_KEY = re.compile(r"[a-z_]+(\.[a-z_]+)+ |[a-z_.]+=")  # "model.width must …", "seq_len=3: …"


class UsageError(Exception):
    """A mistake in the command line or in what it points at; its text is the one line that the user sees."""

    status = 1  #: with which the process exits


class UnavailableError(UsageError):
    """Nothing is wrong with the command, but this machine can't run it."""

    status = 3


class OutOfMemoryError(UsageError):
    """A run needs more memory than there is."""

    status = 4


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, whoever raised it, says that memory is exhausted."""
    return isinstance(error, RuntimeError | MemoryError) and bool(
        OUT_OF_MEMORY.search(f"{type(error).__name__}: {error}")
    )


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """` (did you mean …?)`, or nothing when no allowed name is close."""
    close = difflib.get_close_matches(given, list(allowed), n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""


@contextmanager
def blame(key: str, kind: type[UsageError] = UsageError) -> Iterator[None]:
    """Errors that the library raises on bad input become a `UsageError` that names a configuration key."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        text = " ".join(str(error).split())
        raise kind(text if NAMES_A_KEY.match(text) else f"{key}: {text}") from error


@contextmanager
def one_line_errors() -> Iterator[None]:
    """A command: output that fails stops nothing (`lasting_output`), and a mistake is one line (`_in_one_line`)."""
    with lasting_output(), _in_one_line():
        yield


@contextmanager
def _in_one_line() -> Iterator[None]:
    """Print a `UsageError` as one line on stderr and exit with its status; HYDRA_FULL_ERROR=1 lets it through.

    Ctrl-C before anything runs that knows how to stop is a line, too, and 128 + SIGINT.
    """
    try:
        yield
    except KeyboardInterrupt:
        print("flash-train: stopped", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except UsageError as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        fail(error)


def fail(error: UsageError) -> NoReturn:
    tell(str(error))
    sys.exit(error.status)


def tell(text: str) -> None:
    """One line on stderr, by the name of the program."""
    print(f"flash-train: {' '.join(text.split())}", file=sys.stderr, flush=True)


class ArgumentParser(argparse.ArgumentParser):
    """One whose mistakes are a `UsageError`, in place of its usage and an exit status of their own; has `--version`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_argument("--version", action="version", version=f"flash-train {flash_train.__version__}")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(text or repr(text) for text in unknown)}")
        return parsed

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; --help says what there is")
