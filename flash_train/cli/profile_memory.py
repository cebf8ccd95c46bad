"""`flash-train-memory`: where the memory of a training step goes, measured and predicted."""

import os
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from omegaconf import DictConfig

from flash_train.cli.config.compose import compose_config
from flash_train.cli.config.environment import is_first_process, prepare_environment, quieten_lightning
from flash_train.cli.config.errors import UsageError, blame, one_line_errors
from flash_train.cli.config.overrides import CommandLine, read
from flash_train.cli.config.paths import require_no_run
from flash_train.cli.launch.interrupt import resumable
from flash_train.cli.launch.run_dir import locked
from flash_train.cli.run.prepare import prepare
from flash_train.cli.sweep.find_max_options import split

# The first step creates the optimizer's state, the second starts with the gradients of the first; the third is typical.
RECORDED = 3
DEFAULTS = {
    "max_steps": RECORDED,
    "trainer.progress_bar": False,
    "trainer.checkpoints": False,
    "trainer.cuda_graph": False,
}
HELP = """Where the memory of a training step goes: weights, gradients, optimizer state, activations by kind, loss.

  python scripts/profile_memory.py seq_len=16384 model=1b3 memory=selective

takes the options of train.py (its --help lists them), runs three steps, records the last, and writes to run_dir:
  memory.json  memory.md  memory.html  memory.png    measured and predicted memory; the page needs no network
  snapshot.pickle                                    on CUDA, for https://pytorch.org/memory_viz
With trainer.devices=2 or more it records the first device's part of the step.

  python scripts/profile_memory.py find_max=true model=1b3

finds the longest row that trains here, for each find_max.memory=[none,selective,checkpoint] and
find_max.attention=[flash,standard], to 2 %, in at most 4 trials each. No row is longer than find_max.limit=1048576;
without CUDA the defaults are find_max.attention=[sdpa,standard] and find_max.limit=16384. The answer says if the limit
ended the search. Writes find_max.json, find_max.md and find_max.png. A second start with the same run_dir repeats
only trials that failed. The exit status is 1 if nothing was found and some trials failed, 3 if nothing can run here, 4
if nothing fitted.

Documentation: docs/memory.md
"""


def main() -> None:
    arguments = sys.argv[1:]
    if {"--help", "-h"} & set(arguments):
        print(HELP)
        return
    prepare_environment()
    with one_line_errors():
        line = read(arguments)
        refuse(line)
        if any(text.startswith("find_max") for text in line.overrides):
            search(line)
        else:
            profile_memory(compose(line))


def refuse(line: CommandLine) -> None:
    """Raise for flags and keys that a training run takes and a profile does not."""
    if line.multirun or line.shows:
        raise UsageError(f"{line.flags[0]}: a profile takes no such flag; allowed: --help, --config-dir")
    if text := line.several():
        raise UsageError(f"{text}: several values, and one run is profiled; allowed: one, or a list in brackets")
    for key in ("resume", "validate_only", "stop_after"):
        if line.given(key):
            raise UsageError(f"{key}={line.given(key)}: a profile is a new run up to its end; leave it out")


def search(line: CommandLine) -> None:
    """`find_max=true`: search for the longest row instead of recording a step."""
    line, request = split(line)
    if request is None:
        profile_memory(compose(line))
        return
    if "LOCAL_RANK" in os.environ:
        raise UsageError("find_max=true starts the devices of this machine itself: leave out torchrun")
    if (nodes := line.given("trainer.num_nodes")) not in (None, "1"):
        raise UsageError(f"trainer.num_nodes={nodes}: find_max=true searches on this machine alone; allowed: 1")
    from flash_train.cli.sweep.find_max import TRIAL_STEPS, find_max  # imports PyTorch, which takes seconds

    if line.given("run_dir") is None:
        line = line.with_override("run_dir", f"runs/find_max_{datetime.now():%Y-%m-%d_%H-%M-%S}")
    run_dir = Path(str(line.given("run_dir")))
    require_no_run(run_dir)
    line = line.with_override("max_steps", TRIAL_STEPS)
    line = read(prepare(line.arguments()))
    own = tuple(text for text in line.overrides if not text.startswith("run_dir="))  # each trial has its own
    with resumable(run_dir):
        find_max(replace(line, overrides=own), request, run_dir)


def compose(line: CommandLine) -> DictConfig:
    """The configuration of the run to record: the one of `flash-train` with these arguments, and few steps."""
    now = f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
    for key, value in (DEFAULTS | {"run_dir": f"runs/memory_{now}"}).items():
        if line.given(key) is None:
            line = line.with_override(key, value)
    sys.argv[1:] = prepare(line.arguments())  # Lightning starts the processes of other ranks with these
    line = read(sys.argv[1:])
    config = compose_config(line.overrides, line.config_dir)
    if config.max_steps < RECORDED:
        raise UsageError(
            f"max_steps={config.max_steps}: must be {RECORDED} or more; the last step is recorded, and the first two "
            "lack optimizer state or earlier gradients"
        )
    if is_first_process():  # it has begun the run when other ranks look
        require_no_run(Path(config.run_dir))
    return config


def profile_memory(config: DictConfig) -> None:
    """Run, record the last step on the first rank, and write the report."""
    from flash_train.cli.memory.parallel_choice import plan_run
    from flash_train.cli.run.build import build
    from flash_train.cli.run.failures import known_failures
    from flash_train.cli.run.memory_files import only_measure, write_memory
    from flash_train.cli.run.report import announce, finish, unused_settings
    from flash_train.training.callbacks import MemorySnapshot, RecordedStep

    quieten_lightning()
    run_dir = Path(config.run_dir)
    recorded: list[RecordedStep] = []
    with locked(run_dir), known_failures(config) as watched:
        step, plan, _ = plan_run(config)
        run = build(config, run_dir, plan, step)
        notes = run.notes | unused_settings(config) | {"validation": None}  # there is none
        announce(run.attention, run.data.info, notes)
        only_measure(run.trainer, MemorySnapshot(recorded.append, steps=(config.max_steps,)))
        watched.begin(step, run, run_dir)
        run.trainer.fit(run.module, datamodule=run.data)
        if not recorded and run.trainer.is_global_zero:
            raise UsageError(f"stopped before step {config.max_steps}, the one to record: nothing is written")
        if recorded:
            with blame(f"run_dir={run_dir}"):
                write_memory(config, run, recorded[-1], run_dir)
    finish(run.logger)


if __name__ == "__main__":
    main()
