"""SLURM: a run needs as many tasks as devices, and a job that SLURM queued again resumes."""

from collections.abc import Mapping
from pathlib import Path

from omegaconf import DictConfig

from flash_train.cli.config.errors import UsageError
from flash_train.cli.config.overrides import CommandLine
from flash_train.cli.config.paths import CHECKPOINTS, holds_checkpoint, run_dir_of, slurm_checkpoints

INTERACTIVE = ("bash", "interactive")  # names of jobs that Lightning does not treat as SLURM tasks


def check_tasks(config: DictConfig, environ: Mapping[str, str]) -> None:
    """Raise if devices and nodes differ from SLURM's tasks: each task is the process of one device."""
    names = environ.get("SLURM_JOB_NAME"), environ.get("TORCHELASTIC_RUN_ID")
    if "SLURM_NTASKS" not in environ or names[0] in INTERACTIVE or names[1] is not None:
        return
    settings = config.trainer
    tasks, per_node = environ["SLURM_NTASKS"], environ.get("SLURM_NTASKS_PER_NODE")
    if per_node is None:
        if int(tasks) > 1:
            raise UsageError(
                f"trainer.devices={settings.devices}: SLURM was given --ntasks={tasks}, which does not say how many "
                "tasks a node has; allowed: --ntasks-per-node=N, with trainer.devices=N"
            )
        per_node = "1"
    nodes = environ.get("SLURM_NNODES", str(settings.num_nodes))
    if (settings.devices, settings.num_nodes) != (int(per_node), int(nodes)):
        raise UsageError(
            f"trainer.devices={settings.devices} trainer.num_nodes={settings.num_nodes}: SLURM starts {per_node} "
            f"task(s) on each of {nodes} node(s); allowed: trainer.devices={per_node} trainer.num_nodes={nodes}, or "
            "other --ntasks-per-node and --nodes"
        )


def with_requeued_run(line: CommandLine, environ: Mapping[str, str]) -> CommandLine:
    """Add `resume=last` if SLURM starts this job again and its run has a checkpoint.

    SLURM repeats the same command. The run directory is the one that the command names, or the one that contains the
    checkpoint in `resume`. The job began with that checkpoint the first time; now the run has newer ones.
    """
    run_dir, resume = _folder_of(line), line.given("resume")
    if line.multirun or resume == "last" or run_dir is None or line.given("validate_only") in ("True", "true"):
        return line
    if int(environ.get("SLURM_RESTART_COUNT", "0")) == 0 or not holds_checkpoint(run_dir):
        return line
    if environ.get("SLURM_PROCID", "0") == "0" and not line.shows:
        print(f"checkpoint: SLURM queued this job again, so it resumes: run_dir={run_dir} resume=last", flush=True)
    if not line.given("run_dir"):
        line = line.with_override("run_dir", str(run_dir))
    return line.with_override("resume", "last")


def _folder_of(line: CommandLine) -> Path | None:
    """The run directory that the command line gives, as `run_dir` or by a checkpoint in it."""
    run_dir, resume = line.given("run_dir"), line.given("resume")
    if run_dir is not None:
        return Path(run_dir)
    return run_dir_of(Path(resume)) if resume is not None else None


def last_checkpoint(run_dir: Path) -> Path:
    """The checkpoint that `resume=last` continues from: in the newest branch, the one at the latest step.

    It is one of the run's own checkpoints or a file of Lightning's SLURM handler. Unreadable files are skipped.

    Raises:
        FileNotFoundError: the run has no checkpoint.
        ValueError: none of its checkpoints can be read.
    """
    from flash_train.training.callbacks.checkpoint import branch_and_step, newest_checkpoint

    places = {path: place for path in slurm_checkpoints(run_dir) if (place := branch_and_step(path)) is not None}
    best = max(places, key=lambda path: places[path], default=None)
    try:
        own = newest_checkpoint(run_dir / CHECKPOINTS)
    except (FileNotFoundError, ValueError):
        if best is None:
            raise
        return best
    place = branch_and_step(own)
    return own if best is None or (place is not None and place >= places[best]) else best
