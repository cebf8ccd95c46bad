"""Optimizers."""

from flash_train.optim.adamw import MASTERS, MOMENTS, AdamW

__all__ = ["MASTERS", "MOMENTS", "AdamW"]
