"""Four micro-batches per step, on one process or on two ranks with two each; as a script, on two ranks."""

import json
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from tests.support.training.tiny_run import packed_row, tiny_config, tiny_module, tiny_trainer

STEPS = 3


def ragged_row(index: int) -> dict:
    """A row of one document, each of another length."""
    length = (31, 3, 17, 5, 24, 9)[index % 6]
    return {name: value[:, :length] for name, value in packed_row(index).items() if name in ("tokens", "labels")}


class RankData(pl.LightningDataModule):
    def __init__(self, ragged: bool = False) -> None:
        super().__init__()
        self.row = ragged_row if ragged else packed_row

    def train_dataloader(self) -> DataLoader:
        return self._shard([self.row(i) for i in range(4 * STEPS)])

    def val_dataloader(self) -> DataLoader:
        return self._shard([self.row(100 + i) for i in range(4)])

    def _shard(self, rows: list) -> DataLoader:
        return DataLoader(rows[self.trainer.global_rank :: self.trainer.world_size], batch_size=None)


def train(run_dir: Path, devices: int, strategy: str = "ddp", ragged: bool = False) -> None:
    torch.set_num_threads(1)
    trainer = tiny_trainer(
        run_dir,
        max_steps=STEPS,
        devices=devices,
        accumulate=4 // devices,
        strategy="auto" if devices == 1 else strategy,
    )
    module = tiny_module(config=tiny_config(attention_dropout=0.0, residual_dropout=0.0))
    trainer.fit(module, datamodule=RankData(ragged))
    if trainer.is_global_zero:
        weights = {name: value.flatten().tolist() for name, value in module.state_dict().items()}
        (run_dir / "weights.json").write_text(json.dumps(weights))


if __name__ == "__main__":
    train(Path(sys.argv[1]), 2, sys.argv[2], sys.argv[3] == "ragged")
