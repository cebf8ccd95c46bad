"""Sharded and replicated weights, shared rows: the same optimizer step as one process."""

import re

import lightning.pytorch as pl
import pytest
import torch

from flash_train.distributed.sharding import blocks_of
from flash_train.distributed.strategy import ReplicatedStrategy, ShardedStrategy
from flash_train.training import CausalLMModule
from tests.support.model.tiny import tiny_config
from tests.support.processes import run_python
from tests.support.tiers import slow_after


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_exchanged_gradients_are_summed_once_and_in_pieces(ranks):
    done = run_python("tests.support.distributed.summed_gradients", str(ranks), timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    ("ranks", "draws", "first"), slow_after(2, [(2, 6, 0), (4, 4, 0), (2, 24, 6), (4, 24, 4)], unpack=True)
)
def test_a_step_of_several_ranks_is_the_step_of_one_process(ranks, draws, first):
    done = run_python("tests.support.distributed.optimizer_steps", ranks, draws, first, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    counts = [int(count) for count in re.findall(r"(\d+) of \d+x\d+x\d+", done.stdout)]
    assert done.stdout.startswith(f"{ranks} ranks: ") and sum(counts) == draws, done.stdout


class Plain(pl.LightningModule):
    """A module that knows nothing of this project."""

    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 6))
        self.layers = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(6, 6)) for _ in range(2))
        self.head = torch.nn.Linear(6, 1)


def test_blocks_are_the_elements_of_the_outermost_containers():
    module = Plain()
    assert list(blocks_of(module)) == [module.encoder[0], module.encoder[2], *module.layers]


def test_foreign_modules_train_sharded():
    done = run_python("tests.support.distributed.foreign_module", timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("equal to one process") == 2


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (
            ShardedStrategy(shard=2),
            "parallel.shard=2: must divide the number of devices, 1",
        ),
        (ReplicatedStrategy(context=2), "parallel.context=2: must divide the number of devices, 1"),
    ],
    ids=["shard", "context"],
)
def test_sizes_that_do_not_fit_end_before_training(strategy, message, tmp_path):
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, logger=False, enable_checkpointing=False)
    with pytest.raises(ValueError, match=re.escape(message)):
        trainer.fit(CausalLMModule(tiny_config()), train_dataloaders=[])


@pytest.mark.parametrize(
    ("name", "kind"), [("flash_sharded", ShardedStrategy), ("flash_replicated", ReplicatedStrategy)]
)
def test_a_trainer_finds_the_strategies_by_name(name, kind, tmp_path):
    trainer = pl.Trainer(default_root_dir=tmp_path, accelerator="cpu", devices=2, strategy=name, logger=False)
    assert type(trainer.strategy) is kind
