"""A tiny run with checkpoints on any division of the ranks. Its optimizer steps have the same rows on all of them.

torchrun --nproc-per-node 2 -m tests.support.distributed.resumable_run FOLDER --devices 2 --strategy sharded
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from flash_train.distributed import checkpoint
from flash_train.distributed.dims import data_share
from flash_train.distributed.strategy import ReplicatedStrategy, ShardedStrategy
from flash_train.training import OptimizerConfig
from tests.support.training.tiny_run import packed_row, tiny_config, tiny_module, tiny_trainer

ROWS = 4  # in an optimizer step


class SharedData(pl.LightningDataModule):
    """Gives the rows of a step to the data ranks in turn; continues after a checkpoint's steps."""

    start = 0

    def train_dataloader(self) -> DataLoader:
        return self._share([packed_row(i) for i in range(ROWS * self.start, ROWS * 20)])

    def val_dataloader(self) -> DataLoader:
        return self._share([packed_row(100 + i) for i in range(4)])

    def _share(self, rows: list[dict[str, Any]]) -> DataLoader:
        rank, ranks = data_share(self.trainer.strategy)
        return DataLoader(rows[rank::ranks], batch_size=None)

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.trainer.global_step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["steps"]


def write_after_the_next_step(trainer: pl.Trainer, step: int) -> None:
    """Hold back the checkpoint of a step until training has taken the next one."""
    plain = checkpoint.FileSystemWriter.write_data

    def write_data(self: Any, *arguments: Any) -> Any:
        while f"step-{step:06}" in str(self.path) and trainer.global_step == step:
            time.sleep(0.01)
        return plain(self, *arguments)

    checkpoint.FileSystemWriter.write_data = write_data  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--strategy", default="auto", choices=["auto", "replicated", "sharded"])
    parser.add_argument("--shard", type=int)
    parser.add_argument("--context", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--resume")
    parser.add_argument("--write-later", action="store_true", help="in a thread, after the next step")
    parser.add_argument("--moments", choices=["fp32", "bf16", "8bit"], help="train wide weights in bf16, and these")
    options = parser.parse_args()
    torch.set_num_threads(1)
    strategies: dict[str, Any] = {
        "auto": lambda: "auto",
        "replicated": lambda: ReplicatedStrategy(options.context),
        "sharded": lambda: ShardedStrategy(options.shard, context=options.context),
    }
    trainer = tiny_trainer(
        options.run_dir,
        max_steps=options.steps,
        devices=options.devices,
        accumulate=ROWS * options.context // options.devices,
        strategy=strategies[options.strategy](),
        checkpoint_every=2,
        keep_checkpoints=None,
        async_checkpoints=options.write_later,
        precision="bf16-true" if options.moments else "fp32",
    )
    if options.write_later:
        write_after_the_next_step(trainer, step=2)
    width = {"width": 256, "head_dim": 128, "mlp_width": 512} if options.moments else {}
    config = tiny_config(attention_dropout=0.0, residual_dropout=0.0, **width)
    optimizer = OptimizerConfig(lr=1e-3, warmup_steps=2, moments=options.moments) if options.moments else None
    module = tiny_module(config=config, optimizer=optimizer)
    trainer.fit(module, datamodule=SharedData(), ckpt_path=options.resume)
    weights = {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).flatten().tolist()
        for name, value in module.state_dict().items()
    }
    if trainer.is_global_zero:
        (options.run_dir / "weights.json").write_text(json.dumps(weights))


if __name__ == "__main__":
    main()
