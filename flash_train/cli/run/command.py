"""The `flash-train` command: prepare the arguments, compose a configuration for each run, and train."""

import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from flash_train.cli.config.choices import jobs
from flash_train.cli.config.compose import CONFIG_NAME
from flash_train.cli.config.environment import (
    WANDB_RUN_VARIABLES,
    is_first_process,
    prepare_environment,
    quieten_lightning,
)
from flash_train.cli.config.errors import UsageError, blame, one_line_errors
from flash_train.cli.config.help import help_text
from flash_train.cli.config.overrides import read
from flash_train.cli.config.paths import conf_dir
from flash_train.cli.config.schema import register_schema
from flash_train.cli.config.validate import validate
from flash_train.cli.launch.interrupt import Interrupted
from flash_train.cli.launch.multirun import Multirun, require_no_other_sweep, swept_values
from flash_train.cli.launch.run_dir import locked, make_run_dir
from flash_train.cli.run.prepare import prepare

if TYPE_CHECKING:
    from flash_train.cli.run.build import Run


def train_command() -> None:
    """Run `flash-train` with the arguments in `sys.argv`; a mistake is reported before anything slow is imported."""
    with one_line_errors():
        line = read(sys.argv[1:])
        if line.helps:
            print(help_text(line))
            return
        prepare_environment()
        register_schema()
        sys.argv[1:] = prepare(sys.argv[1:])  # Lightning starts the processes of other ranks with these
        line = read(sys.argv[1:])
        if line.multirun and is_first_process():
            require_no_other_sweep(line)
        make_run_dir(line)
        multirun = Multirun(tuple(swept_values(line, overrides) for overrides in jobs(line))) if line.multirun else None
        if multirun:
            for name in WANDB_RUN_VARIABLES:  # each run of a sweep is its own run of W&B
                os.environ.pop(name, None)

        def begin(config: DictConfig) -> None:
            run_job(config, multirun)

        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=CONFIG_NAME)(begin)()
        if multirun:
            multirun.end()


def run_job(config: DictConfig, multirun: Multirun | None = None) -> None:
    """Run one job of Hydra's, and exit with 128 + the signal's number if a signal stopped it before its end."""
    from flash_train.records.memory_use import free_memory  # imports PyTorch

    run_dir = run_dir_of_job(config)
    stopped_by: signal.Signals | None = None
    with one_line_errors(), multirun.next(run_dir) if multirun else nullcontext() as name:
        if name:
            print(name, flush=True)
        try:
            if multirun:
                validate(config)
            with nullcontext() if config.validate_only else locked(run_dir):
                stopped_by = train(config, run_dir)
        finally:
            discard_if_empty(run_dir)
        if multirun and stopped_by:
            raise Interrupted(stopped_by)
    free_memory()  # for the next run of `-m`
    if stopped_by and is_first_process():
        from flash_train.training.callbacks.record import is_unfinished

        if is_unfinished(run_dir):
            sys.exit(128 + stopped_by)


def train(config: DictConfig, run_dir: Path) -> signal.Signals | None:
    """Build and run what the configuration describes; return the signal that ended the run, or None.

    Raises:
        UsageError: the run failed for a known reason, or could not save its last checkpoint.
    """
    # PyTorch and Lightning take seconds to import: --help and most mistakes need not wait for them.
    from flash_train.cli.run.warm_up import warming_up

    with warming_up(config):
        from lightning.pytorch.utilities.exceptions import SIGTERMException

        from flash_train.cli.memory.parallel_choice import plan_run
        from flash_train.cli.run.build import build
        from flash_train.cli.run.failures import known_failures
        from flash_train.cli.run.kernel_files import profile_every
        from flash_train.cli.run.memory_files import record_every
        from flash_train.cli.run.parallel_check import check_parallel
        from flash_train.cli.run.report import announce, finish, report_files, unused_settings
        from flash_train.cli.run.resume import NewSchedule
        from flash_train.files import write_text

    quieten_lightning()
    stopped_by: signal.Signals | None = None
    with known_failures(config) as watched:
        step, plan = None, None
        if not config.validate_only:
            step, plan, _ = plan_run(config)
        run = build(config, run_dir, plan, step)
        announce(run.attention, run.data.info, run.notes | unused_settings(config))
        if config.validate_only:
            run.trainer.validate(run.module, datamodule=run.data, ckpt_path=run.checkpoint, verbose=False)
        else:
            assert step is not None  # `plan_run` made it
            if config.parallel.check and run.plan.dims.ranks > 1:
                check_parallel(config, step, run)
            if run.notes.get("schedule"):  # else the restored rate is right
                run.trainer.callbacks.append(NewSchedule())  # type: ignore[attr-defined]
            watched.begin(step, run, run_dir)
            if run.trainer.is_global_zero:
                with blame(f"run_dir={run_dir}"):
                    write_text(run_dir / "config.yaml", OmegaConf.to_yaml(config, resolve=True))
            if every := config.callbacks.memory_snapshot.every:
                record_every(every, config, run, run_dir)
            if every := config.callbacks.kernel_times.every:
                profile_every(every, config, run, run_dir)
            try:
                run.trainer.fit(run.module, datamodule=run.data, ckpt_path=run.checkpoint)
            except SystemExit as stop:
                if isinstance(stop.__context__, KeyboardInterrupt):  # so Lightning ends `fit` at Ctrl-C
                    raise KeyboardInterrupt from stop
                raise
            except SIGTERMException:  # Lightning's handler got the signal, not one of our callbacks
                stopped_by = signal.SIGTERM
    report_files(run.trainer, run.logger, run_dir)
    finish(run.logger)
    if (reason := unsaved_reason(run)) is not None:
        raise UsageError(reason)
    return stopped_by or received_signal(run)


def unsaved_reason(run: "Run") -> str | None:
    """Why the run's last checkpoint could not be saved; None if it was saved."""
    from flash_train.training.callbacks import StepCheckpoint
    from flash_train.training.callbacks.base import find_callback

    checkpoints = find_callback(run.trainer, StepCheckpoint)
    return checkpoints.unsaved if checkpoints else None


def received_signal(run: "Run") -> signal.Signals | None:
    """The signal that stopped the run, or None."""
    from flash_train.training.callbacks import SaveOnSignal
    from flash_train.training.callbacks.base import find_callback

    watch = find_callback(run.trainer, SaveOnSignal)
    if watch is None or watch.received is None:
        return None
    return signal.Signals.__members__.get(watch.received, signal.SIGTERM)  # another rank got it, and Ctrl-C goes to all


def run_dir_of_job(config: DictConfig) -> Path:
    """The directory that Hydra made for this job: `run_dir`, or with `-m` a folder in it."""
    hydra_config = HydraConfig.get()
    if hydra_config.mode == RunMode.MULTIRUN:
        config.run_dir = hydra_config.runtime.output_dir
    else:  # on other ranks, the timestamp in it is the first rank's
        config.run_dir = hydra_config.run.dir
    return Path(config.run_dir)


def discard_if_empty(run_dir: Path) -> None:
    """Remove the directory of a run that wrote nothing."""
    if run_dir.is_dir() and not any(run_dir.iterdir()):
        run_dir.rmdir()
