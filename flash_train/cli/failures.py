"""What can go wrong while a run is under way and is no bug: told in one line, like a mistake in the configuration."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from omegaconf import DictConfig

from flash_train.cli.errors import OutOfMemoryError, UsageError
from flash_train.training import NonFiniteLossError

ALLOCATORS = ("DefaultCPUAllocator", "MPS backend out of memory")  # which have no exception of their own


@contextmanager
def known_failures(config: DictConfig) -> Iterator[None]:
    """Turn a diverging loss and exhausted memory into a `UsageError`; everything else keeps its traceback."""
    try:
        yield
    except NonFiniteLossError as error:
        raise UsageError(str(error)) from error
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and not any(x in str(error) for x in ALLOCATORS):
            raise
        kind = "GPU memory" if isinstance(error, torch.OutOfMemoryError) else "memory"
        raise OutOfMemoryError(
            f"out of {kind} at seq_len={config.seq_len} batch_size={config.batch_size} "
            f"memory={config.memory.mode}: try memory=selective, then memory=checkpoint, "
            "a smaller batch_size with accumulate, or precision=bf16-true"
        ) from error
