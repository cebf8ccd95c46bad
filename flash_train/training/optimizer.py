"""AdamW, its learning-rate schedule (warm-up, then cosine), and the rescaling and clipping of gradients."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flash_train.checks import above, at_least, check, check_name, within
from flash_train.distributed.same_weights import check_same_weights
from flash_train.distributed.sharding import local, shard_group
from flash_train.optim import MASTERS, MOMENTS, AdamW, without_codes
from flash_train.optim.adamw import has_kernel

FUSED_DEVICES = ("cuda", "cpu")


@dataclass(frozen=True)
class OptimizerConfig:
    """Settings of AdamW and of its learning-rate schedule.

    `conf/optimizer/adamw.yaml` has the same defaults (a test compares them), except where it lets the run choose: `lr`,
    `warmup_steps` and `in_backward`.

    Args:
        lr: peak learning rate, reached after `warmup_steps`.
        min_lr_ratio: the cosine ends at `min_lr_ratio * lr`.
        betas, eps, weight_decay: as in `torch.optim.AdamW`; norms, biases and embeddings are never decayed.
        warmup_steps: optimizer steps of linear warm-up.
        gradient_clip: largest norm of the gradient of the token-mean loss; None or 0 does not clip.
        master, moments: how bf16 weights and the moments are stored, as in `flash_train.optim.AdamW`; None: exact, and
            moments in the dtype of the weights.
        offload: keep the optimizer's state in the host's memory.
        in_backward: update each weight within the backward, and free its gradient at once (see
            `flash_train.optim.step_in_backward`). It needs one micro-batch per step, one device, and no clipping.

    Raises:
        ValueError: a setting is out of range, or `in_backward` with clipping.
    """

    lr: float = 3e-4
    min_lr_ratio: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    warmup_steps: int = 100
    gradient_clip: float | None = 1.0
    master: str | None = None
    moments: str | None = None
    offload: bool = False
    in_backward: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        check("optimizer.lr", self.lr, above(0))
        check("optimizer.min_lr_ratio", self.min_lr_ratio, within(0, 1))
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas={self.betas}: must be two numbers in [0, 1)")
        check("optimizer.eps", self.eps, above(0))
        check("optimizer.weight_decay", self.weight_decay, at_least(0))
        check("optimizer.warmup_steps", self.warmup_steps, at_least(0))
        check("optimizer.gradient_clip", self.gradient_clip, at_least(0), or_none="or null for no clipping")
        for name, value, choices in (("master", self.master, MASTERS), ("moments", self.moments, MOMENTS)):
            if value is not None:
                check_name(f"optimizer.{name}", value, choices)
        if self.in_backward and self.gradient_clip:
            raise ValueError(
                f"optimizer.in_backward=true: weights change before the norm of all gradients is known, so "
                f"optimizer.gradient_clip={self.gradient_clip} cannot clip; allowed: optimizer.gradient_clip=null"
            )

    def learning_rate(self, step: int, max_steps: int) -> float:
        """Return the learning rate at `step` (from 0) in a schedule of `max_steps`."""
        return self.lr * learning_rate_factor(
            step, warmup_steps=self.warmup_steps, max_steps=max_steps, min_lr_ratio=self.min_lr_ratio
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as a checkpoint stores them."""
        return {**asdict(self), "betas": list(self.betas)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "OptimizerConfig":
        """Read settings by their names. Raises ValueError for an unknown name."""
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"optimizer has no setting {', '.join(unknown)}; it has {', '.join(sorted(known))}")
        return cls(**values)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return two groups: matrices, which decay; norms, biases and embeddings (also a tied output head), which don't."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    decayed: list[nn.Parameter] = []
    undecayed: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (undecayed if parameter.ndim < 2 or id(parameter) in embeddings else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": undecayed, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_adamw(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Build AdamW for `model`: ours on a GPU and for bf16 weights, else PyTorch's AdamW, fused if the device has it.

    It refuses to load the state of other weights (`flash_train.distributed.same_weights`).
    """
    groups = parameter_groups(model, config.weight_decay)
    if not groups:
        raise ValueError(f"{type(model).__name__} has no weight to train: requires_grad is False everywhere")
    parameters = [parameter for group in groups for parameter in group["params"]]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in groups:  # the names go into checkpoints, as `param_names`
        group["params"] = [(names[id(parameter)], parameter) for parameter in group["params"]]
    settings: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    has_bf16 = any(parameter.dtype == torch.bfloat16 for parameter in parameters)
    if has_bf16 or config.moments is not None or config.in_backward or has_kernel(parameters):
        own = AdamW(groups, **settings, master=config.master or "exact", moments=config.moments, offload=config.offload)
        own.register_load_state_dict_pre_hook(check_same_weights)
        return own
    fused = {parameter.device.type for parameter in parameters} <= set(FUSED_DEVICES)
    optimizer = torch.optim.AdamW(groups, fused=fused, **settings)
    optimizer.register_load_state_dict_pre_hook(check_same_weights)
    optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: without_codes(state_dict))
    # A fused step that supports AMP scaling divides by the loss scale itself, after clipping. With False, GradScaler
    # unscales before clipping, as for any other optimizer, and Lightning does not refuse to clip.
    optimizer._step_supports_amp_scaling = False
    if fused:
        optimizer.grad_scale = None  # type: ignore[attr-defined]  # see `rescale_and_clip`
        optimizer.register_step_post_hook(_reset_grad_scale)
    return optimizer


def obstacle_to_step_in_backward(trainer: pl.Trainer) -> str | None:
    """Return why weights cannot be updated within the backward, or None."""
    if trainer.accumulate_grad_batches > 1:
        return f"a step has {trainer.accumulate_grad_batches} micro-batches, whose gradients are summed"
    if not isinstance(trainer.strategy, SingleDeviceStrategy):
        return "several devices exchange their gradients"
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        return "fp16-mixed looks for overflows in all gradients first"
    if trainer.gradient_clip_val:
        return f"gradient_clip_val={trainer.gradient_clip_val} needs the norm of all gradients first"
    return None


def _reset_grad_scale(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    optimizer.grad_scale = None  # type: ignore[attr-defined]


def learning_rate_factor(step: int, *, warmup_steps: int, max_steps: int, min_lr_ratio: float) -> float:
    """Return the learning rate at `step` (from 0) over the peak: linear warm-up, then a cosine until `max_steps`."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, max_steps - warmup_steps))
    return min_lr_ratio + (1 - min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


def warmup_cosine(
    optimizer: torch.optim.Optimizer, config: OptimizerConfig, max_steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Return the schedule, a pure function of the step and of `max_steps`: stopping early does not change it."""

    def factor(step: int) -> float:
        return learning_rate_factor(
            step, warmup_steps=config.warmup_steps, max_steps=max_steps, min_lr_ratio=config.min_lr_ratio
        )

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


@torch.no_grad()
def rescale_and_clip(optimizer: torch.optim.Optimizer, scale: Tensor, max_norm: float | None) -> Tensor:
    """Multiply all gradients by `scale`, then scale them down if their total norm is above `max_norm`.

    For the fused optimizers of `build_adamw` only the factor is set, as `grad_scale`: their step applies it in fp32
    without another pass over the gradients.

    Args:
        optimizer: its parameters without a gradient are skipped.
        scale: scalar tensor; stays on its device, nothing is synchronised.
        max_norm: None or 0 does not clip.

    Returns:
        The norm after rescaling and before clipping: fp32 scalar tensor.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros((), device=scale.device)
    factor = scale.to(torch.float32)
    norm = total_norm(gradients, factor.device) * factor
    if max_norm:
        factor = factor * (max_norm / (norm + 1e-6)).clamp(max=1.0).float()  # fp32, also for weights in fp64
    # PyTorch's fused step takes no plain factor together with sharded gradients
    takes_factor = hasattr(optimizer, "grad_scale") and not (
        type(optimizer) is torch.optim.AdamW and any(isinstance(gradient, DTensor) for gradient in gradients)
    )
    if takes_factor:
        optimizer.grad_scale = factor.reciprocal()  # type: ignore[attr-defined]
    else:
        torch._foreach_mul_([local(gradient) for gradient in gradients], factor)
    return norm


def total_norm(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the Euclidean norm of all elements, a scalar on the device; all ranks call it if some are sharded.

    Sums are in fp32 at least: a sum over bf16 norms would be accurate to two digits. The norm is fp64 if a tensor is.
    """
    parts = [local(tensor) for tensor in tensors]
    has_fp64 = any(part.dtype == torch.float64 for part in parts)
    norms = torch._foreach_norm(parts, 2.0, dtype=torch.float64 if has_fp64 else torch.float32)
    total = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]))
    group = shard_group(tensors)
    if group is None:
        return total
    square = total.square()
    torch.distributed.all_reduce(square, group=group)
    return square.sqrt()
