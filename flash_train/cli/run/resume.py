"""`resume`: finds the checkpoint, checks that training can continue from it, and notes what is different."""

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from omegaconf import DictConfig, OmegaConf
from torch.optim.lr_scheduler import LambdaLR

from flash_train.cli.config.errors import UsageError, blame
from flash_train.cli.config.parallel import parallel_plan
from flash_train.cli.config.paths import CHECKPOINTS, holds_checkpoint, require_no_run, run_dir_of, slurm_checkpoints
from flash_train.cli.config.saved_options import read_config
from flash_train.cli.launch.slurm import last_checkpoint
from flash_train.distributed.checkpoint import is_sharded_checkpoint
from flash_train.records import read_column
from flash_train.training import CausalLMModule
from flash_train.training.callbacks.checkpoint import branch_and_step, checkpoints_by_step, read_checkpoint, step_of
from flash_train.training.callbacks.record import is_unfinished
from flash_train.training.module import PLANNED_STEPS

# Settings that change the losses but are allowed to differ; the data and the schedule have notes of their own.
COMPARED_SETTINGS = (
    *("batch_size", "precision", "compile", "trainer.devices", "trainer.num_nodes"),
    *("parallel.mode", "parallel.shard", "parallel.context"),
    *("attention.backend", "attention.dropout", "model.residual_dropout"),
    *("optimizer.warmup_steps", "optimizer.min_lr_ratio", "optimizer.gradient_clip"),
    *("optimizer.master", "optimizer.moments"),
)
RESTORED = ("lr", "betas", "eps", "weight_decay")  # PyTorch saves and loads them with the optimizer's state


def find_checkpoint(config: DictConfig, run_dir: Path) -> Path | None:
    """The checkpoint that `resume` names, or None.

    Raises:
        UsageError: there is no such checkpoint, or the run would overwrite another one.
    """
    checkpoint = named_checkpoint(config.resume, run_dir) if config.resume is not None else None
    if config.validate_only:
        return checkpoint
    if not is_same_run(checkpoint, run_dir):
        ways = "resume=last to continue it, or another folder"
        if not holds_checkpoint(run_dir):
            ways = "another folder, or this one emptied, as it has no checkpoint to continue from"
        require_no_run(run_dir, ways)
    with blame(f"run_dir={run_dir}"):
        read_column(run_dir / "metrics.csv", "step")  # a damaged file should be found before anything slow
    return checkpoint


def named_checkpoint(resume: str, run_dir: Path) -> Path:
    """The checkpoint that `resume` names: a file, or the folder of a sharded checkpoint."""
    if resume == "last":
        with blame(f"resume=last: run_dir={run_dir}"):
            return last_checkpoint(run_dir)
    path = Path(resume)
    run = path.parent if path.name == CHECKPOINTS else path
    with blame(f"resume={path}"):  # its name may be too long, or its folder not searchable
        if path.is_file() or is_sharded_checkpoint(path):
            return path
        if path.is_dir() and holds_checkpoint(run):
            raise UsageError(f"resume={path}: is a folder; for its newest checkpoint write run_dir={run} resume=last")
        fault = "is a folder" if path.is_dir() else "no such file"
    raise UsageError(f"resume={path}: {fault}; allowed: a checkpoint, or resume=last with run_dir=FOLDER")


def is_same_run(checkpoint: Path | None, run_dir: Path) -> bool:
    """Whether a run from this checkpoint continues the run in `run_dir`, and not one in another directory."""
    if checkpoint is None:
        return False
    own = run_dir_of(checkpoint)
    return own is None or own.resolve() == run_dir.resolve()


def check_resume(checkpoint: Path, config: DictConfig, module: CausalLMModule, run_dir: Path) -> dict[str, str | None]:
    """Check that the run can continue from a checkpoint; return notes for the user, by topic.

    Raises:
        UsageError: the file is damaged, or does not fit this run's model, optimizer, steps or directory.
    """
    saved = read_own(checkpoint, module)
    if config.validate_only:
        return {}
    step, max_steps = saved["global_step"], config.max_steps
    check_step_and_optimizer(checkpoint, saved, module, max_steps, run_dir)
    notes: dict[str, str | None] = {}
    notes["checkpoint"] = skipped_checkpoint(checkpoint, step, run_dir) if config.resume == "last" else None
    if only_validation_left(checkpoint, step, max_steps, run_dir):
        notes["run"] = f"all {max_steps:,} steps are done; validation and record are completed"
    notes["resumed"] = changed_settings(checkpoint, config)
    notes["schedule"] = schedule_change(saved, module, max_steps)
    return notes


def read_own(path: Path, module: CausalLMModule) -> dict[str, Any]:
    """The content of a checkpoint; raises if the file is none, or holds another model."""
    with blame(f"resume={path}"):
        checkpoint = read_checkpoint(path, weights=False)
        module.on_load_checkpoint(checkpoint)
    return checkpoint


def check_step_and_optimizer(
    path: Path, checkpoint: dict[str, Any], module: CausalLMModule, max_steps: int, run_dir: Path
) -> None:
    """Raise if training cannot continue from a checkpoint up to `max_steps` with the optimizer of this run.

    A checkpoint at `max_steps` is allowed if its run stopped before its last validation and its record were complete;
    the resumed run only completes these. A checkpoint that is older than others in its directory is refused, unless
    `resume=last` takes it: rows and checkpoints of later steps would be lost, or mixed with new ones.
    """
    step = checkpoint["global_step"]
    if step > max_steps or (step == max_steps and not only_validation_left(path, step, max_steps, run_dir)):
        raise UsageError(f"resume={path}: is at step {step} and max_steps={max_steps}; allowed: max_steps above that")
    saved, own = checkpoint["hyper_parameters"]["optimizer"], module.optimizer_config.to_dict()
    for name in RESTORED:
        if saved[name] != own[name]:
            raise UsageError(f"optimizer.{name}={own[name]}: {path} restores its own; allowed: {saved[name]}")
    newer = newer_checkpoints(step, run_dir)
    if newer and path.resolve() != last_checkpoint(run_dir).resolve():
        raise UsageError(
            f"resume={path}: {run_dir} has newer checkpoints, up to {newer[-1].name}; "
            "allowed: resume=last, or another run_dir"
        )


def newer_checkpoints(step: int, run_dir: Path) -> list[Path]:
    """The checkpoints in a run directory at later steps, ordered by step; files that cannot be read are left out."""
    paths = (*slurm_checkpoints(run_dir), *checkpoints_by_step(run_dir / CHECKPOINTS))
    steps = {path: place[1] for path in paths if (place := branch_and_step(path)) is not None}
    return sorted((path for path in steps if steps[path] > step), key=lambda path: steps[path])


def only_validation_left(path: Path, step: int, max_steps: int, run_dir: Path) -> bool:
    """Whether the run in `run_dir` has taken all its steps, but has not ended."""
    return step == max_steps and is_same_run(path, run_dir) and is_unfinished(run_dir)


def schedule_change(checkpoint: dict[str, Any], module: CausalLMModule, max_steps: int) -> str | None:
    """How another `max_steps` than planned changes the learning rate; None if it is the same."""
    planned = checkpoint.get(PLANNED_STEPS)
    if planned in (None, max_steps):  # None: a checkpoint of an earlier version
        return None
    before = checkpoint["lr_schedulers"][0]["_last_lr"][0]
    after = module.optimizer_config.learning_rate(checkpoint["global_step"], max_steps)
    return (
        f"max_steps={max_steps} changes it, as the run was planned for {planned}: "
        f"the learning rate goes from {before:.3g} to {after:.3g}"
    )


class NewSchedule(Callback):
    """Gives the first step after a resume the learning rate of this run's schedule.

    The optimizer restores the rate that the earlier schedule had for this step, and PyTorch's scheduler sets a new one
    only after it.
    """

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        for scheduler in (config.scheduler for config in trainer.lr_scheduler_configs):
            assert isinstance(scheduler, LambdaLR)  # `warmup_cosine` makes no other
            groups = scheduler.optimizer.param_groups
            for group, base, factor in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
                group["lr"] = base * factor(scheduler.last_epoch)


def changed_settings(checkpoint: Path, config: DictConfig) -> str | None:
    """The settings that differ from the checkpoint's run; None if none does, or if its config.yaml is missing."""
    folder = run_dir_of(checkpoint)
    file = folder / "config.yaml" if folder else None
    if file is None or not file.is_file():
        return None
    before = read_config(file)
    pairs = {"rows in a step": (parallel_plan(before).global_batch, parallel_plan(config).global_batch)}
    pairs |= {key: (_setting(before, key), _setting(config, key)) for key in COMPARED_SETTINGS}
    differing = [
        f"{key} was {_as_given(old)} and is {_as_given(new)}" for key, (old, new) in pairs.items() if old != new
    ]
    return ", ".join(differing) or None


def skipped_checkpoint(taken: Path, step: int, run_dir: Path) -> str | None:
    """The checkpoint at a later step that `resume=last` does not take, and why; None if it takes the latest step.

    Args:
        taken: the checkpoint that it takes, at `step`.
    """
    later = [path for path in checkpoints_by_step(run_dir / CHECKPOINTS) if step_of(path) > step]
    if not later:
        return None
    latest = later[-1]
    if branch_and_step(latest) is None:
        return f"{latest.name} cannot be read; {taken.name}, the newest complete one, is taken"
    return f"{taken.name} was written last and is taken; {latest.name} is from an earlier branch, and stays"


def _setting(config: DictConfig, key: str) -> Any:
    """The value of a key, or the default where earlier versions lack it or have another."""
    value = OmegaConf.select(config, key)
    return "auto" if value is None and key == "parallel.mode" else value


def _as_given(value: Any) -> str:
    """A value as it is written on the command line."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
