"""Ablations that tests plan."""

from flash_train.cli.config.overrides import read
from flash_train.cli.sweep.plan import plan


def planned(*arguments: str):
    return plan(read(["hardware=cpu", *arguments]))
