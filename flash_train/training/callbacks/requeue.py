"""At SLURM's signal before a job's time limit: a checkpoint at the next step, then requeue the job."""

import os
import signal
import subprocess
import threading
from typing import Any

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Callback, Trainer

from flash_train.output import say
from flash_train.training.callbacks.base import find_callback
from flash_train.training.callbacks.stop import SaveOnSignal


class SlurmRequeue(Callback):
    """Under SLURM, ends `fit` at the signal that announces the job's time limit, then calls `scontrol requeue`.

    `SaveOnSignal`, which must run before this callback, finishes the optimizer step, and `StepCheckpoint` saves.
    Lightning's own handler saves at once, possibly when half of the weights are updated.

    SLURM sends the signal to a job that asks for it: `#SBATCH --signal=SIGUSR1@90` sends it 90 seconds before the
    limit. To use another signal, or none, give the `Trainer` `plugins=[SLURMEnvironment(...)]`, as always in Lightning.
    Outside of SLURM, and if the signal already has a handler, this callback does nothing.
    """

    def __init__(self) -> None:
        self._number: signal.Signals | None = None
        self._previous: Any = None
        self._requeue = False

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        signals = find_callback(trainer, SaveOnSignal, before=self)
        if signals is None:
            raise ValueError(
                "SlurmRequeue needs SaveOnSignal before it: Trainer(callbacks=[SaveOnSignal(), SlurmRequeue(), ...])"
            )
        self._signals, self._requeue = signals, False
        # Lightning sets its handler after this hook, so a handler that is set now belongs to other code.
        number = _requeue_signal(trainer) if stage == "fit" else None
        free = number is not None and signal.getsignal(number) in (None, signal.SIG_DFL)
        self._number = number if free and threading.current_thread() is threading.main_thread() else None

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        if self._number is not None:
            self._previous = signal.signal(self._number, self._signals._handle)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._requeue = self._number is not None and self._signals.received == self._number.name
        if trainer.world_size > 1:  # the first rank requeues the job, but another rank may have received the signal
            self._requeue = trainer.strategy.reduce_boolean_decision(self._requeue, all=False)
        self._restore_handlers()

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        self._restore_handlers()

    def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        # Last of all: SLURM ends the job as soon as it is requeued.
        if self._requeue and trainer.is_global_zero:
            requeue()
        self._requeue = False

    def _restore_handlers(self) -> None:
        if self._number is not None and self._previous is not None:
            signal.signal(self._number, self._previous)
        self._previous = None


def requeue() -> None:
    """Requeue this SLURM job, and print on standard error whether that worked."""
    job = os.environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        failure = done.stderr.strip() or f"exit status {done.returncode}" if done.returncode else None
    except OSError as error:
        failure = str(error)
    say(f"SLURM job {job}: requeued" if failure is None else f"{' '.join(command)} failed: {failure}")


def _requeue_signal(trainer: Trainer) -> signal.Signals | None:
    """Return the signal that announces the job's time limit; None if there is none."""
    environment = trainer._accelerator_connector.cluster_environment
    if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
        return None
    return environment.requeue_signal
