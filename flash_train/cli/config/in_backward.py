"""Whether a run can update weights within the backward (see `flash_train.optim.step_in_backward`)."""

from omegaconf import DictConfig

from flash_train.cli.config.errors import UsageError
from flash_train.cli.config.parallel import parallel_plan


def obstacle_to_step_in_backward(config: DictConfig) -> tuple[str, str] | None:
    """The setting that prevents a step within the backward, and what is allowed instead; None if there is none."""
    if config.optimizer.gradient_clip:
        clip = f"optimizer.gradient_clip={config.optimizer.gradient_clip} needs the norm of all gradients first"
        return clip, "optimizer.gradient_clip=null"
    if (accumulate := parallel_plan(config).accumulate) > 1:
        return f"a step has {accumulate} micro-batches, whose gradients are summed", "accumulate=1"
    if (devices := config.trainer.devices * config.trainer.num_nodes) > 1:
        return f"{devices} devices exchange their gradients", "trainer.devices=1 trainer.num_nodes=1"
    if config.precision == "fp16-mixed":
        overflow = "precision=fp16-mixed looks for overflows in all gradients first"
        return overflow, "precision=bf16-mixed, bf16-true or fp32"
    return None


def check_step_in_backward(config: DictConfig) -> None:
    """Check `optimizer.in_backward=true`.

    Raises:
        UsageError: one line with the setting that prevents it.
    """
    if config.optimizer.in_backward and (obstacle := obstacle_to_step_in_backward(config)):
        raise UsageError(f"optimizer.in_backward=true: {obstacle[0]}; allowed: {obstacle[1]}")
