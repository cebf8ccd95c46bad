"""`resume`: the checkpoint that it names, whether the run can go on from it, and what becomes of its schedule."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from flash_train.cli.config.errors import UsageError, blame
from flash_train.cli.config.paths import CHECKPOINTS, holds_checkpoint, require_no_run, run_dir_of, slurm_checkpoints
from flash_train.cli.config.saved_options import read_config
from flash_train.cli.run.slurm import last_checkpoint
from flash_train.records import read_column
from flash_train.training import CausalLMModule
from flash_train.training.callbacks.checkpoint import branch_and_step, checkpoints_by_step, read_checkpoint, step_of
from flash_train.training.callbacks.record import is_unfinished
from flash_train.training.module import PLANNED_STEPS

# What losses follow from, and neither the data nor the schedule say, nor is it refused
TOLD = (
    *("batch_size", "accumulate", "precision", "compile", "trainer.devices", "trainer.num_nodes"),
    *("attention.backend", "attention.dropout", "model.residual_dropout"),
    *("optimizer.warmup_steps", "optimizer.min_lr_ratio", "optimizer.gradient_clip"),
)
RESTORED = ("lr", "betas", "eps", "weight_decay")  # PyTorch keeps them in the optimizer's state, and loads them with it


def find_checkpoint(config: DictConfig, run_dir: Path) -> Path | None:
    """What `resume` points at; a directory whose run would be overwritten is refused."""
    checkpoint = resumed(config.resume, run_dir) if config.resume is not None else None
    if not config.validate_only and goes_on(checkpoint, run_dir):
        with blame(f"run_dir={run_dir}"):
            read_column(run_dir / "metrics.csv", "step")  # which the run continues: seconds later it would be too late
    elif not config.validate_only:
        ways = "resume=last to go on with it, or another folder"
        if not holds_checkpoint(run_dir):
            ways = "another folder, or this one emptied, as it has no checkpoint to go on from"
        require_no_run(run_dir, ways)
    return checkpoint


def goes_on(checkpoint: Path | None, run_dir: Path) -> bool:
    """Whether a run from this checkpoint goes on with the one in `run_dir`: not with one of another run directory."""
    if checkpoint is None:
        return False
    own = run_dir_of(checkpoint)
    return own is None or own.resolve() == run_dir.resolve()


def resumed(resume: str, run_dir: Path) -> Path:
    """The checkpoint that `resume` names."""
    if resume == "last":
        with blame(f"resume=last: run_dir={run_dir}"):
            return last_checkpoint(run_dir)
    path = Path(resume)
    if path.is_dir():
        raise UsageError(f"resume={path}: is a folder; for its newest checkpoint write run_dir={path} resume=last")
    if not path.is_file():
        raise UsageError(f"resume={path}: no such file; allowed: a checkpoint, or last with run_dir=FOLDER")
    return path


def read_own(path: Path, module: CausalLMModule) -> dict[str, Any]:
    """What is in a checkpoint; a file that isn't one, or is of another model, is refused."""
    with blame(f"resume={path}"):
        checkpoint = read_checkpoint(path)
        module.on_load_checkpoint(checkpoint)
    return checkpoint


def check_going_on(
    path: Path, checkpoint: dict[str, Any], module: CausalLMModule, max_steps: int, run_dir: Path
) -> None:
    """Refuse a checkpoint with which training can't go on to `max_steps`, or not with the optimizer that is asked for.

    One at `max_steps` is allowed where its own run was stopped before it had ended: after its last step a run
    validates and writes its record. A checkpoint that goes back in its own directory is refused: rows and checkpoints
    of later steps would be lost, or mixed up with the new ones. The one that `resume=last` takes is not.
    """
    step = checkpoint["global_step"]
    if step > max_steps or (step == max_steps and not ends_only(path, step, max_steps, run_dir)):
        raise UsageError(f"max_steps={max_steps}: {path} is at step {step}; allowed: more than that")
    saved, own = checkpoint["hyper_parameters"]["optimizer"], module.optimizer_config.to_dict()
    for name in RESTORED:
        if saved[name] != own[name]:
            raise UsageError(f"optimizer.{name}={own[name]}: {path} goes on with its own; allowed: {saved[name]}")
    there = (*slurm_checkpoints(run_dir), *checkpoints_by_step(run_dir / CHECKPOINTS))
    # A file that cannot be read has no step to lose.
    steps = {other: place[1] for other in there if (place := branch_and_step(other)) is not None}
    if max(steps.values(), default=0) > step and path.resolve() != last_checkpoint(run_dir).resolve():
        raise UsageError(
            f"resume={path}: {run_dir} has newer checkpoints, up to {max(steps, key=lambda other: steps[other]).name}; "
            "allowed: resume=last, or another run_dir"
        )


def ends_only(path: Path, step: int, max_steps: int, run_dir: Path) -> bool:
    """Whether all steps of the run in `run_dir` are done, and what comes after the last of them is not."""
    return step == max_steps and goes_on(path, run_dir) and is_unfinished(run_dir)


def bent_schedule(checkpoint: dict[str, Any], module: CausalLMModule, max_steps: int) -> str | None:
    """How the learning rate goes on under another `max_steps` than was planned; None where that is the same."""
    planned = checkpoint.get(PLANNED_STEPS)
    if planned in (None, max_steps):  # checkpoints of earlier versions don't say
        return None
    before = checkpoint["lr_schedulers"][0]["_last_lr"][0]
    after = module.optimizer_config.learning_rate(checkpoint["global_step"] + 1, max_steps)  # one step has the old rate
    return (
        f"max_steps={max_steps} bends it anew, as the run was planned for {planned}: "
        f"the learning rate goes from {before:.3g} to {after:.3g}"
    )


def other_settings(checkpoint: Path, config: DictConfig) -> str | None:
    """Which settings are not those of the run that the checkpoint is of; None where all are, or nobody knows."""
    folder = run_dir_of(checkpoint)
    file = folder / "config.yaml" if folder else None
    if file is None or not file.is_file():
        return None
    before = read_config(file)
    pairs = {key: (OmegaConf.select(before, key), OmegaConf.select(config, key)) for key in TOLD}
    differing = [f"{key} was {_word(old)} and is {_word(new)}" for key, (old, new) in pairs.items() if old != new]
    return ", ".join(differing) or None


def passed_over(newest: Path, step: int, run_dir: Path) -> str | None:
    """Which checkpoint of a later step `resume=last` does not take, and why; None where it takes the furthest.

    Args:
        newest: the checkpoint that it takes, at `step`.
    """
    further = [other for other in checkpoints_by_step(run_dir / CHECKPOINTS) if step_of(other) > step]
    if not further:
        return None
    furthest = further[-1]
    if branch_and_step(furthest) is None:
        return f"{furthest.name} cannot be read; {newest.name}, the newest one that is whole, is taken"
    return f"{newest.name} was written last and is taken; {furthest.name} is of an earlier branch, and stays"


def _word(value: Any) -> str:
    """As it is written on the command line."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
