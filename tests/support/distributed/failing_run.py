"""`flash-train` with a rank that fails: FAULT="RANK STEP KIND" says which rank, in which optimizer step, and how.

FAULT="1 3 kill" python -m tests.support.distributed.failing_run trainer.devices=2 ...

With the kind "validation" the rank gets SIGTERM in the second batch of the validation after that step, and every rank
adds a line to the file EVALUATED for each validation batch that it computes.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from flash_train.cli import train
from flash_train.data import cache
from flash_train.distributed import checkpoint
from flash_train.distributed.strategy import ShardedStrategy
from flash_train.model import Transformer
from flash_train.training import CausalLMModule


def fail(kind: str) -> None:
    Path(os.environ["FAULT_TIME"]).touch()
    match kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "term":
            os.kill(os.getpid(), signal.SIGTERM)
        case "hang":
            time.sleep(3600)
        case "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        case "exit":
            sys.exit(3)
        case "error":
            raise KeyError("a mistake in one rank's data")


def main() -> None:
    rank, step, kind = os.environ["FAULT"].split(maxsplit=2)
    if os.environ.get("LOCAL_RANK", "0") == rank:
        inject(int(step), kind)
    if file := os.environ.get("EVALUATED"):
        count_evaluated(Path(file))
    if file := os.environ.get("PREPARED"):
        count_preparations(Path(file))
    train.main()


def count_evaluated(file: Path) -> None:
    plain = CausalLMModule._evaluate

    def evaluate(self: CausalLMModule, batch: Any) -> None:
        with open(file, "a", encoding="utf-8") as lines:
            lines.write(f"{self.trainer.global_step}\n")
        plain(self, batch)

    CausalLMModule._evaluate = evaluate  # type: ignore[method-assign]


def count_preparations(file: Path) -> None:
    """Append a line to a file whenever this process prepares the corpus."""
    plain = cache.write_tokens

    def write_tokens(*arguments: Any, **options: Any) -> Any:
        with open(file, "a", encoding="utf-8") as lines:
            lines.write("prepared\n")
        return plain(*arguments, **options)

    cache.write_tokens = write_tokens


def inject(step: int, kind: str) -> None:
    """Make this rank fail in an optimizer step, or while it saves that step's checkpoint."""
    plain_step, plain_loss = CausalLMModule.training_step, Transformer.loss
    plain_setup = ShardedStrategy.setup_environment
    plain_write, plain_validation = checkpoint.FileSystemWriter.write_data, CausalLMModule.validation_step

    def validation_step(self: CausalLMModule, batch: Any, batch_idx: int) -> None:
        if kind == "validation" and self.trainer.global_step == step and batch_idx == 1:
            fail("term")
        plain_validation(self, batch, batch_idx)

    def training_step(self: CausalLMModule, batch: Any, batch_idx: int) -> Any:
        if kind != "validation" and self.trainer.global_step + 1 == step:
            fail(kind)
        self.model.is_broken = kind == "nan" and self.trainer.global_step + 1 == step
        return plain_step(self, batch, batch_idx)

    def setup_environment(self: ShardedStrategy) -> None:
        if kind == "early kill":
            time.sleep(3)
            fail("kill")
        plain_setup(self)

    def loss(self: Any, *arguments: Any, **options: Any) -> Any:
        total, count = plain_loss(self, *arguments, **options)
        return total * float("nan") if getattr(self, "is_broken", False) else total, count

    def write_data(self: Any, *arguments: Any) -> Any:
        if kind == "save" and f"step-{step:06}" in str(self.path):
            fail("kill")
        return plain_write(self, *arguments)

    ShardedStrategy.setup_environment = setup_environment  # type: ignore[method-assign]
    CausalLMModule.training_step = training_step  # type: ignore[method-assign]
    CausalLMModule.validation_step = validation_step  # type: ignore[method-assign]
    Transformer.loss = loss  # type: ignore[method-assign]
    checkpoint.FileSystemWriter.write_data = write_data  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
