"""The arguments of `flash-train`: checked, completed, and ready for Hydra, before anything slow is imported."""

import os
import re
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from flash_train.cli.config import hardware
from flash_train.cli.config.choices import dotted_names, jobs
from flash_train.cli.config.compose import compose_config
from flash_train.cli.config.environment import is_first_process
from flash_train.cli.config.errors import UnavailableError, UsageError, blame
from flash_train.cli.config.overrides import CommandLine, read
from flash_train.cli.config.paths import require_no_run, require_usable, run_dir_of
from flash_train.cli.config.saved_options import describe_options, with_saved_options
from flash_train.cli.config.validate import require_files, validate
from flash_train.cli.launch.run_dir import new_folder
from flash_train.cli.launch.slurm import check_tasks, with_requeued_run
from flash_train.cli.launch.torchrun import with_started_processes
from flash_train.output import counted

TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d$")


def prepare(arguments: list[str]) -> list[str]:
    """The arguments for Hydra: paths are quoted, `hardware=auto` and the directory of a resumed run are filled in.

    Raises:
        UsageError: one line that names the argument at fault.
    """
    line = read(arguments)
    if not line.composes:
        return line.arguments()
    line = with_started_processes(with_requeued_run(line, os.environ), os.environ)
    line, file = with_saved_options(with_run_dir(line))
    line = with_pretrained_shape(line)
    configs = check(line)
    if not line.shows and is_first_process() and (note := describe_options(line, file)):
        print(note, flush=True)
    if line.given("hardware") in (None, "auto"):
        choice, reason = hardware.choose(hardware.detect())
        line = line.with_override("hardware", choice)
        configs = check(line)
        if not line.shows and is_first_process():
            choices = (f"{c.model.name}, {c.precision}, {counted(c.max_steps, 'step')}" for c in configs)
            chosen = "; ".join(dict.fromkeys(choices))
            print(f"hardware: {choice} ({reason}): {chosen}", flush=True)
    return with_new_run_dir(line, Path(configs[0].run_dir)).arguments()


def check(line: CommandLine) -> list[DictConfig]:
    """Compose and check the configuration of every run that the command line asks for."""
    if not line.multirun and (text := line.several()):
        raise UsageError(f"{text}: several values; allowed: one, or -m for a run with each, as in -m {text}")
    configs = [compose_config(overrides, line.config_dir) for overrides in jobs(line)]
    for number, config in enumerate(configs):
        with suppress(UnavailableError) if line.multirun else nullcontext():  # the run reports it when its turn comes
            validate(config)
        require_part(config, line.package)
        if line.shows:
            continue
        require_files(config)
        check_tasks(config, os.environ)
        require_usable("run_dir", Path(config.run_dir))
        if line.multirun and config.resume is None and not config.validate_only:
            require_no_run(Path(config.run_dir) / str(number), "another run_dir, as every run of a sweep is a new one")
    return configs


def require_part(config: DictConfig, package: str | None) -> None:
    """Raise if `--package` names a part that the configuration does not have."""
    if package not in (None, "_global_", *dotted_names(cast(dict[Any, Any], OmegaConf.to_container(config)))):
        raise UsageError(f"--package (-p) {package}: no such part; allowed: _global_, {', '.join(map(str, config))}")


def with_pretrained_shape(line: CommandLine) -> CommandLine:
    """Add `model=pretrained` if the command line gives `init_from` and chooses no model."""
    if line.given("init_from") and not line.given("model") and not line.given("experiment"):
        return line.with_override("model", "pretrained")
    return line


def with_run_dir(line: CommandLine) -> CommandLine:
    """Add the run directory of the checkpoint that `resume` names, unless the command line gives another."""
    resume = line.given("resume")
    if resume is None or line.given("run_dir"):
        return line
    if resume == "last":
        raise UsageError("resume=last: which run? give its directory too: run_dir=runs/… resume=last")
    run_dir = run_dir_of(Path(resume))
    return line.with_override("run_dir", str(run_dir)) if run_dir else line


def with_new_run_dir(line: CommandLine, run_dir: Path) -> CommandLine:
    """Create a run directory that is named by the time, so that no run that starts in the same second shares it."""
    if line.shows or line.given("run_dir") or not TIMESTAMP.search(run_dir.name) or not is_first_process():
        return line
    with blame(f"run_dir={run_dir}"):
        return line.with_override("run_dir", str(new_folder(run_dir)))
