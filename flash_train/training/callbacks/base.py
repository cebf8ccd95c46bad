"""What the callbacks share: a hook per optimizer step, and finding one another."""

from collections.abc import Mapping
from typing import Any, TypeVar

from lightning.pytorch import Callback, LightningModule, Trainer

C = TypeVar("C", bound=Callback)


class StepCallback(Callback):
    """Calls `on_step_end` once per optimizer step, where Lightning's hooks come once per micro-batch.

    `pl_module` is a `CausalLMModule` wherever more is read of it than a `LightningModule` has.
    """

    _seen_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._seen_step = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != self._seen_step:
            self._seen_step = trainer.global_step
            self.on_step_end(trainer, pl_module)

    def on_step_end(self, trainer: Trainer, pl_module: Any) -> None:
        """An optimizer step is complete; `trainer.global_step` counts it."""


def find_callback(trainer: Trainer, kind: type[C], *, before: Callback | None = None) -> C | None:
    """The trainer's callback of that kind, or None; with `before`, only if it is called before that one."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if before is not None:
        callbacks = callbacks[: callbacks.index(before)]
    return next((callback for callback in callbacks if isinstance(callback, kind)), None)


def require(callback: Callback, pl_module: LightningModule, *names: str) -> None:
    """Refuse a module that lacks what a callback reads.

    Raises:
        TypeError: names the attributes that are missing.
    """
    if missing := [name for name in names if not hasattr(pl_module, name)]:
        kind = type(callback).__name__
        raise TypeError(
            f"{kind} reads {' and '.join(missing)} of the module, as CausalLMModule has them, and "
            f"{type(pl_module).__name__} has not: leave the callback out, or add them"
        )


def validation_of(trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
    """What the newest validation has measured, by names such as `val/loss`.

    A `CausalLMModule` keeps it as `validation`. Of another module it is what it has logged under names in `val`.
    """
    own = getattr(pl_module, "validation", None)
    if isinstance(own, Mapping):
        return dict(own)
    return {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val")}
