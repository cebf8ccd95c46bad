"""StepSeed: random numbers depend on seed, batch and rank alone."""

import time

import lightning.pytorch as pl
import torch
from tiny_run import TinyData, plain_trainer, tiny_module

from flash_train.training import StepSeed
from flash_train.training.callbacks.step_seed import step_seed


class Draws(pl.Callback):
    """The first random number of every training batch."""

    def __init__(self):
        self.numbers = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.numbers.append(torch.rand(()).item())


def test_random_numbers_depend_on_seed_and_batch_only(tmp_path):
    def numbers(seed, **options):
        draws = Draws()
        torch.manual_seed(time.time_ns() % 2**31)
        plain_trainer(tmp_path, StepSeed(seed), draws, **options).fit(tiny_module(), datamodule=TinyData())
        return draws.numbers

    first = numbers(0)
    assert len(set(first)) == 4
    # With two micro-batches per step and a validation in between, there are more numbers, and the first are the same.
    again = numbers(0, accumulate_grad_batches=2, val_check_interval=3, check_val_every_n_epoch=None)
    assert again[:4] == first
    assert len(set(again)) == 8
    assert set(numbers(1)).isdisjoint(first)
    assert len({step_seed(s, b, r) for s in range(3) for b in range(3) for r in range(3)}) == 27
    assert all(0 <= step_seed(0, batch, 0) < 2**63 for batch in range(100))
