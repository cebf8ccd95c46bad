"""Two ways to end a run early with everything saved: after a number of steps, or on a signal."""

import signal
import threading
import time
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer

from flash_train.checks import at_least, check
from flash_train.distributed.strategy import ShardedStrategy
from flash_train.output import say, say_in_handler
from flash_train.training.callbacks.base import StepCallback

STOPPING = ("SIGTERM", "SIGINT", "SIGHUP")  # SIGHUP, for a terminal that closes, is missing on Windows
# A terminal sends Ctrl-C to the whole process group, and a wrapper may forward it: within this time both count as one.
SAME_SIGNAL_SECONDS = 0.5
# Ranks ask each other for a signal about this often. Each time the host waits for the GPU, and so queues no work ahead.
AGREE_SECONDS = 5.0


class StopAfter(StepCallback):
    """Stops after `steps` optimizer steps of this run, or at `max_steps`, with a final validation.

    The learning-rate schedule depends on `max_steps` only, so it stays the same.

    Args:
        steps: steps of this run, without those before the checkpoint that it resumed; None stops at `max_steps` only.
    """

    def __init__(self, steps: int | None = None) -> None:
        check("stop_after", steps, at_least(1), or_none="or null for no early stop")
        self.steps = steps
        self._first_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        self._first_step = trainer.global_step

    def on_step_end(self, trainer: Trainer, pl_module: Any) -> None:
        enough = self.steps is not None and trainer.global_step - self._first_step >= self.steps
        # Lightning validates at the end if `should_stop` is set, but not if it only reaches max_steps.
        if enough or trainer.global_step == trainer.max_steps:
            trainer.should_stop = True


class SaveOnSignal(StepCallback):
    """On SIGTERM, SIGHUP or a first Ctrl-C, finishes the optimizer step, saves a checkpoint and ends `fit` normally.

    `StepCheckpoint` saves, as always when the trainer is about to stop. A validation in progress is cut short, and the
    run stops at its step; `MissedValidation` repeats it when the run is resumed. A second Ctrl-C interrupts at once. A
    SIGHUP that the process ignores (`nohup`) stays ignored. Afterwards `received` is the signal's name, until the next
    `fit`. Lightning's own handler, which ends the process without a checkpoint, is replaced while training runs.

    Of several ranks, each may get the signal, and all stop after the same step, at most `AGREE_SECONDS` later. Ranks
    that share weights or rows finish a validation in progress, because each batch needs all of them. Lightning no
    longer asks all ranks at every micro-batch whether its own handler got a SIGTERM.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._received_at = 0.0
        self._previous: dict[int, Any] = {}
        self._next_step = 0  # at which the ranks ask each other again

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        self._module = pl_module
        strategy = trainer.strategy
        self._skips_alone = not isinstance(strategy, ShardedStrategy) and not getattr(strategy, "context_group", None)
        self.received, pl_module.skip_validation = None, False  # forget the signal of an earlier fit
        self._asked = (trainer.global_step, time.monotonic())  # the step, and the time, at which the ranks asked
        self._step_seconds = AGREE_SECONDS  # of a step, until one is measured
        if threading.current_thread() is threading.main_thread():  # other threads cannot set handlers
            for number in filter(None, (getattr(signal, name, None) for name in STOPPING)):
                if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._handle)
        if signal.SIGTERM in self._previous:
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
        if trainer.received_sigterm:  # Lightning caught it while the run was being prepared
            self.received = "SIGTERM"
        self._stop_if_received(trainer, pl_module)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received and time.monotonic() - self._received_at < SAME_SIGNAL_SECONDS:
            return
        if number == signal.SIGINT and self.received:
            raise KeyboardInterrupt
        self.received, self._received_at = signal.Signals(number).name, time.monotonic()
        if self._skips_alone:  # else the ranks may have agreed to skip it already
            self._module.skip_validation = True
        if self._module.trainer.is_global_zero:
            again = "; press Ctrl-C again to interrupt at once" if number == signal.SIGINT else ""
            say_in_handler(f"{self.received}: stopping after this step{again}")

    def on_step_end(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.global_step >= self._next_step:
            self._stop_if_received(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._stop_if_received(trainer, pl_module)  # all ranks have the same exit status

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._stop_in_validation(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._stop_in_validation(trainer, pl_module)

    def _stop_in_validation(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._stop_if_received(trainer, pl_module)

    def _stop_if_received(self, trainer: Trainer, pl_module: Any) -> None:
        if self._is_received(trainer):
            if self.received is None:
                self.received = "another rank's signal"
                if trainer.is_global_zero:
                    say("another rank received a signal: stopping after this step")
            pl_module.skip_validation = True
            trainer.should_stop = True

    def _is_received(self, trainer: Trainer) -> bool:
        """Whether any rank has received a signal; all ranks call it at the same step."""
        if trainer.world_size == 1:
            return self.received is not None
        step, now = trainer.global_step, time.monotonic()
        last_step, last_time = self._asked
        if step > last_step:  # else a validation began or ended
            self._asked, self._step_seconds = (step, now), (now - last_time) / (step - last_step)
        own = [self.received is not None, self._step_seconds]
        found = torch.tensor(own, dtype=torch.float64, device=trainer.strategy.root_device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        is_received, seconds = found.tolist()
        self._next_step = step + max(1, int(AGREE_SECONDS / max(seconds, 1e-6)))
        return bool(is_received)

    def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        # Not in `on_train_end`: other callbacks write the run's record there, and a Ctrl-C must not interrupt them.
        self._restore_handlers(pl_module)

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        self._restore_handlers(pl_module)

    def _restore_handlers(self, pl_module: Any) -> None:
        pl_module.skip_validation = False
        if self._previous:
            vars(pl_module.trainer.fit_loop.epoch_loop).pop("_broadcast_sigterm_tensor", None)
        while self._previous:
            number, handler = self._previous.popitem()
            if signal.getsignal(number) == self._handle:  # else Lightning has already restored a handler
                signal.signal(number, handler)
