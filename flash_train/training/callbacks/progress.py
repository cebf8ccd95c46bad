"""A progress bar over optimizer steps; without a terminal, one line per logged step."""

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column

from flash_train.output import STDERR, STDOUT
from flash_train.records import peak_memory
from flash_train.training.callbacks.base import StepCallback, find_callback, validation_metrics
from flash_train.training.callbacks.stop import StopAfter
from flash_train.training.callbacks.throughput import Throughput


def describe(row: Mapping[str, Any], steps_left: int) -> str:
    """Format one measurement: loss, speed, utilisation and peak memory if known, time left."""
    parts = [f"loss {row['train/loss']:.4f}", f"{short(row['throughput/tokens_per_second'])} tok/s"]
    if (mfu := row.get("throughput/mfu")) is not None:
        parts.append(f"MFU {mfu:.1%}")
    if (peak := peak_memory(row)) is not None:
        parts.append(f"peak {peak:.1f} GiB")
    left = timedelta(seconds=round(steps_left * row["time/step_seconds"]))
    return "  ".join([*parts, f"{left} left"])


def short(value: float) -> str:
    """Format a count or a rate with three digits, such as 8.07k or 1.25M."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.0f}"


class RichProgress(StepCallback, ProgressBar):
    """Shows loss, tokens/s, MFU, peak memory and time left, as measured by `Throughput`, which must run before it.

    It works with every module that `Throughput` supports.

    Args:
        console: where to write. With None, the bar is on standard error; if standard error or standard output is not a
            terminal, lines on standard output replace it, so that a pipe or a file gets them. Text that cannot be
            written is dropped.
    """

    def __init__(self, console: Console | None = None) -> None:
        super().__init__()
        self.console = console or Console(file=STDERR)
        self.lines = console or Console(file=STDOUT)
        self.enabled = True
        self._bar: Progress | None = None
        self._pending_line: str | None = None  # printed when all callbacks are done with the step

    def enable(self) -> None:
        self.enabled = True

    def disable(self) -> None:
        self.enabled = False

    def print(self, *args: Any, **kwargs: Any) -> None:
        if self.enabled:
            self.console.print(*args)

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        throughput = find_callback(trainer, Throughput, before=self)
        if throughput is None:
            raise ValueError(
                "RichProgress needs Throughput before it: Trainer(callbacks=[Throughput(), RichProgress()])"
            )
        self._throughput = throughput

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        stop = find_callback(trainer, StopAfter)
        limits = [trainer.max_steps] if trainer.max_steps > 0 else []
        if stop is not None and stop.steps is not None:
            limits.append(trainer.global_step + stop.steps)
        self._last_step = min(limits, default=None)
        self._throughput.listeners.append(self._show)
        if self.enabled and self.console.is_terminal and self.lines.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                MofNCompleteColumn(),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[measured]}", table_column=Column(no_wrap=True)),
                console=self.console,
                refresh_per_second=4,
                expand=True,
            )
            self._task = self._bar.add_task(
                "step", total=self._last_step, completed=trainer.global_step, measured="first step ..."
            )
            self._bar.start()

    def on_step_end(self, trainer: Trainer, pl_module: Any) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=trainer.global_step)

    def _show(self, step: int, row: dict[str, float | None]) -> None:
        measured = describe(row, max(0, (self._last_step or step) - step))
        if self._bar is not None:
            self._bar.update(self._task, measured=measured)
        elif self.enabled:
            width = len(str(self._last_step or step))
            self._pending_line = f"step {step:>{width}}/{self._last_step or '?'}  {measured}"

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._print_pending()

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._print_pending()
        if self._bar is not None:
            self._bar.update(self._task, description="validating")

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        if self._bar is not None:
            self._bar.update(self._task, description="step")
        validation = validation_metrics(trainer, pl_module)
        if self.enabled and validation and not trainer.sanity_checking:
            labelled = {re.sub("^val[/_]", "", name).replace("_", " "): x for name, x in validation.items()}
            values = ", ".join(f"{name} {value:.4f}" for name, value in labelled.items())
            loaded = getattr(pl_module, "loaded_step", None)
            step = loaded if trainer.state.fn == "validate" else trainer.global_step
            self._print_line(f"validation at step {step}: {values}" if step is not None else f"validation: {values}")

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        self._stop()

    def _print_line(self, text: str) -> None:
        console = self.lines if self._bar is None else self.console
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _print_pending(self) -> None:
        if self._pending_line is not None:
            self._print_line(self._pending_line)
            self._pending_line = None

    def _stop(self) -> None:
        self._print_pending()
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
