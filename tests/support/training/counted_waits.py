"""Two ranks that count the calls for which their host waits in each step; as a script, one rank of them.

On GPUs they also say whether the host had queued all of a step before the GPU began it.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from tests.support.training.tiny_run import tiny_config, tiny_module, tiny_trainer
from tests.support.training.two_ranks import RankData

COUNTED = ("barrier", "broadcast", "broadcast_object_list", "all_reduce", "all_gather_object")


class CountCalls(pl.Callback):
    """Counts synchronous calls of `torch.distributed`, from each micro-batch's start to the next one's."""

    def __init__(self) -> None:
        self.found: list[Counter[str]] = []
        self.ahead: list[bool] = []
        for name in COUNTED:
            setattr(dist, name, self.counting(name, getattr(dist, name)))

    def counting(self, name: str, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            if self.found and not options.get("async_op"):
                self.found[-1][name] += 1
            return function(*arguments, **options)

        return call

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.found.append(Counter())
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda._sleep(1_000_000_000)  # half a second
            self.begun = torch.cuda.Event()
            self.begun.record()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.strategy.root_device.type == "cuda":
            self.ahead.append(not self.begun.query())

    def on_train_end(self, *_: Any) -> None:
        self.found = self.found[:-1]  # the last one has the end of the run, too


def main() -> None:
    run_dir, strategy, accelerator = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    torch.set_num_threads(1)
    trainer = tiny_trainer(
        run_dir, max_steps=6, devices=2, accumulate=1, strategy=strategy, accelerator=accelerator, log_every=100
    )
    counts = CountCalls()
    trainer.callbacks.append(counts)
    trainer.fit(tiny_module(config=tiny_config()), datamodule=RankData())
    found = {"calls": counts.found, "ahead": counts.ahead[:-1]}
    (run_dir / f"calls-{trainer.global_rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
