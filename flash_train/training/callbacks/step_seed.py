"""Random numbers as a pure function of the step, so a resumed run draws the same ones as an uninterrupted run."""

import hashlib
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer


def step_seed(seed: int, batch: int, rank: int) -> int:
    """Return a 63-bit seed for one micro-batch of one rank. It is hashed: similar seeds may give similar numbers."""
    digest = hashlib.blake2b(f"{seed}/{batch}/{rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class StepSeed(Callback):
    """Seeds PyTorch's generators on all devices at the start of every training batch.

    Dropout then depends only on (seed, batch index, rank): checkpoints need no generator state, ranks differ, and
    random numbers drawn in between (in a validation, for a sample) change nothing.

    Args:
        seed: the run's seed.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # `total_batch_idx` counts over epochs and resumptions; `batch_idx` restarts at 0 in every epoch.
        torch.manual_seed(step_seed(self.seed, trainer.fit_loop.total_batch_idx, trainer.global_rank))
