"""Random numbers as a pure function of the step, so that a resumed run draws what an unbroken one would have."""

import hashlib
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer


def step_seed(seed: int, batch: int, rank: int) -> int:
    """A 63-bit seed for one micro-batch of one rank: hashed, as generators seeded with neighbours may be alike."""
    digest = hashlib.blake2b(f"{seed}/{batch}/{rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class StepSeed(Callback):
    """Seeds PyTorch's generators, of all devices, at the start of every training batch.

    Dropout then depends on (seed, batch index, rank) alone: checkpoints need no generator state, ranks differ, and
    whatever else draws random numbers in between (validation, a sample) changes nothing.

    Args:
        seed: of the run.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # Batches of the whole run, over epochs and resumptions; `batch_idx` begins anew with every epoch.
        torch.manual_seed(step_seed(self.seed, trainer.fit_loop.total_batch_idx, trainer.global_rank))
