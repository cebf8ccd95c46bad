"""A LightningModule that knows nothing of this project, trained sharded on two ranks and in one process.

python -m tests.support.distributed.foreign_module
"""

from __future__ import annotations

import os
import tempfile

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from torch import nn
from torch.utils.data import DataLoader

from flash_train.distributed.leave import leave_groups
from flash_train.distributed.strategy import ShardedStrategy

STEPS, RANKS = 4, 2


class Foreign(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(8, 3)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return self.head(self.encoder(batch)).square().mean()

    def validation_step(self, batch: torch.Tensor, _: int) -> None:
        self.log("loss", self.training_step(batch, 0), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(RANKS, 5, 8, generator=generator) for _ in range(STEPS)]


def alone() -> list[torch.Tensor]:
    torch.manual_seed(0)
    module = Foreign()
    optimizer = module.configure_optimizers()
    for batch in batches():
        module.training_step(batch, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in module.parameters()]


def check(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "GROUP_RANK": 0}
    os.environ |= {name: str(value) for name, value in names.items()}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    trainer = pl.Trainer(
        default_root_dir=folder, accelerator="cpu", devices=RANKS, strategy=ShardedStrategy(), max_epochs=1,
        plugins=[TorchElasticEnvironment()], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    torch.manual_seed(rank)  # the strategy gives every rank the first rank's weights
    module = Foreign()
    trainer.fit(module, DataLoader([batch[rank : rank + 1] for batch in batches()], batch_size=None))
    trainer.validate(module, DataLoader(batches(), batch_size=None))  # the module is sharded already
    for right, parameter in zip(alone(), module.parameters(), strict=True):
        torch.testing.assert_close(parameter.full_tensor(), right)
    print("equal to one process", flush=True)
    leave_groups()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(check, (folder,), nprocs=RANKS)
