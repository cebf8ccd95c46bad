"""Clocks of the device (one can be paused), and a timer of Lightning's own actions."""

import time
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.profilers import Profiler

Timestamp = torch.cuda.Event | float
"""A point in time: on a GPU an event in the stream, else seconds of the host's clock."""


class DeviceClock:
    """Timestamps of a device.

    On a GPU a timestamp is set when work is queued, and read later, whatever the host does in between.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> Timestamp:
        """Return the point at which the work that is queued so far ends."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    @staticmethod
    def seconds(start: Timestamp, end: Timestamp) -> float:
        """Return the seconds between two timestamps; on a GPU, wait until the device has reached the second."""
        if isinstance(start, float) or isinstance(end, float):
            assert isinstance(start, float) and isinstance(end, float)
            return end - start
        end.synchronize()
        return start.elapsed_time(end) / 1000


class TrainingClock:
    """Counts seconds of training, without pauses. Marks must be read in the order in which they were set."""

    def __init__(self, device: torch.device) -> None:
        self._clock, self.seconds, self.is_paused = DeviceClock(device), 0.0, False
        self._last = self._clock.now()

    def mark(self) -> Timestamp | None:
        """Return the present; None during a pause."""
        return None if self.is_paused else self._clock.now()

    def read(self, mark: Timestamp | None) -> float:
        """Return the seconds of training up to a mark; on a GPU, wait until the device has reached it."""
        if mark is not None:
            self.seconds += self._clock.seconds(self._last, mark)
            self._last = mark
        return self.seconds

    def pause(self) -> None:
        """Wait for the device and stop the clock."""
        if not self.is_paused:
            self.read(self.mark())
            self.is_paused = True

    def resume(self, seconds: float) -> None:
        """Start the clock again; so many seconds of the pause count as training."""
        if self.is_paused:
            self.is_paused = False
            self.seconds += seconds
            self._last = self._clock.now()


class ActionTimer(Profiler):
    """Measures how long training waits for its next batch, and calls hooks before and after a checkpoint is saved.

    Forwards every action to the profiler that it wraps.
    """

    FETCH = "[_TrainingEpochLoop].train_dataloader_next"
    SAVE = "save_checkpoint"

    def __init__(self, inner: Profiler) -> None:
        super().__init__()
        self.inner = inner
        self.seconds = 0.0
        self.before_save: Callable[[], None] | None = None
        self.after_save: Callable[[], None] | None = None
        self._started: float | None = None

    def start(self, action_name: str) -> None:
        self.inner.start(action_name)
        if action_name == self.FETCH:
            self._started = time.perf_counter()
        elif action_name == self.SAVE and self.before_save is not None:
            self.before_save()

    def stop(self, action_name: str) -> None:
        if action_name == self.FETCH and self._started is not None:
            self.seconds += time.perf_counter() - self._started
            self._started = None
        elif action_name == self.SAVE and self.after_save is not None:
            self.after_save()
        self.inner.stop(action_name)

    def summary(self) -> str:
        return self.inner.summary()

    def describe(self) -> None:
        self.inner.describe()

    def setup(self, *args: Any, **kwargs: Any) -> None:
        self.inner.setup(*args, **kwargs)

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        self.inner.teardown(*args, **kwargs)
