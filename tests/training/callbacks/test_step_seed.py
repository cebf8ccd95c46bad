"""StepSeed: random numbers depend on seed, step and place of a row, or on seed, batch and rank."""

import time

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from flash_train.data import PackedDataModule, RecallCorpus
from flash_train.training import StepSeed
from flash_train.training.callbacks.step_seed import step_seed
from tests.support.training.tiny_run import RowSharing, TinyData, plain_trainer, tiny_config, tiny_module


class Draws(pl.Callback):
    """The first random number of every training batch, and of every place where batches have places."""

    def __init__(self):
        self.numbers, self.by_place = [], {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.numbers.append(torch.rand(()).item())
        if "places" in batch:
            self.by_place[batch["places"][0]] = self.numbers[-1]


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


@pytest.mark.parametrize(
    ("one", "other", "share"), [((0, 4), (0, 2), True), ((1, 4), (1, 2), True), ((0, 2), (1, 2), False)]
)
def test_ranks_that_share_a_row_draw_the_same_numbers(tmp_path, one, other, share):
    def numbers(data_rank, data_ranks):
        draws, strategy = Draws(), RowSharing(data_rank, data_ranks, world_size=4)
        plain_trainer(tmp_path, StepSeed(3), draws, strategy=strategy).fit(tiny_module(), datamodule=TinyData())
        return draws.numbers

    first, second = numbers(*one), numbers(*other)
    assert first == second if share else set(first).isdisjoint(second)


def test_the_numbers_of_a_row_do_not_depend_on_the_number_of_ranks(tmp_path):
    corpus = RecallCorpus(n_pairs=4)

    def numbers(data_rank, data_ranks):
        draws, strategy = Draws(), RowSharing(data_rank, data_ranks, world_size=data_ranks)
        data = PackedDataModule(corpus, seq_len=32, batch_size=1, seed=5)
        options = {"accumulate_grad_batches": 4 // data_ranks, "max_steps": 3, "limit_val_batches": 0}
        module = tiny_module(config=tiny_config(vocab_size=data.vocab_size))
        plain_trainer(tmp_path, StepSeed(3), draws, strategy=strategy, **options).fit(module, datamodule=data)
        return draws.by_place

    alone = numbers(0, 1)
    assert sorted(alone) == list(range(12)) and len(set(alone.values())) == 12
    assert {**numbers(0, 2), **numbers(1, 2)} == alone


@pytest.mark.parametrize("seed", ["a", 1.0, -1, None, True])
def test_a_seed_is_an_integer(seed):
    with pytest.raises(ValueError, match=rf"^seed={seed!r}: must be an integer of at least 0$"):
        StepSeed(seed)
    assert StepSeed(np.int64(3)).seed == 3
