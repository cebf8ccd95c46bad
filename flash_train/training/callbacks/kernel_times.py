"""Times the GPU's kernels of whole optimizer steps during training."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.profiler import ProfilerActivity, profile

from flash_train.profiling.step_kernels import Kernel, device_kernels
from flash_train.training.callbacks.base import RecordingCallback, find_callback
from flash_train.training.callbacks.throughput import Throughput


@dataclass(frozen=True)
class ProfiledStep:
    """A profiled optimizer step.

    Args:
        step: its number, counted from 1.
        seconds: how long it took. The profiler slows the host, so the pauses between kernels are longer than in other
            steps.
        kernels: what the GPU ran, in order.
        profile: the recording, for `profile.export_chrome_trace`.
    """

    step: int
    seconds: float
    kernels: tuple[Kernel, ...]
    profile: profile


class KernelTimes(RecordingCallback):
    """Records the kernels of optimizer steps on the first rank, by PyTorch's profiler. Needs an NVIDIA GPU.

    `receive` gets a `ProfiledStep`. See `RecordingCallback` for the arguments and errors.
    """

    received = "ProfiledStep"

    def __init__(
        self, receive: Callable[[ProfiledStep], None], *, every: int | None = None, steps: Iterable[int] = ()
    ) -> None:
        super().__init__(receive, every=every, steps=steps)
        self._profile: profile | None = None

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        if pl_module.device.type != "cuda":
            raise ValueError(
                f"KernelTimes: times the kernels of an NVIDIA GPU, and this run is on {pl_module.device.type}: "
                "leave the callback out"
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._profile is None and trainer.is_global_zero and self.is_due(trainer.global_step + 1):
            throughput = find_callback(trainer, Throughput)
            if throughput:
                throughput.pause(trainer, pl_module)
            self._profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
            self._profile.start()
            torch.cuda.synchronize()
            if throughput:
                throughput.resume()
            self._start = time.perf_counter()

    def on_step_end(self, trainer: Trainer, pl_module: Any) -> None:
        if self._profile is None:
            return
        torch.cuda.synchronize()
        seconds = time.perf_counter() - self._start
        if throughput := find_callback(trainer, Throughput):
            throughput.pause(trainer, pl_module)
        recorded, self._profile = self._profile, None
        recorded.stop()
        self.receive(ProfiledStep(trainer.global_step, seconds, tuple(device_kernels(recorded)), recorded))

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._drop()  # training may end between the micro-batches of a step

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        self._drop()

    def _drop(self) -> None:
        """End the recording of a step that did not end."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None
