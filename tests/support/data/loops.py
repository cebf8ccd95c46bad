"""Trainers and modules that record the batches which PackedDataModule gives them."""

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint


class FakeTrainer:
    """The attributes of a trainer that PackedDataModule reads for its rank; `world_size` counts data ranks."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.strategy = type("Strategy", (), {"distributed_sampler_kwargs": {"rank": rank, "num_replicas": world_size}})
        total = type("Progress", (), {"processed": 0})
        progress = type("BatchProgress", (), {"total": total, "current": total})
        self.fit_loop = type("Loop", (), {"epoch_loop": type("Loop", (), {"batch_progress": progress})})
        self.limit_train_batches, self.accumulate_grad_batches, self.lightning_module = 1.0, 1, None
        self.overfit_batches, self.state = 0, type("State", (), {"fn": None})


def equal_batches(one: dict, other: dict) -> bool:
    return one["lengths"] == other["lengths"] and all(
        torch.equal(one[name], other[name]) for name in ("tokens", "labels", "positions", "cu_seqlens")
    )


class Recorder(lightning.LightningModule):
    """Stores the tokens of every batch, by optimizer step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[tuple[int, list]] = []

    def training_step(self, batch, batch_idx):
        self.seen.append((self.global_step, batch["tokens"].tolist()))
        return self.weight.sum()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class StopAtBatch(Callback):
    """Saves a checkpoint in `on_train_batch_end` of a batch, counted over the whole run, and stops there."""

    def __init__(self, batch: int, path) -> None:
        self.batch, self.path = batch, path

    def on_train_batch_end(self, trainer, module, *_):
        if trainer.fit_loop.epoch_loop.batch_progress.total.processed == self.batch:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def fit(data, path, *, steps=-1, callbacks=(), resume=None, module=None, **options) -> list[tuple[int, list]]:
    module = module or Recorder()
    trainer = lightning.Trainer(
        **{"max_steps": steps, "max_epochs": -1, **options},
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        num_sanity_val_steps=0,
        default_root_dir=path,
        callbacks=list(callbacks),
        check_val_every_n_epoch=None,
    )
    trainer.fit(module, datamodule=data, ckpt_path=resume, weights_only=True)
    return module.seen
