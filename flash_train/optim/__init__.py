"""Optimizers."""

from flash_train.optim.adamw import MASTERS, MOMENTS, AdamW
from flash_train.optim.in_backward import step_in_backward
from flash_train.optim.state import exact_weights, without_codes

__all__ = ["MASTERS", "MOMENTS", "AdamW", "exact_weights", "step_in_backward", "without_codes"]
