"""A line on the data: what takes long, for whoever waits for it, and what is not as it was."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch.utilities import rank_zero_only

PATIENCE_SECONDS = 5.0


@contextmanager
def say_if_slow(text: str) -> Iterator[None]:
    """Says `text` once, on rank 0 alone, if the block takes longer than PATIENCE_SECONDS."""
    timer = threading.Timer(PATIENCE_SECONDS, say, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@rank_zero_only
def say(text: str) -> None:
    """One line on stderr, of rank 0 alone."""
    print(f"data: {text}", file=sys.stderr, flush=True)
