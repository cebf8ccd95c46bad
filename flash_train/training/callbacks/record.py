"""The run directory's own record: metrics.csv, summary.json, the plots; of a validation alone, validation.json."""

import os
import re
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException

from flash_train.profiling import MetricsTable, device_name, memory_use, peak_memory, plot_run, versions, write_json
from flash_train.training.callbacks.base import StepCallback, find_callback, validation_of
from flash_train.training.callbacks.stop import SaveOnSignal
from flash_train.training.callbacks.throughput import Throughput


class RunRecord(StepCallback):
    """Keeps the files of a run up to date in `run_dir`.

    `metrics.csv` gains a row per measurement of `Throughput` (which must be among the trainer's callbacks, before
    this one) and per validation; a resumed run goes on in it, rows past the checkpoint dropped. `summary.json` says
    `running`, then `finished`, `interrupted` (a signal) or `failed` (with the error); the plots are drawn at the end.
    `Trainer.validate` leaves all of these as they are, and writes `validation.json`.

    The module is any that `Throughput` takes; what it does not say of itself is null in the summary.

    Args:
        run_dir: made if it doesn't exist.
        extra: more entries for the summary, such as what the data are; plain values.
    """

    def __init__(self, run_dir: str | os.PathLike[str], extra: Mapping[str, Any] | None = None) -> None:
        self.run_dir = Path(run_dir)
        self.extra = dict(extra or {})
        self.summary: dict[str, Any] = {}
        self.table: MetricsTable | None = None

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        throughput = find_callback(trainer, Throughput, before=self)
        if throughput is None:
            raise ValueError("RunRecord needs Throughput before it: Trainer(callbacks=[Throughput(), RunRecord(...)])")
        self._throughput = throughput

    # -- metrics.csv, on the first rank

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        if trainer.is_global_zero:
            self.table = MetricsTable(self.run_dir / "metrics.csv", up_to_step=trainer.global_step)
            self._summarise(trainer, pl_module, "running")

    def on_step_end(self, trainer: Trainer, pl_module: Any) -> None:
        if self.table is not None and self._throughput.row_step == trainer.global_step:
            self.table.write(trainer.global_step, self._throughput.row)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        if trainer.state.fn == "validate":
            self._validated(trainer, pl_module)
        elif self.table is not None and (validation := validation_of(trainer, pl_module)):
            self.table.write(trainer.global_step, validation)

    # -- summary.json and plots

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        signals = find_callback(trainer, SaveOnSignal)
        interrupted = signals is not None and signals.received
        self._close(trainer, pl_module, "interrupted" if interrupted else "finished")

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        if isinstance(exception, KeyboardInterrupt | SIGTERMException):
            self._close(trainer, pl_module, "interrupted")
        else:
            message = str(exception).strip() or type(exception).__name__
            error = f"{type(exception).__name__}: {message}"
            try:
                self._close(trainer, pl_module, "failed", error=error)
            except RuntimeError as lost:  # a device that failed refuses every question: what was known before stands
                exception.add_note(f"The run's record is not whole: {lost}")
                if self.table is not None:
                    self.summary |= {"status": "failed", "error": error, "steps": trainer.global_step}
                    write_json(self.run_dir / "summary.json", self.summary)

    def _close(self, trainer: Trainer, pl_module: Any, status: str, **entries: Any) -> None:
        # A run that fails before it trains must not replace the record of an earlier one.
        began = self.table is not None or not (self.run_dir / "summary.json").exists()
        if trainer.is_global_zero and began and trainer.state.fn == "fit":
            self._summarise(trainer, pl_module, status, **entries)
            if self.table is not None:
                model, seq_len = self.summary["model"], self.summary["seq_len"]
                plot_run(self.table, self.run_dir, title=f"{model}, {seq_len:,} tokens" if seq_len else str(model))

    def _summarise(self, trainer: Trainer, pl_module: Any, status: str, **entries: Any) -> None:
        result = getattr(pl_module, "last_step", None)
        self.summary = {
            "status": status,
            **entries,
            **_what_ran(trainer, pl_module),
            "steps": trainer.global_step,
            "max_steps": trainer.max_steps,
            "train_loss": result.loss.item() if result else None,
            **_validation(trainer, pl_module),
            **self._step_times(),
            "tokens_per_second": self._median("throughput/tokens_per_second"),
            "mfu": self._median("throughput/mfu"),
            **_peak_memory(pl_module),
            "run_dir": str(self.run_dir.resolve()),
            "wandb_dir": self._wandb_dir(trainer),
            "versions": versions(),
            **self.extra,
        }
        write_json(self.run_dir / "summary.json", self.summary)

    def _validated(self, trainer: Trainer, pl_module: Any) -> None:
        """Write what a validation by itself has measured, and of which checkpoint."""
        found = {
            "checkpoint": str(Path(trainer.ckpt_path).resolve()) if trainer.ckpt_path else None,
            "steps": getattr(pl_module, "loaded_step", None),
            **_what_ran(trainer, pl_module),
            **_validation(trainer, pl_module),
            **_peak_memory(pl_module),
            "versions": versions(),
            **self.extra,
        }
        write_json(self.run_dir / "validation.json", found)

    def _step_times(self) -> dict[str, float]:
        """Seconds per optimizer step, whole and by its parts, as far as they were measured."""
        names = self.table.columns if self.table is not None else []
        medians = {name.removeprefix("time/"): self._median(name) for name in names if name.startswith("time/")}
        return {name: seconds for name, seconds in medians.items() if seconds is not None}

    def _wandb_dir(self, trainer: Trainer) -> str | None:
        """Folder of W&B's files of this run, where it keeps them in `run_dir`."""
        loggers = [logger for logger in trainer.loggers if isinstance(logger, WandbLogger)]
        folder = Path(loggers[0].experiment.dir).parent if loggers else None
        inside = folder is not None and folder.resolve().is_relative_to(self.run_dir.resolve())
        return str(folder) if inside else None

    def _median(self, name: str) -> float | None:
        """Over the table's rows but the first, which holds compilation and warm-up, where there are more."""
        values = self.table.column(name)[1] if self.table is not None else []
        return statistics.median(values[1:] or values) if values else None


def _what_ran(trainer: Trainer, pl_module: Any) -> dict[str, Any]:
    return {
        "seq_len": getattr(pl_module, "seq_len", None),
        "model": getattr(pl_module, "model_name", type(pl_module).__name__),
        "parameters": sum(parameter.numel() for parameter in pl_module.parameters()),
        "attention": getattr(pl_module, "attention", None),
        "device": device_name(pl_module.device),
        "precision": trainer.precision,
    }


def _validation(trainer: Trainer, pl_module: Any) -> dict[str, float | None]:
    """What the newest validation found; `val_loss` is None before any."""
    found = {re.sub("^val[/_]", "", name): value for name, value in validation_of(trainer, pl_module).items()}
    return {"val_loss": found.pop("loss", None), **found}


def _peak_memory(pl_module: Any) -> dict[str, Any]:
    return {
        "peak_memory_gib": peak_memory(memory_use(pl_module.device)),
        "peak_memory_of": "device" if pl_module.device.type == "cuda" else "process",
    }
