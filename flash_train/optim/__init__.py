"""Optimizers."""

from flash_train.optim.adamw import MASTERS, MOMENTS, AdamW
from flash_train.optim.in_backward import step_in_backward
from flash_train.optim.state import without_codes

__all__ = ["MASTERS", "MOMENTS", "AdamW", "step_in_backward", "without_codes"]
