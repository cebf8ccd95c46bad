"""Seeds random numbers at every training batch, so a resumed run draws the same ones as an uninterrupted run."""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from flash_train.checks import as_integer
from flash_train.distributed.dims import data_share


def step_seed(seed: int, batch: int, rank: int) -> int:
    """Return a 63-bit seed for one micro-batch of one rank. It is hashed: similar seeds may give similar numbers."""
    digest = hashlib.blake2b(f"{seed}/{batch}/{rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_of_rows(seed: int, places: Sequence[int]) -> int:
    """Return the seed for a batch of rows from their places in the order of training, wherever it is computed.

    In a run on one device this is ``step_seed(seed, batch, 0)``, where `batch` counts the batches of the run.
    """
    return step_seed(seed, *divmod(places[0], len(places)))


class StepSeed(Callback):
    """Seeds PyTorch's generators on all devices at the start of every training batch.

    With batches that have ``places``, as `PackedDataModule` makes them, dropout then depends only on (seed, batch size,
    place of the batch's first row). With a batch size of 1 a row has the same dropout on any number of ranks.
    With other batches, and with `overfit_batches`, it depends on (seed, batch index, data rank). Either way checkpoints
    need no generator state, random numbers drawn in between (in a validation, for a sample) change nothing, and ranks
    that share a row draw the same.

    Args:
        seed: the run's seed, 0 or more.

    Raises:
        ValueError: a seed that is no integer, or negative.
    """

    def __init__(self, seed: int) -> None:
        self.seed = as_integer("seed", seed, 0)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if isinstance(batch, dict) and "places" in batch and not trainer.overfit_batches:  # type: ignore[attr-defined]
            torch.manual_seed(seed_of_rows(self.seed, batch["places"]))
            return
        # `total_batch_idx` counts over epochs and resumptions; `batch_idx` restarts at 0 in every epoch.
        torch.manual_seed(step_seed(self.seed, trainer.fit_loop.total_batch_idx, data_share(trainer.strategy)[0]))
