"""Writes a run's files: metrics.csv, summary.json and the plots; for a validation alone, validation.json."""

import json
import os
import re
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException

from flash_train.files import remove_temporary, write_json
from flash_train.output import say
from flash_train.precision import name_of
from flash_train.records import MetricsTable, device_name, memory_use, peak_memory, plot_run, versions
from flash_train.training.callbacks.base import find_callback, is_trial, validation_metrics
from flash_train.training.callbacks.stop import SaveOnSignal
from flash_train.training.callbacks.throughput import Throughput

METRICS, SUMMARY = "metrics.csv", "summary.json"
PLOTS = ("loss.png", "throughput.png", "memory.png")


def is_unfinished(run_dir: Path) -> bool:
    """Whether a run directory has the summary of a run that did not finish."""
    try:
        status = json.loads((run_dir / SUMMARY).read_text(encoding="utf-8"))["status"]
    except FileNotFoundError:
        return False
    except (ValueError, KeyError, TypeError):  # damaged, so the run may not have finished
        return True
    return status != "finished"


class RunRecord(Callback):
    """Keeps the files of a run up to date in `run_dir`.

    `metrics.csv` gets a row per measurement of `Throughput`, which must run before this callback, and per validation.
    A resumed run drops the rows after its checkpoint and appends. The status in `summary.json` is `running`, then
    `finished`, `interrupted` (by a signal) or `failed` (with the error). The plots are drawn at the end. If a file
    cannot be written, for example because the disk is full, the callback prints a line and the run continues; it
    writes the missing rows as soon as it can. `Trainer.validate` changes none of these files and writes
    `validation.json`. With `Trainer(fast_dev_run=...)` it writes nothing, and keeps the record of an earlier run.

    It works with every module that `Throughput` supports; facts that the module lacks are null in the summary.

    Args:
        run_dir: created if it doesn't exist.
        extra: more entries for the summary, such as a description of the data; plain values.
    """

    def __init__(self, run_dir: str | os.PathLike[str], extra: Mapping[str, Any] | None = None) -> None:
        self.run_dir = Path(run_dir)
        self.extra = dict(extra or {})
        self.summary: dict[str, Any] = {}
        self.table: MetricsTable | None = None
        self._is_resumed = False
        self._unwritten: set[str] = set()

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        throughput = find_callback(trainer, Throughput, before=self)
        if throughput is None:
            raise ValueError("RunRecord needs Throughput before it: Trainer(callbacks=[Throughput(), RunRecord(...)])")
        self._throughput = throughput

    # -- metrics.csv, on the first rank

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        if trainer.is_global_zero and not is_trial(trainer):
            remove_temporary(self.run_dir, (METRICS, SUMMARY, *PLOTS))
            self.table = MetricsTable(self.run_dir / METRICS, up_to_step=trainer.global_step)
            self._is_resumed = bool(self.table.rows)
            self._throughput.listeners.append(self._write_row)
            self._summarise(trainer, pl_module, "running")
            if watch := getattr(trainer.strategy, "watch", None):
                watch.before_exit.append(partial(self._end_with, trainer))

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if self.table is not None:  # a run that resumes from this checkpoint reads earlier rows from the file
            self._attempt(METRICS, self.table.flush)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.sanity_checking or is_trial(trainer) or not trainer.is_global_zero:
            return
        if trainer.state.fn == "validate":
            self._write_validation(trainer, pl_module)
        elif self.table is not None and (validation := validation_metrics(trainer, pl_module)):
            self._write_row(trainer.global_step, validation)

    def lacks_validation(self, step: int) -> bool:
        """Whether the run was resumed and its table has no validation at `step`; False on all ranks but the first."""
        return self._is_resumed and self.table is not None and not _has_validation(self.table.rows.get(step, {}))

    # -- summary.json and plots

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        signals = find_callback(trainer, SaveOnSignal)
        received = signals is not None and signals.received
        self._close(trainer, pl_module, "interrupted" if received and self._is_incomplete(trainer) else "finished")

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        if isinstance(exception, KeyboardInterrupt | SIGTERMException):
            self._close(trainer, pl_module, "interrupted")
        else:
            message = str(exception).strip() or type(exception).__name__
            error = f"{type(exception).__name__}: {message}"
            try:
                self._close(trainer, pl_module, "failed", error=error)
            except RuntimeError as lost:  # a lost device fails every call: keep the entries from before
                exception.add_note(f"The run's record is incomplete: {lost}")
                if self.table is not None:
                    self.summary |= {"status": "failed", "error": error, "steps": trainer.global_step}
                    write_json(self.run_dir / SUMMARY, self.summary)

    def _end_with(self, trainer: Trainer, reason: str) -> None:
        """Note that another rank's failure ends this process."""
        self.summary |= {"status": "failed", "error": reason, "steps": trainer.global_step}
        self._attempt(SUMMARY, lambda: write_json(self.run_dir / SUMMARY, self.summary))

    def _close(self, trainer: Trainer, pl_module: Any, status: str, **entries: Any) -> None:
        # A run that fails before it trains must not replace the record of an earlier one.
        began = is_trial(trainer) or self.table is not None or not (self.run_dir / SUMMARY).exists()
        if trainer.is_global_zero and began and trainer.state.fn == "fit":
            try:
                self._draw(trainer, pl_module)
            finally:  # last, so that the files of a run whose status is "finished" are complete
                self._summarise(trainer, pl_module, status, **entries)

    def _draw(self, trainer: Trainer, pl_module: Any) -> None:
        if self.table is not None:
            table, model, seq_len = self.table, _model_name(pl_module), _seq_len(trainer, pl_module)
            title = f"{model}, {seq_len:,} tokens" if seq_len else str(model)
            self._attempt("plots", table.flush, lambda: plot_run(table, self.run_dir, title=title))

    def _write_row(self, step: int, row: Mapping[str, float | None]) -> None:
        assert self.table is not None
        self._attempt(METRICS, partial(self.table.write, step, row))

    def _attempt(self, name: str, *writes: Callable[[], Any]) -> None:
        """Write a file. If that fails, print one line; no more lines until a write has succeeded again."""
        try:
            for write in writes:
                write()
        except OSError as error:
            if name not in self._unwritten:
                say(f"{self.run_dir}: {name} not written ({error.strerror or error}); the run continues")
            self._unwritten.add(name)
        else:
            self._unwritten.discard(name)

    def _is_incomplete(self, trainer: Trainer) -> bool:
        """Whether steps or the last validation are missing."""
        row = self.table.rows.get(trainer.global_step, {}) if self.table is not None else {}
        return trainer.global_step != trainer.max_steps or (trainer.enable_validation and not _has_validation(row))

    def _summarise(self, trainer: Trainer, pl_module: Any, status: str, **entries: Any) -> None:
        result = getattr(pl_module, "last_step", None)
        self.summary = {
            "status": status,
            **entries,
            **_run_description(trainer, pl_module),
            "steps": trainer.global_step,
            "max_steps": trainer.max_steps,
            "train_loss": result.loss.item() if result else self._newest("train/loss"),
            **_validation_entries(validation_metrics(trainer, pl_module) or self._newest_validation()),
            **self._step_times(),
            "tokens_per_second": self._median("throughput/tokens_per_second"),
            "mfu": self._median("throughput/mfu"),
            **_peak_memory(pl_module),
            "run_dir": str(self.run_dir.resolve()),
            "wandb_dir": self._wandb_dir(trainer),
            "versions": versions(),
            **self.extra,
        }
        if not is_trial(trainer):
            self._attempt(SUMMARY, lambda: write_json(self.run_dir / SUMMARY, self.summary))

    def _newest(self, name: str) -> float | None:
        """Return the last measured value of a metric; it may be from before the run was resumed."""
        values = self.table.column(name)[1] if self.table is not None else []
        return values[-1] if values else None

    def _newest_validation(self) -> dict[str, float]:
        names = self.table.columns if self.table is not None else []
        found = {name: self._newest(name) for name in names if name.startswith("val/")}
        return {name: value for name, value in found.items() if value is not None}

    def _write_validation(self, trainer: Trainer, pl_module: Any) -> None:
        """Write the results of `Trainer.validate`, with the checkpoint that was validated."""
        found = {
            "checkpoint": str(Path(trainer.ckpt_path).resolve()) if trainer.ckpt_path else None,
            "steps": getattr(pl_module, "loaded_step", None),
            **_run_description(trainer, pl_module),
            **_validation_entries(validation_metrics(trainer, pl_module)),
            **_peak_memory(pl_module),
            "versions": versions(),
            **self.extra,
        }
        write_json(self.run_dir / "validation.json", found)

    def _step_times(self) -> dict[str, float]:
        """Return the median seconds per optimizer step, and per part of it that was measured."""
        names = self.table.columns if self.table is not None else []
        medians = {name.removeprefix("time/"): self._median(name) for name in names if name.startswith("time/")}
        return {name: seconds for name, seconds in medians.items() if seconds is not None}

    def _wandb_dir(self, trainer: Trainer) -> str | None:
        """Return the folder with W&B's files for this run, if it is inside `run_dir`."""
        loggers = [logger for logger in trainer.loggers if isinstance(logger, WandbLogger)]
        folder = Path(loggers[0].experiment.dir).parent if loggers else None
        inside = folder is not None and folder.resolve().is_relative_to(self.run_dir.resolve())
        return str(folder) if inside else None

    def _median(self, name: str) -> float | None:
        """Return the median over the rows; the first of several is left out, as it includes compilation and warm-up."""
        values = self.table.column(name)[1] if self.table is not None else []
        return statistics.median(values[1:] or values) if values else None


def _run_description(trainer: Trainer, pl_module: Any) -> dict[str, Any]:
    model = getattr(pl_module, "model", None)
    return {
        "seq_len": _seq_len(trainer, pl_module),
        "model": _model_name(pl_module),
        "parameters": sum(parameter.numel() for parameter in pl_module.parameters()),
        "attention": getattr(pl_module, "attention", None),
        "device": device_name(pl_module.device),
        "precision": "fp8" if getattr(model, "fp8", None) else name_of(trainer.precision),
    }


def _model_name(pl_module: Any) -> str:
    return str(getattr(pl_module, "model_name", type(pl_module).__name__))


def _seq_len(trainer: Trainer, pl_module: Any) -> int | None:
    """Return the tokens per row in the newest batch; before the first batch, in the data module."""
    seq_len = getattr(pl_module, "seq_len", None)
    return seq_len or getattr(trainer.datamodule, "seq_len", None)  # type: ignore[attr-defined]


def _has_validation(row: Mapping[str, Any]) -> bool:
    """Whether a row of the table has validation metrics; modules name them `val/loss`, `val_loss` and so on."""
    return any(value is not None for name, value in row.items() if name.startswith("val"))


def _validation_entries(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Return validation metrics by their names in the summary; `val_loss` is None if there was no validation."""
    named = {re.sub("^val[/_]", "", name): value for name, value in metrics.items()}
    return {"val_loss": named.pop("loss", None), **named}


def _peak_memory(pl_module: Any) -> dict[str, Any]:
    return {
        "peak_memory_gib": peak_memory(memory_use(pl_module.device)),
        "peak_memory_of": "device" if pl_module.device.type == "cuda" else "process",
    }
