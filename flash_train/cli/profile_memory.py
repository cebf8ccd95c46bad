"""`flash-train-memory`: where the memory of a training step goes, measured beside what its configuration predicts."""

import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from flash_train.cli.config.compose import compose_config
from flash_train.cli.config.environment import grow_segments, quieten_matplotlib, quieten_profiler
from flash_train.cli.config.errors import UsageError, one_line_errors
from flash_train.cli.config.overrides import CommandLine, read
from flash_train.cli.config.paths import require_no_run
from flash_train.cli.run.claim import claimed
from flash_train.cli.run.interrupt import going_on_later
from flash_train.cli.sweep.find_max_options import split

if TYPE_CHECKING:
    from lightning.pytorch import Callback, Trainer

    from flash_train.training.callbacks.memory_snapshot import RecordedStep

# The first step makes the optimizer's state, the second meets the gradients of the first; the last is recorded.
RECORDED = 3
DEFAULTS = {"max_steps": str(RECORDED), "trainer.progress_bar": "false", "trainer.checkpoints": "false"}
HELP = """Where the memory of a training step goes: weights, gradients, optimizer state, activations by kind, loss.

  python scripts/profile_memory.py seq_len=16384 model=1b3 memory=selective

takes the options of train.py (--help there lists them), runs three steps, records the last, and writes to run_dir:
  memory.json  memory.md  memory.html  memory.png    measured beside predicted; the page needs no network
  snapshot.pickle                                    on CUDA, for https://pytorch.org/memory_viz

  python scripts/profile_memory.py find_max=true model=1b3

looks for the longest row that trains here, for each find_max.memory=[none,selective,checkpoint] and
find_max.attention=[flash,standard], to 2 %, in at most 4 trials each, none longer than find_max.limit=1048576 (off CUDA
find_max.attention=[sdpa,standard] and find_max.limit=16384); where the limit ended the search, the answer says so.
Writes find_max.json, find_max.md and find_max.png. Started again with the same run_dir, trials that ended are not run
again. The exit status is 1 where nothing was found and some trials failed, 3 where nothing can run here, 4 where
nothing fitted.
"""


def main() -> None:
    arguments = sys.argv[1:]
    if {"--help", "-h"} & set(arguments):
        print(HELP)
        return
    grow_segments()
    quieten_profiler()
    quieten_matplotlib()
    with one_line_errors():
        line = read(arguments)
        refuse(line)
        if any(text.startswith("find_max") for text in line.overrides):
            search(line)
        else:
            profile_memory(compose(line))


def refuse(line: CommandLine) -> None:
    """What a training run takes and this does not."""
    if line.multirun or line.shows:
        raise UsageError(f"{line.flags[0]}: a profile takes no such flag; allowed: --help, --config-dir")
    if text := line.several():
        raise UsageError(f"{text}: several values, and one run is profiled; allowed: one, or a list in brackets")
    for key in ("resume", "validate_only", "stop_after"):
        if line.given(key):
            raise UsageError(f"{key}={line.given(key)}: a profile begins anew and runs to its end; leave it out")
    for key in ("trainer.devices", "trainer.num_nodes"):
        if line.given(key) not in (None, "1"):
            raise UsageError(f"{key}={line.given(key)}: the memory of one device is profiled; allowed: 1")


def search(line: CommandLine) -> None:
    """`find_max=true`: no step is recorded, but the longest row is looked for."""
    line, asked = split(line)
    if asked is None:
        profile_memory(compose(line))
        return
    from flash_train.cli.sweep.find_max import (  # and with it PyTorch, for which mistakes need not wait
        TRIAL_STEPS,
        find_max,
    )
    from flash_train.cli.train import prepare

    if line.given("run_dir") is None:
        line = line.with_override("run_dir", f"runs/find_max_{datetime.now():%Y-%m-%d_%H-%M-%S}")
    run_dir = Path(str(line.given("run_dir")))
    require_no_run(run_dir)
    line = line.with_override("max_steps", TRIAL_STEPS)
    line = read(prepare(line.arguments()))
    own = tuple(text for text in line.overrides if not text.startswith("run_dir="))  # a trial's is its own
    with going_on_later(run_dir):
        find_max(replace(line, overrides=own), asked, run_dir)


def compose(line: CommandLine) -> DictConfig:
    """The configuration of the run to record: that of `flash-train` with these arguments, and few steps."""
    from flash_train.cli.train import prepare

    now = f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
    for key, value in (DEFAULTS | {"run_dir": f"runs/memory_{now}"}).items():
        if line.given(key) is None:
            line = line.with_override(key, value)
    line = read(prepare(line.arguments()))
    config = compose_config(line.overrides, line.config_dir)
    if config.max_steps < RECORDED:
        raise UsageError(
            f"max_steps={config.max_steps}: must be {RECORDED} or more; the last step is recorded, and the first ones "
            "have neither optimizer state nor gradients of a step before"
        )
    return config


def profile_memory(config: DictConfig) -> None:
    """Run, record the last step, and write the report."""
    from flash_train.cli.run.build import build
    from flash_train.cli.run.failures import known_failures
    from flash_train.cli.run.memory_check import check_memory, step_before_run
    from flash_train.cli.run.memory_files import write_memory
    from flash_train.cli.run.report import announce, finish
    from flash_train.cli.train import quieten
    from flash_train.training.callbacks import MemorySnapshot

    quieten()
    run_dir = Path(config.run_dir)
    recorded: list[RecordedStep] = []
    with known_failures(config) as under_way:
        step, device = step_before_run(config)
        check_memory(config, step, device)
        parts = build(config, run_dir)
        announce(parts.attention, parts.data.info, parts.notes)
        only_measure(parts.trainer, MemorySnapshot(recorded.append, steps=(config.max_steps,)))
        under_way.begin(step, parts, run_dir)
        with claimed(run_dir):
            parts.trainer.fit(parts.module, datamodule=parts.data)
            if not recorded:
                raise UsageError(f"stopped before step {config.max_steps}, the one to record: nothing is written")
            write_memory(config, parts, recorded[-1], run_dir)
    finish(parts.logger)


def only_measure(trainer: "Trainer", callback: "Callback") -> None:
    """Nothing is validated, and there is no record of the run but what `callback` makes of it."""
    from flash_train.training.callbacks import ClosingSample, MissedValidation, RunRecord

    trainer.limit_val_batches = 0
    recording = (RunRecord, ClosingSample, MissedValidation)
    kept = [c for c in trainer.callbacks if not isinstance(c, recording)]  # type: ignore[attr-defined]
    trainer.callbacks = [*kept, callback]  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
