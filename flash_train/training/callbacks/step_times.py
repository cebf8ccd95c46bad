"""Where an optimizer step's time goes: forward, backward, optimizer, and attention's part of them."""

import time
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import nn

from flash_train.model.layers import AttentionCall
from flash_train.training.callbacks.base import StepCallback

PARTS = ("forward", "backward", "optimizer", "attention")


class _Clock:
    """Moments on the device's own line of time: CUDA events, which cost no waiting; on a CPU the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"

    def now(self) -> Any:
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Between two moments that the device has passed."""
        return start.elapsed_time(end) / 1e3 if self.on_cuda else end - start


class StepTimes(StepCallback):
    """Splits optimizer steps into their parts, in seconds per step; `Throughput`, after this one, reads and logs them.

        time/forward_seconds     from a batch on the device to its loss, all micro-batches
        time/backward_seconds    with what is computed again for it, and the exchange of gradients between ranks
        time/optimizer_seconds   gradients rescaled and clipped, weights updated
        time/attention_seconds   the operator alone, within the forward and the backward; not where blocks are compiled

    CUDA devices and CPUs tell their time; elsewhere nothing is measured. The device isn't waited for here: `read` is
    called where it was waited for anyway.
    """

    def __init__(self) -> None:
        self._clock: _Clock | None = None
        self._handles: list[Any] = []

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        if pl_module.device.type not in ("cuda", "cpu"):
            return
        self._clock = _Clock(pl_module.device)
        self._steps = 0
        self._training = False  # hooks also run in validation, which is none of a step's time
        self._began: dict[Any, Any] = {}
        # Compiled blocks run no hooks of the modules in them.
        calls = [] if _compiled(pl_module) else [m for m in pl_module.modules() if isinstance(m, AttentionCall)]
        self._parts = PARTS if calls else PARTS[:-1]
        self._spans: dict[str, list[tuple[Any, Any]]] = {part: [] for part in self._parts}
        for call in calls:
            self._watch(call)

    def _watch(self, call: nn.Module) -> None:
        """Time an attention call: its forward, also where a checkpoint runs it again, and its backward."""

        def begin(way: str) -> None:
            if self._training:
                self._began[call, way] = self._clock.now()

        def end(way: str) -> None:
            if (start := self._began.pop((call, way), None)) is not None:
                self._spans["attention"].append((start, self._clock.now()))

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
        self._end_of("forward")

    def on_after_backward(self, trainer: Trainer, pl_module: Any) -> None:
        self._end_of("backward")

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._end_of("optimizer")  # nothing to speak of where gradients only accumulate
        self._training = False
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_step_end(self, trainer: Trainer, pl_module: Any) -> None:
        if self._clock is not None:
            self._steps += 1

    def read(self) -> dict[str, float]:
        """Means over the optimizer steps since the last reading; the device must have been waited for."""
        if self._clock is None or not self._steps:
            return {}
        sums = {part: sum(self._clock.seconds(*span) for span in self._spans[part]) for part in self._parts}
        means = {f"time/{part}_seconds": seconds / self._steps for part, seconds in sums.items()}
        self._steps = 0
        self._spans = {part: [] for part in self._parts}
        return means

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._release()

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        self._release()

    def _end_of(self, part: str) -> None:
        if self._clock is not None:
            start, self._mark = self._mark, self._clock.now()
            self._spans[part].append((start, self._mark))

    def _release(self) -> None:
        while self._handles:
            self._handles.pop().remove()


def _compiled(pl_module: Any) -> bool:
    return any(module._compiled_call_impl is not None for module in pl_module.modules())
