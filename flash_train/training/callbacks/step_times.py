"""Times the parts of an optimizer step: forward, backward, optimizer, and attention within them."""

from typing import Any

from lightning.pytorch import Trainer
from torch import nn

from flash_train.model.layers import AttentionCall
from flash_train.training.callbacks.base import StepCallback
from flash_train.training.callbacks.clock import DeviceClock, Timestamp

PARTS = ("forward", "backward", "optimizer", "attention")


class StepTimes(StepCallback):
    """Measures the parts of optimizer steps in seconds per step. `Throughput`, which must run later, logs them.

        time/forward_seconds     from a batch on the device to its loss, all micro-batches
        time/backward_seconds    including recomputation and the exchange of gradients between ranks
        time/optimizer_seconds   gradients rescaled and clipped, weights updated
        time/attention_seconds   the operator alone, within forward and backward; not measured in compiled blocks

    Works on CUDA devices and CPUs; on others nothing is measured. It does not synchronise: `Throughput` calls `read`
    after it has synchronised.
    """

    def __init__(self) -> None:
        self._clock: DeviceClock | None = None
        self._handles: list[Any] = []

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        if pl_module.device.type not in ("cuda", "cpu"):
            return
        clock = self._clock = DeviceClock(pl_module.device)
        self._steps = 0
        self._training = False  # the hooks also run in validation, which does not count
        self._starts: dict[tuple[nn.Module, str], Timestamp] = {}
        # Compiled blocks do not run the hooks of the modules inside them.
        calls = (
            [] if has_compiled_blocks(pl_module) else [m for m in pl_module.modules() if isinstance(m, AttentionCall)]
        )
        self._parts = PARTS if calls else PARTS[:-1]
        self._spans: dict[str, list[tuple[Timestamp, Timestamp]]] = {part: [] for part in self._parts}
        for call in calls:
            self._watch(call, clock)

    def _watch(self, call: nn.Module, clock: DeviceClock) -> None:
        """Time an attention call: its forward, including recomputation, and its backward."""

        def begin(direction: str) -> None:
            if self._training:
                self._starts[call, direction] = clock.now()

        def end(direction: str) -> None:
            if (start := self._starts.pop((call, direction), None)) is not None:
                self._spans["attention"].append((start, clock.now()))

        self._handles += [
            call.register_forward_pre_hook(lambda *_: begin("forward")),
            call.register_forward_hook(lambda *_: end("forward")),
            call.register_full_backward_pre_hook(lambda *_: begin("backward")),
            call.register_full_backward_hook(lambda *_: end("backward")),
        ]

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._clock is not None:
            self._training = True
            self._mark = self._clock.now()

    def on_before_backward(self, trainer: Trainer, pl_module: Any, loss: Any) -> None:
        self._end_part("forward")

    def on_after_backward(self, trainer: Trainer, pl_module: Any) -> None:
        self._end_part("backward")

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._end_part("optimizer")  # next to no time in a micro-batch that only accumulates gradients
        self._training = False
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_step_end(self, trainer: Trainer, pl_module: Any) -> None:
        if self._clock is not None:
            self._steps += 1

    def read(self) -> dict[str, float]:
        """Return means over the optimizer steps since the last call; synchronise the device before."""
        if self._clock is None or not self._steps:
            return {}
        sums = {part: sum(self._clock.seconds(*span) for span in self._spans[part]) for part in self._parts}
        means = {f"time/{part}_seconds": seconds / self._steps for part, seconds in sums.items()}
        self._steps = 0
        self._spans = {part: [] for part in self._parts}
        return means

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._remove_hooks()

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        self._remove_hooks()

    def _end_part(self, part: str) -> None:
        if self._clock is not None:
            start, self._mark = self._mark, self._clock.now()
            self._spans[part].append((start, self._mark))

    def _remove_hooks(self) -> None:
        while self._handles:
            self._handles.pop().remove()


def has_compiled_blocks(pl_module: Any) -> bool:
    """Whether `torch.compile` has taken over any module's call."""
    return any(module._compiled_call_impl is not None for module in pl_module.modules())
