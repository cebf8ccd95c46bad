"""SLURM: its tasks must be the run's devices, and a job that it queued once more resumes."""

from collections.abc import Mapping
from pathlib import Path

from omegaconf import DictConfig

from flash_train.cli.errors import UsageError
from flash_train.cli.overrides import CommandLine
from flash_train.cli.paths import holds_checkpoint, slurm_checkpoints

INTERACTIVE = ("bash", "interactive")  # names of jobs whose commands Lightning does not take for SLURM's tasks


def check_tasks(config: DictConfig, environ: Mapping[str, str]) -> None:
    """Refuse devices and nodes that are not those of SLURM's tasks, as each task is one device's process."""
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


def requeued(line: CommandLine, environ: Mapping[str, str]) -> CommandLine:
    """With `resume=last` where SLURM starts the job again, by the same command, and its `run_dir` has a checkpoint."""
    run_dir = line.given("run_dir")
    if line.multirun or line.given("resume") or run_dir is None or line.given("validate_only") in ("True", "true"):
        return line
    if int(environ.get("SLURM_RESTART_COUNT", "0")) == 0 or not holds_checkpoint(Path(run_dir)):
        return line
    if environ.get("SLURM_PROCID", "0") == "0" and not line.shows:
        print(f"checkpoint: SLURM queued this job once more, so it resumes: run_dir={run_dir} resume=last", flush=True)
    return line.with_override("resume", "last")


def furthest(run_dir: Path, newest: Path | None) -> Path | None:
    """`newest`, or the checkpoint of Lightning's SLURM handler in `run_dir` where that one has more steps.

    Args:
        newest: the checkpoint that the run itself wrote last; None where there is none.
    """
    from flash_train.training.callbacks.checkpoint import read_checkpoint, step_of

    found = {path: read_checkpoint(path)["global_step"] for path in slurm_checkpoints(run_dir)}
    best = max(found, key=lambda path: found[path], default=None)
    if best is None or (newest is not None and step_of(newest) >= found[best]):
        return newest
    return best
