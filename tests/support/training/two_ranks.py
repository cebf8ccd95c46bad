"""Four micro-batches per step, on one process or on two ranks with two each; as a script, on two ranks."""

import json
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from tests.support.training.tiny_run import packed_row, tiny_config, tiny_module, tiny_trainer

STEPS = 3


class RankData(pl.LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        return self._shard([packed_row(i) for i in range(4 * STEPS)])

    def val_dataloader(self) -> DataLoader:
        return self._shard([packed_row(100 + i) for i in range(4)])

    def _shard(self, rows: list) -> DataLoader:
        return DataLoader(rows[self.trainer.global_rank :: self.trainer.world_size], batch_size=None)


def train(run_dir: Path, devices: int) -> None:
    torch.set_num_threads(1)
    trainer = tiny_trainer(
        run_dir, max_steps=STEPS, devices=devices, accumulate=4 // devices, strategy="auto" if devices == 1 else "ddp"
    )
    module = tiny_module(config=tiny_config(attention_dropout=0.0, residual_dropout=0.0))
    trainer.fit(module, datamodule=RankData())
    if trainer.is_global_zero:
        weights = {name: value.flatten().tolist() for name, value in module.state_dict().items()}
        (run_dir / "weights.json").write_text(json.dumps(weights))


if __name__ == "__main__":
    train(Path(sys.argv[1]), devices=2)
