"""Logging metrics at an optimizer step: to loggers, Lightning's progress bars, and callbacks that monitor them."""

from collections.abc import Mapping

import torch
from lightning.pytorch import Trainer

SHOWN = ("train/loss", "val/loss")  # in Lightning's progress bars


def is_logged(trainer: Trainer, step: int) -> bool:
    """Whether a step's metrics are logged: every `log_every_n_steps`, and at `max_steps`."""
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return bool(every and step % every == 0) or step == trainer.max_steps


def log_at_step(trainer: Trainer, metrics: Mapping[str, float], step: int) -> None:
    """Log metrics at `step`, the number of optimizer steps taken, with one call per logger.

    `LightningModule.log` would log them one step earlier, and takes several milliseconds for this many metrics.
    """
    tensors = {name: torch.tensor(value) for name, value in metrics.items()}
    trainer.callback_metrics.update(tensors)
    trainer.logged_metrics.update(tensors)
    trainer.progress_bar_metrics.update({name: metrics[name] for name in SHOWN if name in metrics})
    for logger in trainer.loggers:
        logger.log_metrics({**metrics, "epoch": trainer.current_epoch}, step=step)
        logger.save()
