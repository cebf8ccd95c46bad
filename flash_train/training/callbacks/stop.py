"""Two ways to end a run early with everything saved: after a number of steps, or on a signal."""

import signal
import threading
import time
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from flash_train.checks import as_integer
from flash_train.distributed.strategy import ShardedStrategy
from flash_train.output import say, say_in_handler
from flash_train.training.callbacks.base import HostCopy, StepCallback

STOPPING = ("SIGTERM", "SIGINT", "SIGHUP")  # SIGHUP, for a terminal that closes, is missing on Windows
# A terminal sends Ctrl-C to the whole process group, and a wrapper may forward it: within this time both count as one.
SAME_SIGNAL_SECONDS = 0.5


class StoppingCallback(StepCallback):
    """Ends training after the current step, also before the trainer's `min_steps` and `min_epochs`."""

    _least: tuple[int | None, int | None] | None = None  # the trainer's own, until training has ended

    def stop(self, trainer: Trainer) -> None:
        loop = trainer.fit_loop
        if loop.min_epochs or loop.min_steps:
            self._least = loop.min_epochs, loop.min_steps
            loop.min_epochs = loop.epoch_loop.min_steps = None
        trainer.should_stop = True

    def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        if self._least is not None:
            (trainer.fit_loop.min_epochs, trainer.fit_loop.epoch_loop.min_steps), self._least = self._least, None


class StopAfter(StoppingCallback):
    """Stops after `steps` optimizer steps of this run, or at `max_steps`, with a final validation.

    The learning-rate schedule depends on `max_steps` only, so it stays the same.

    Args:
        steps: steps of this run, without those before the checkpoint that it resumed; None stops at `max_steps` only.

    Raises:
        ValueError: `steps` is no integer of at least 1.
    """

    def __init__(self, steps: int | None = None) -> None:
        self.steps = as_integer("stop_after", steps, 1, or_none="or null for no early stop")
        self._first_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        self._first_step = trainer.global_step

    def on_step_end(self, trainer: Trainer, pl_module: Any) -> None:
        enough = self.steps is not None and trainer.global_step - self._first_step >= self.steps
        # Lightning validates at the end if `should_stop` is set, but not if it only reaches max_steps.
        if enough or trainer.global_step == trainer.max_steps:
            self.stop(trainer)


class SaveOnSignal(StoppingCallback):
    """On SIGTERM, SIGHUP or a first Ctrl-C, finishes the optimizer step and ends `fit` normally, with a checkpoint.

    The checkpoint needs a `StepCheckpoint` among the callbacks, which saves whenever the trainer is about to stop.
    Lightning's `ModelCheckpoint` may save nothing then; if there is no other, a line says so when training starts.

    A validation in progress is cut short, and the run stops at its step; `MissedValidation` repeats it when the run is
    resumed. A second Ctrl-C interrupts at once. A SIGHUP that the process ignores (`nohup`) stays ignored. Afterwards
    `received` is the signal's name, until the next `fit`. Lightning's own handler, which ends the process without a
    checkpoint, is replaced while training runs.

    Any of several ranks may get the signal. The ranks ask each other at the end of every step, and read the answer at
    the end of the next one, so that no host waits: all ranks stop after the step that follows the signal's. Ranks that
    share weights or rows ask at every batch of a validation, too, because a batch needs all of them. Lightning's own
    check of all ranks, for which the host waits at every micro-batch, is switched off.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._received_at = 0.0
        self._previous: dict[int, Any] = {}
        self._vote: _Vote | None = None  # the newest one, if its result has not been read

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        self._module = pl_module
        self._say_if_unsaved(trainer)
        strategy = trainer.strategy
        self._skips_alone = not isinstance(strategy, ShardedStrategy) and not getattr(strategy, "context_group", None)
        self.received, self._vote, pl_module.skip_validation = None, None, False  # forget an earlier fit
        if threading.current_thread() is threading.main_thread():  # other threads cannot set handlers
            for number in filter(None, (getattr(signal, name, None) for name in STOPPING)):
                if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._handle)
        if signal.SIGTERM in self._previous:
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
        if trainer.received_sigterm:  # Lightning caught it while the run was being prepared
            self.received = "SIGTERM"
        self._ask_and_wait(trainer, pl_module)

    @staticmethod
    def _say_if_unsaved(trainer: Trainer) -> None:
        """Print a line if only `ModelCheckpoint` saves: with `every_n_train_steps` it does not when the run stops.

        A run without any checkpoint is meant to have none.
        """
        savers = trainer.checkpoint_callbacks
        if savers and all(isinstance(saver, ModelCheckpoint) for saver in savers) and trainer.is_global_zero:
            say("a signal will end this run, maybe without a checkpoint: give the Trainer StepCheckpoint(folder), too")

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
            alone = self._module.trainer.world_size == 1
            say_in_handler(f"{self.received}: stopping {'after this step' if alone else 'once all ranks agree'}{again}")

    def on_step_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._ask(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._ask_and_wait(trainer, pl_module)  # all ranks have the same exit status

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        if _is_within_fit(trainer):
            self._ask_and_wait(trainer, pl_module)

    def on_validation_batch_start(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        if _is_within_fit(trainer) and not self._skips_alone:
            self._ask(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        if _is_within_fit(trainer):
            self._ask_and_wait(trainer, pl_module)

    def _ask(self, trainer: Trainer, pl_module: Any) -> None:
        """Stop if the last vote says so, and begin another one. All ranks call it at the same points of a run."""
        if trainer.world_size == 1:
            is_received = self.received is not None
        else:
            is_received = self._vote is not None and self._vote.result()
            self._vote = _Vote(self.received is not None, trainer.strategy.root_device)
        if is_received:
            self._stop(trainer, pl_module)

    def _ask_and_wait(self, trainer: Trainer, pl_module: Any) -> None:
        self._ask(trainer, pl_module)
        vote, self._vote = self._vote, None
        if vote is not None and vote.result():
            self._stop(trainer, pl_module)

    def _stop(self, trainer: Trainer, pl_module: Any) -> None:
        if self.received is None:
            self.received = "another rank's signal"
            if trainer.is_global_zero:
                say("another rank received a signal: stopping")
        pl_module.skip_validation = True
        self.stop(trainer)

    def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
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


class _Vote:
    """Whether any rank has received a signal. The ranks begin it together, and none of them waits."""

    def __init__(self, is_received: bool, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        flag = torch.tensor([is_received], dtype=torch.int32, pin_memory=on_gpu).to(device, non_blocking=True)
        self._work = dist.all_reduce(flag, dist.ReduceOp.MAX, async_op=True)
        if on_gpu:
            self._work.wait()  # not the host: work that is queued later waits
        self._flag = HostCopy(flag)

    def result(self) -> bool:
        """Wait for the result; on a GPU, for the work that was queued before the vote."""
        self._work.wait()
        return bool(self._flag.read()[0])


def _is_within_fit(trainer: Trainer) -> bool:
    return trainer.state.fn == "fit" and not trainer.sanity_checking
