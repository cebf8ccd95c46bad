"""What can go wrong while a run is under way and is no bug: told in one line, like a mistake in the configuration."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from omegaconf import DictConfig

from flash_train.cli.errors import UsageError
from flash_train.training import NonFiniteLossError


@contextmanager
def known_failures(config: DictConfig) -> Iterator[None]:
    """Turn a diverging loss and an exhausted GPU into a `UsageError`; everything else keeps its traceback."""
    try:
        yield
    except NonFiniteLossError as error:
        raise UsageError(str(error)) from error
    except torch.OutOfMemoryError as error:
        raise UsageError(
            f"out of GPU memory at seq_len={config.seq_len} batch_size={config.batch_size} "
            f"memory={config.memory.mode}: try memory=selective, then memory=checkpoint, "
            "a smaller batch_size with accumulate, or precision=bf16-true"
        ) from error
