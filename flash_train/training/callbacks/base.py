"""Shared by the callbacks: a hook per optimizer step, copies to the host, and finding other callbacks."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, TypeVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from flash_train.checks import as_integer, brief

C = TypeVar("C", bound=Callback)


class StepCallback(Callback):
    """Calls `on_step_end` once per optimizer step. Lightning's own hooks run once per micro-batch.

    Hooks annotate `pl_module` as Any because callbacks read attributes that only a `CausalLMModule` has.
    """

    _seen_step = _step_before = 0

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._seen_step = self._step_before = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != self._seen_step:
            self._step_before, self._seen_step = self._seen_step, trainer.global_step
            self.on_step_end(trainer, pl_module)

    def has_reached(self, every: int) -> bool:
        """Whether a multiple of `every` has been reached since the call of `on_step_end` before.

        With several optimizers a batch can take several steps, and `global_step` then misses multiples.
        """
        return self._seen_step // every > self._step_before // every

    def on_step_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Called after an optimizer step; `trainer.global_step` already counts it."""


class RecordingCallback(StepCallback):
    """Looks into some optimizer steps, and passes what it finds to `receive`.

    Args:
        receive: called after each recorded step.
        every: record each step whose number is a multiple of this; None for `steps` alone.
        steps: record also these steps, counted from 1.

    Raises:
        TypeError: `receive` cannot be called, or `steps` is one number.
        ValueError: `every` or a step is no integer of at least 1, or neither is given.
    """

    #: name of the class that `receive` takes
    received: ClassVar[str]

    def __init__(self, receive: Callable[[Any], None], *, every: int | None = None, steps: Iterable[int] = ()) -> None:
        if not callable(receive):
            raise TypeError(f"receive={brief(receive)}: must be a function that takes a {self.received}")
        if not isinstance(steps, Iterable):
            raise TypeError(f"steps={brief(steps)}: must be several numbers of steps, such as (1, 100)")
        self.receive = receive
        self.every = as_integer("every", every, 1, or_none="or None for the given steps alone")
        self.steps = tuple(as_integer("steps", step, 1) for step in steps)
        if self.every is None and not self.steps:
            raise ValueError("every=None, steps=(): must be one of both, or no step is recorded")

    def is_due(self, step: int) -> bool:
        """Whether to record this step."""
        return step in self.steps or bool(self.every and step % self.every == 0)


class HostCopy:
    """A copy of a few numbers in the host's memory, for which the host need not wait.

    On a GPU the copy is queued in the current stream. Elsewhere the tensor itself is kept, and must not change.
    """

    def __init__(self, values: Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        if values.device.type == "cuda":
            values = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        self._values = values

    def read(self) -> list[Any]:
        """Return the numbers; on a GPU, wait until it has copied them."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values.tolist()


def find_callback(trainer: Trainer, kind: type[C], *, before: Callback | None = None) -> C | None:
    """Return the trainer's callback of this kind, or None; with `before`, only one that runs before that callback."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if before is not None:
        callbacks = callbacks[: callbacks.index(before)]
    return next((callback for callback in callbacks if isinstance(callback, kind)), None)


def will_stop(trainer: Trainer) -> bool:
    """Whether training ends early after this step: `should_stop` alone does not, before `min_steps` or `min_epochs`."""
    return trainer.should_stop and trainer.fit_loop._can_stop_early


def is_trial(trainer: Trainer) -> bool:
    """Whether this is Lightning's `fast_dev_run`: it tries the program, and leaves the files of real runs alone."""
    return bool(trainer.fast_dev_run)  # type: ignore[attr-defined]


def require(callback: Callback, pl_module: LightningModule, *names: str) -> None:
    """Refuse a module without the attributes that a callback reads.

    Raises:
        TypeError: names the missing attributes.
    """
    if missing := [name for name in names if not hasattr(pl_module, name)]:
        kind = type(callback).__name__
        raise TypeError(
            f"{kind} needs a module with {' and '.join(missing)}, as in CausalLMModule, and "
            f"{type(pl_module).__name__} lacks them: leave the callback out, or add them"
        )


def validation_metrics(trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
    """Return the metrics of the newest validation, by names such as `val/loss`.

    A `CausalLMModule` keeps them as `validation`. For another module they are what it logged under names with `val`.
    """
    own = getattr(pl_module, "validation", None)
    if isinstance(own, Mapping):
        return dict(own)
    return {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val")}
