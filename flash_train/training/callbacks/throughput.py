"""Measures speed and memory use per logged step."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.throughput import Throughput as RollingThroughput
from lightning.pytorch import Trainer
from lightning.pytorch.profilers import PassThroughProfiler, Profiler

from flash_train.distributed.dims import data_share
from flash_train.precision import lightning_compute_dtype
from flash_train.records import device_name, memory_use, peak_flops, reset_peak_memory
from flash_train.training.callbacks.base import HostCopy, StepCallback, find_callback, require, will_stop
from flash_train.training.callbacks.clock import ActionTimer, Timestamp, TrainingClock
from flash_train.training.callbacks.step_times import StepTimes
from flash_train.training.step_log import is_logged, log_at_step


def known_peak(device: torch.device, precision: str) -> float | None:
    """Return the device's dense peak in FLOP/s for a Lightning precision; None if it is not known."""
    dtype = lightning_compute_dtype(precision)
    if device.type != "cuda" or dtype is None:
        return None
    return peak_flops(device_name(device), dtype, tf32=torch.get_float32_matmul_precision() != "highest")


class _Measurement(NamedTuple):
    """What a row is made of, noted when its step was queued; the values may still be on their way to the host."""

    step: int
    values: HostCopy  # loss and gradient norm
    mark: Timestamp | None
    learning_rate: float
    steps: int
    micro_batches: int
    tokens: int
    flops: int
    waited: float
    imbalance: dict[str, float | None]
    device: torch.device


class Throughput(StepCallback):
    """Measures speed and memory every `trainer.log_every_n_steps` optimizer steps and at the last one, and logs them.

    `row` holds the newest measurement with full precision, and `listeners` are called with each and its step. A row
    has the metrics `train/`, `time/`, `throughput/`, `data/` and `memory/` of `flash_train.records.run_files.METRICS`.
    The times of a step's parts are there if `StepTimes` runs before this callback, and `data/imbalance` if the
    trainer's data module has a number `imbalance` (see `PackedDataModule.imbalance`).

    The module is a `CausalLMModule`, or has two of its attributes: `flops(batch)`, which returns an int, and
    `last_step`, a `StepResult` after the first optimizer step. Batches are dictionaries with `tokens` (batch, seq_len).
    Ranks that share a row each compute an equal part of its FLOPs.

    Validation and saving checkpoints do not count as training time. On a GPU, CUDA events measure the times. A row is
    read once the next step has been queued, so the device never idles, or earlier, before a validation, a checkpoint or
    the end. With `StepTimes` the device is synchronised at logged steps.

    This callback logs the loss in the same row (`logs_steps`), and the module then does not log it. Rates are
    computed by Lightning's `Throughput` class. Lightning's `ThroughputMonitor` does not fit: it assumes the same FLOPs
    for every batch, synchronises at every batch and does not know the H200.
    """

    logs_steps = True

    def __init__(self) -> None:
        self.row: dict[str, float | None] = {}
        self.listeners: list[Callable[[int, dict[str, float | None]], None]] = []
        self._in_batch = False
        self._pending: _Measurement | None = None
        self._timer = ActionTimer(PassThroughProfiler())

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        require(self, pl_module, "flops", "last_step")
        device = pl_module.device
        self.listeners.clear()
        self._pending = None
        self.peak_flops = known_peak(device, trainer.precision)
        self._step_times = find_callback(trainer, StepTimes, before=self)
        profiler: Profiler = trainer.profiler  # type: ignore[attr-defined]
        self._timer = profiler if isinstance(profiler, ActionTimer) else ActionTimer(profiler)
        trainer.profiler = self._timer  # type: ignore[attr-defined]
        self._timer.before_save = lambda: self.pause(trainer, pl_module)
        self._timer.after_save = self._after_save
        reset_peak_memory(device)

        _, self._data_ranks = data_share(trainer.strategy)
        ranks_per_row = trainer.world_size // self._data_ranks
        peak = None if self.peak_flops is None else self.peak_flops * ranks_per_row
        # With a window of two, rates are between one row and the next.
        self._rolling = RollingThroughput(peak, self._data_ranks, window_size=2)
        self._steps = self._micro_batches = self._tokens = self._flops = 0
        self._clock = TrainingClock(device)
        self._previous_row = (0, 0.0, 0.0)  # steps, seconds, seconds waited for data
        self._rolling.update(time=0.0, batches=0, samples=0, lengths=0, flops=0)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.resume()
        self._in_batch = True

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._in_batch = False
        self._micro_batches += 1
        self._tokens += batch["tokens"].numel()
        self._flops += pl_module.flops(batch)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_step_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._steps += 1
        self._finish(trainer)
        if not is_logged(trainer, trainer.global_step):
            return
        self._measure(trainer, pl_module)
        later = pl_module.last_step.loss.device.type == "cuda" and self._step_times is None
        if not later or self._clock.is_paused:
            self._finish(trainer)

    def _measure(self, trainer: Trainer, pl_module: Any) -> None:
        """Note what the row of the step that was queued last is made of."""
        result = pl_module.last_step
        values = torch.stack([result.loss, result.gradient_norm.to(result.loss.dtype)])
        self._pending = _Measurement(
            trainer.global_step, HostCopy(values), self._clock.mark(), result.learning_rate, self._steps,
            self._micro_batches, self._tokens, self._flops, self._timer.seconds, self._imbalance(trainer),
            pl_module.device,
        )  # fmt: skip
        self._flops = 0

    def _finish_last(self, trainer: Trainer, pl_module: Any) -> None:
        """Make the row of the last step: no interval announces the end of the last epoch, a stop or a signal."""
        self._finish(trainer)
        if self._steps > self._previous_row[0]:
            self._measure(trainer, pl_module)
            self._finish(trainer)

    def _finish(self, trainer: Trainer) -> None:
        """Make the row of a step that was queued."""
        if self._pending is None:
            return
        measured, self._pending = self._pending, None
        now = self._clock.read(measured.mark)
        loss, norm = measured.values.read()
        steps, then, waited = self._previous_row
        self._previous_row = (measured.steps, now, measured.waited)
        self._rolling.update(
            time=now, batches=measured.micro_batches, samples=measured.micro_batches, lengths=measured.tokens,
            flops=measured.flops,
        )  # fmt: skip
        rates = self._rolling.compute()
        self.row = {
            "train/loss": loss,
            "train/gradient_norm": norm,
            "train/learning_rate": measured.learning_rate,
            "time/step_seconds": (now - then) / (measured.steps - steps),
            "time/data_wait_seconds": (measured.waited - waited) / (measured.steps - steps),
            **(self._step_times.read() if self._step_times else {}),
            "throughput/tokens_per_second": rates["device/items_per_sec"] * self._data_ranks,
            "throughput/mfu": rates.get("device/mfu"),
            **measured.imbalance,
            **memory_use(measured.device),
        }
        log_at_step(trainer, {name: value for name, value in self.row.items() if value is not None}, measured.step)
        for listener in self.listeners:
            listener(measured.step, self.row)

    @staticmethod
    def _imbalance(trainer: Trainer) -> dict[str, float | None]:
        imbalance = getattr(trainer.datamodule, "imbalance", None)  # type: ignore[attr-defined]
        return {} if imbalance is None else {"data/imbalance": imbalance}

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.pause(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._finish_last(trainer, pl_module)
        self._detach()

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        try:
            self._finish(trainer)
        except RuntimeError as lost:  # a lost device fails every call
            exception.add_note(f"The last row is missing: {lost}")
        self._detach()

    def pause(self, trainer: Trainer, pl_module: Any) -> None:
        """Stop the clock until the next training batch."""
        if trainer.state.fn != "fit" or trainer.sanity_checking or self._clock.is_paused:
            return
        if will_stop(trainer):
            self._finish_last(trainer, pl_module)
        self._finish(trainer)
        self._clock.pause()
        self._fetch_seconds_at_pause = self._timer.seconds

    def resume(self) -> None:
        """Restart a clock that was stopped."""
        if self._clock.is_paused:  # fetching a batch counts as training time, also during the pause
            self._clock.resume(self._timer.seconds - self._fetch_seconds_at_pause)

    def _after_save(self) -> None:
        """Restart the clock after a checkpoint that was saved within a batch; otherwise the next batch restarts it."""
        if self._in_batch:
            self.resume()

    def _detach(self) -> None:
        """Stop watching checkpoints: those saved after training, or by another `fit`, must not change this clock."""
        self._in_batch = False
        self._timer.before_save = self._timer.after_save = None
