"""Messages about the data: one line each, on rank 0 alone."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_utilities.core.rank_zero import rank_zero_only  # Lightning sets its rank, and takes seconds to import

from flash_train import output

PATIENCE_SECONDS = 5.0


@contextmanager
def say_if_slow(text: str) -> Iterator[None]:
    """Print `text` once, on rank 0 alone, if the block takes longer than PATIENCE_SECONDS."""
    timer = threading.Timer(PATIENCE_SECONDS, say, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def say(text: str) -> None:
    """Print one line on stderr, on rank 0 alone."""
    if getattr(rank_zero_only, "rank", 0) == 0:
        output.say(f"data: {text}")
