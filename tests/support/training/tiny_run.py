"""A tiny run for tests: its parts, and a script for tests that send signals to it."""

import argparse
import csv
from collections.abc import Callable
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader, Dataset, Sampler

from flash_train.model import ModelConfig
from flash_train.training import CausalLMModule, OptimizerConfig, StepCheckpoint, build_trainer

SEQ_LEN = 32
ROWS = 10  # rows in the data: an epoch is 10 micro-batches


def tiny_config(**changes) -> ModelConfig:
    shape = {
        "vocab_size": 31,
        "n_layers": 2,
        "width": 16,
        "n_heads": 2,
        "n_kv_heads": 1,
        "head_dim": 8,
        "mlp_width": 32,
    }
    return ModelConfig(**{**shape, "attention_dropout": 0.1, "residual_dropout": 0.1, **changes})


def tiny_module(*, seed: int = 0, attention: str = "sdpa", **options) -> CausalLMModule:
    torch.manual_seed(seed)
    config = options.pop("config", None) or tiny_config()
    optimizer = options.pop("optimizer", None) or OptimizerConfig(lr=1e-2, warmup_steps=2, gradient_clip=0.5)
    return CausalLMModule(config, optimizer, attention=attention, **options)


def packed_row(index: int) -> dict:
    """One row with two documents and a tail of padding; some more labels are left out."""
    generator = torch.Generator().manual_seed(index)
    cut = int(torch.randint(4, 20, (), generator=generator))
    lengths = (cut, 28 - cut, 4)
    tokens = torch.randint(0, 31, (SEQ_LEN,), generator=generator)
    labels = tokens.roll(-1)
    labels[[cut - 1, 27, 28, 29, 30, 31]] = -100
    labels[: index % 5] = -100  # so that micro-batches differ in their count
    return {
        "tokens": tokens[None],
        "labels": labels[None],
        "positions": torch.cat([torch.arange(n) for n in lengths])[None],
        "cu_seqlens": torch.tensor([0, cut, 28, SEQ_LEN, SEQ_LEN, SEQ_LEN], dtype=torch.int32),
        "lengths": lengths,
    }


class Rows(Dataset):
    def __getitem__(self, index: int) -> dict:
        return packed_row(index)


class EndlessSampler(Sampler):
    """Endless epochs, each in another order, from batch `start` on."""

    def __init__(self, start: int) -> None:
        self.start = start

    def __iter__(self):
        batch = self.start
        while True:
            epoch, place = divmod(batch, ROWS)
            yield int(torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch))[place])
            batch += 1


class TinyData(pl.LightningDataModule):
    """Continues after a checkpoint's batches, as `PackedDataModule` does."""

    start = 0

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Rows(), batch_size=None, sampler=EndlessSampler(self.start))

    def val_dataloader(self) -> DataLoader:
        return DataLoader([packed_row(100 + i) for i in range(2)], batch_size=None)

    def state_dict(self) -> dict:
        return {"batches": self.trainer.fit_loop.total_batch_idx + 1}

    def load_state_dict(self, state: dict) -> None:
        self.start = state["batches"]


class RowSharing(SingleDeviceStrategy):
    """One device that says it is one of `world_size` ranks, which process `data_ranks` different rows at a time."""

    def __init__(self, data_rank: int, data_ranks: int, world_size: int) -> None:
        super().__init__(torch.device("cpu"))
        self.world_size = world_size
        self.distributed_sampler_kwargs = {"rank": data_rank, "num_replicas": data_ranks}


def tiny_trainer(run_dir: Path, **options):
    defaults = {"max_steps": 12, "accumulate": 2, "log_every": 1, "accelerator": "cpu", "progress": False}
    return build_trainer(run_dir=run_dir, **{**defaults, **options})


def plain_trainer(folder: Path, *callbacks: pl.Callback, **options) -> pl.Trainer:
    """A `Trainer` made without `build_trainer`."""
    defaults = {
        "accelerator": "cpu",
        "max_steps": 4,
        "log_every_n_steps": 1,
        "logger": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(
        default_root_dir=folder,
        enable_progress_bar=any(isinstance(callback, ProgressBar) for callback in callbacks),
        enable_checkpointing=any(isinstance(callback, StepCheckpoint) for callback in callbacks),
        callbacks=list(callbacks),
        **{**defaults, **options},
    )


class Hook(pl.Callback):
    """Calls `function(trainer, pl_module)` once, at the first batch after `step` optimizer steps."""

    def __init__(self, step: int, function: Callable) -> None:
        self.step, self.function, self.calls = step, function, 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.step and not self.calls:
            self.calls += 1
            self.function(trainer, pl_module)


def read_metrics(folder: Path) -> list[dict[str, str]]:
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--resume")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    trainer = tiny_trainer(arguments.run_dir, val_every=5, max_steps=100_000)
    trainer.fit(tiny_module(), datamodule=TinyData(), ckpt_path=arguments.resume)
    print("after fit")


if __name__ == "__main__":
    main()
