"""`flash-train`: compose → build → run."""

import gc
import logging
import os
import re
import signal
import sys
import warnings
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from flash_train.cli.config import hardware
from flash_train.cli.config.choices import dotted_names, jobs
from flash_train.cli.config.compose import CONFIG_NAME, compose_config
from flash_train.cli.config.environment import grow_segments, quieten_matplotlib, quieten_profiler
from flash_train.cli.config.errors import UnavailableError, UsageError, blame, one_line_errors
from flash_train.cli.config.overrides import CommandLine, read
from flash_train.cli.config.paths import conf_dir, require_no_run, require_usable, run_dir_of
from flash_train.cli.config.saved_options import describe_options, with_saved_options
from flash_train.cli.config.schema import register_schema
from flash_train.cli.config.validate import require_files, validate
from flash_train.cli.run.claim import claimed, is_first_process, new_folder
from flash_train.cli.run.interrupt import Interrupted
from flash_train.cli.run.multirun import Multirun, swept
from flash_train.cli.run.slurm import check_tasks, requeued
from flash_train.cli.sweep.trial import OF_ONE_WANDB_RUN

if TYPE_CHECKING:
    from flash_train.cli.run.build import Run


def main() -> None:
    """The console script. Mistakes end here, in one line, before anything is imported that takes long."""
    with one_line_errors():
        grow_segments()
        quieten_profiler()
        quieten_matplotlib()
        register_schema()
        sys.argv[1:] = prepare(sys.argv[1:])
        line = read(sys.argv[1:])
        multirun = Multirun(tuple(swept(line, overrides) for overrides in jobs(line))) if line.multirun else None
        if multirun:
            for name in OF_ONE_WANDB_RUN:  # as in an ablation, each run is a run of W&B
                os.environ.pop(name, None)

        def begin(config: DictConfig) -> None:
            run(config, multirun)

        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=CONFIG_NAME)(begin)()
        if multirun:
            multirun.end()


def prepare(arguments: list[str]) -> list[str]:
    """The arguments for Hydra: checked, paths quoted, `hardware=auto` and the directory of a resumed run filled in."""
    line = read(arguments)
    if not line.composes:
        if line.helps:
            compose_config(line.overrides, line.config_dir)
        return line.arguments()
    line, file = with_saved_options(with_run_dir(requeued(line, os.environ)))
    line = with_pretrained_shape(line)
    configs = check(line)
    if not line.shows and is_first_process() and (said := describe_options(line, file)):
        print(said, flush=True)
    if line.given("hardware") in (None, "auto"):
        choice, reason = hardware.choose(hardware.detect())
        line = line.with_override("hardware", choice)
        configs = check(line)
        if not line.shows:
            chosen = "; ".join(dict.fromkeys(f"{c.model.name}, {c.precision}, {c.max_steps} steps" for c in configs))
            print(f"hardware: {choice} ({reason}): {chosen}", flush=True)
    return with_new_run_dir(line, Path(configs[0].run_dir)).arguments()


def check(line: CommandLine) -> list[DictConfig]:
    """Compose and check every run that the arguments ask for."""
    if not line.multirun and (text := line.several()):
        raise UsageError(f"{text}: several values; allowed: one, or -m for a run with each, as in -m {text}")
    configs = [compose_config(overrides, line.config_dir) for overrides in jobs(line)]
    for number, config in enumerate(configs):
        with suppress(UnavailableError) if line.multirun else nullcontext():  # the run itself says so, in its turn
            validate(config)
        require_part(config, line.package)
        if line.shows:
            continue
        require_files(config)
        check_tasks(config, os.environ)
        require_usable("run_dir", Path(config.run_dir))
        if line.multirun and config.resume is None and not config.validate_only:
            require_no_run(Path(config.run_dir) / str(number), "another run_dir, as every run of a sweep begins anew")
    return configs


def require_part(config: DictConfig, package: str | None) -> None:
    """Refuse to show a part of the configuration that does not exist."""
    if package not in (None, "_global_", *dotted_names(cast(dict[Any, Any], OmegaConf.to_container(config)))):
        raise UsageError(f"--package (-p) {package}: no such part; allowed: _global_, {', '.join(map(str, config))}")


def with_pretrained_shape(line: CommandLine) -> CommandLine:
    """`init_from` brings the model's shape with it, unless another was chosen."""
    if line.given("init_from") and not line.given("model") and not line.given("experiment"):
        return line.with_override("model", "pretrained")
    return line


def with_run_dir(line: CommandLine) -> CommandLine:
    """A run that resumes from a checkpoint goes on in that checkpoint's directory, unless another is given."""
    resume = line.given("resume")
    if resume is None or line.given("run_dir"):
        return line
    if resume == "last":
        raise UsageError("resume=last: which run? give its directory too: run_dir=runs/… resume=last")
    run_dir = run_dir_of(Path(resume))
    return line.with_override("run_dir", str(run_dir)) if run_dir else line


def with_new_run_dir(line: CommandLine, run_dir: Path) -> CommandLine:
    """A folder that is named by the time is this run's alone, whatever else starts in the same second."""
    named_by_time = re.search(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d$", run_dir.name)
    if line.shows or line.given("run_dir") or not named_by_time or not is_first_process():
        return line
    with blame(f"run_dir={run_dir}"):
        return line.with_override("run_dir", str(new_folder(run_dir)))


def run(config: DictConfig, multirun: Multirun | None = None) -> None:
    """One run, in a process that Hydra has prepared."""
    run_dir = run_dir_of_job(config)
    stopped_by: signal.Signals | None = None
    with one_line_errors(), multirun.next(run_dir) if multirun else nullcontext() as name:
        if name:
            print(name, flush=True)
        try:
            if multirun:
                validate(config)
            with nullcontext() if config.validate_only else claimed(run_dir):
                stopped_by = train(config, run_dir)
        finally:
            discard_if_empty(run_dir)
        if multirun and stopped_by:
            raise Interrupted(stopped_by)
    release()
    if stopped_by and is_first_process() and is_unfinished(run_dir):
        sys.exit(128 + stopped_by)


def is_unfinished(run_dir: Path) -> bool:
    """Whether the run's record says that steps, or its last validation, are still to be done."""
    from flash_train.training.callbacks.record import is_unfinished

    return is_unfinished(run_dir)


def train(config: DictConfig, run_dir: Path) -> signal.Signals | None:
    """Build what the configuration says, run it, and say where everything lies; returns the signal that ended it."""
    # PyTorch and Lightning take seconds to import: --help and most mistakes need not wait for them.
    from flash_train.cli.run.warm_up import rehearsed

    with rehearsed(config):
        from lightning.pytorch.utilities.exceptions import SIGTERMException

        from flash_train.cli.run.build import build
        from flash_train.cli.run.failures import known_failures
        from flash_train.cli.run.memory_check import check_memory, step_before_run
        from flash_train.cli.run.report import announce, finish, say_where
        from flash_train.files import write_text

    quieten()
    stopped_by: signal.Signals | None = None
    with known_failures(config) as under_way:
        if not config.validate_only:
            step, device = step_before_run(config)
            check_memory(config, step, device)
        parts = build(config, run_dir)
        announce(parts.attention, parts.data.info, parts.notes)
        if config.validate_only:
            parts.trainer.validate(parts.module, datamodule=parts.data, ckpt_path=parts.checkpoint, verbose=False)
        else:
            under_way.begin(step, parts, run_dir)
            if parts.trainer.is_global_zero:
                with blame(f"run_dir={run_dir}"):
                    write_text(run_dir / "config.yaml", OmegaConf.to_yaml(config, resolve=True))
            if every := config.callbacks.memory_snapshot.every:
                record_memory(config, parts, run_dir, every)
            try:
                parts.trainer.fit(parts.module, datamodule=parts.data, ckpt_path=parts.checkpoint)
            except SystemExit as stop:
                if isinstance(stop.__context__, KeyboardInterrupt):  # Lightning's way to end on Ctrl-C at once
                    raise KeyboardInterrupt from stop
                raise
            except SIGTERMException:  # Lightning's, where none of our callbacks heard it
                stopped_by = signal.SIGTERM
    say_where(parts.trainer, parts.logger, run_dir)
    finish(parts.logger)
    if (unsaved := unsaved_by(parts)) is not None:
        raise UsageError(unsaved)
    return stopped_by or signal_of(parts)


def unsaved_by(parts: "Run") -> str | None:
    """Why the run's last checkpoint is not there; None where it is."""
    from flash_train.training.callbacks import StepCheckpoint
    from flash_train.training.callbacks.base import find_callback

    checkpoints = find_callback(parts.trainer, StepCheckpoint)
    return checkpoints.unsaved if checkpoints else None


def signal_of(parts: "Run") -> signal.Signals | None:
    """The signal that told a run to stop."""
    from flash_train.training.callbacks import SaveOnSignal
    from flash_train.training.callbacks.base import find_callback

    watch = find_callback(parts.trainer, SaveOnSignal)
    if watch is None or watch.received is None:
        return None
    return signal.Signals.__members__.get(watch.received, signal.SIGTERM)  # another rank's: Ctrl-C reaches them all


def record_memory(config: DictConfig, parts: "Run", run_dir: Path, every: int) -> None:
    """Have every so many steps recorded, each with a folder of its own."""
    from flash_train.cli.run.memory_files import write_memory
    from flash_train.training.callbacks import MemorySnapshot, RecordedStep

    def write(recorded: RecordedStep) -> None:
        write_memory(config, parts, recorded, run_dir / "memory" / f"step-{recorded.step:06}")

    parts.trainer.callbacks.append(MemorySnapshot(write, every=every))  # type: ignore[attr-defined]


def run_dir_of_job(config: DictConfig) -> Path:
    """The directory that Hydra made for this run: `run_dir`, or with `-m` one below it."""
    hydra_config = HydraConfig.get()
    if hydra_config.mode == RunMode.MULTIRUN:
        config.run_dir = hydra_config.runtime.output_dir
    else:  # the timestamp in it may be that of the process that launched this one
        config.run_dir = hydra_config.run.dir
    return Path(config.run_dir)


def discard_if_empty(run_dir: Path) -> None:
    """Leave nothing behind of a run that never began."""
    if run_dir.is_dir() and not any(run_dir.iterdir()):
        run_dir.rmdir()


def release() -> None:
    """Free the memory of a run that has ended, for the next one of `-m`: trainer, module and optimizer refer to one
    another, and nothing but the collector frees them.
    """
    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def quieten() -> None:
    """Leave out Lightning's remarks on the machine and its tips; its warnings stay."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # Of Lightning's own code under newer versions of PyTorch.
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\).*")
    # `logger=none` is a choice, and `validate_only` never has a logger: its numbers are in validation.json.
    warnings.filterwarnings("ignore", message=r"You called `self.log\(.*no logger configured")


if __name__ == "__main__":
    main()
