"""The run directory's own record: metrics.csv, summary.json, the plots; of a validation alone, validation.json."""

import json
import os
import re
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException

from flash_train.files import remove_temporary, write_json
from flash_train.output import say
from flash_train.records import MetricsTable, device_name, memory_use, peak_memory, plot_run, versions
from flash_train.training.callbacks.base import StepCallback, find_callback, validation_of
from flash_train.training.callbacks.stop import SaveOnSignal
from flash_train.training.callbacks.throughput import Throughput

METRICS, SUMMARY = "metrics.csv", "summary.json"
PLOTS = ("loss.png", "throughput.png", "memory.png")


def is_unfinished(run_dir: Path) -> bool:
    """Whether a run directory has the record of a run that never came to its end."""
    try:
        status = json.loads((run_dir / SUMMARY).read_text(encoding="utf-8"))["status"]
    except FileNotFoundError:
        return False
    except (ValueError, KeyError, TypeError):  # damaged: whether the run had ended is not known
        return True
    return status != "finished"


class RunRecord(StepCallback):
    """Keeps the files of a run up to date in `run_dir`.

    `metrics.csv` gains a row per measurement of `Throughput` (which must be among the trainer's callbacks, before
    this one) and per validation; a resumed run goes on in it, rows past the checkpoint dropped. `summary.json` says
    `running`, then `finished`, `interrupted` (a signal) or `failed` (with the error); the plots are drawn at the end.
    A file that cannot be written, as on a full disk, is said in a line and costs the run nothing else: rows are written
    as soon as they can be.
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
        self._went_on = False
        self._unwritten: set[str] = set()

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        throughput = find_callback(trainer, Throughput, before=self)
        if throughput is None:
            raise ValueError("RunRecord needs Throughput before it: Trainer(callbacks=[Throughput(), RunRecord(...)])")
        self._throughput = throughput

    # -- metrics.csv, on the first rank

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        if trainer.is_global_zero:
            remove_temporary(self.run_dir, (METRICS, SUMMARY, *PLOTS))
            self.table = MetricsTable(self.run_dir / METRICS, up_to_step=trainer.global_step)
            self._went_on = bool(self.table.rows)
            self._summarise(trainer, pl_module, "running")

    def on_step_end(self, trainer: Trainer, pl_module: Any) -> None:
        if self.table is not None and self._throughput.row_step == trainer.global_step:
            self._write_row(trainer.global_step, self._throughput.row)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if self.table is not None:  # a resumed run has the rows up to its checkpoint from the file
            self._attempt(METRICS, self.table.flush)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        if trainer.state.fn == "validate":
            self._validated(trainer, pl_module)
        elif self.table is not None and (validation := validation_of(trainer, pl_module)):
            self._write_row(trainer.global_step, validation)

    def lacks_validation(self, step: int) -> bool:
        """Whether this is a run that was resumed, and its table has no validation at `step`; on the first rank."""
        return self._went_on and self.table is not None and not _has_validation(self.table.rows.get(step, {}))

    def is_unfinished(self) -> bool:
        """Whether `run_dir` has the record of a run that never came to its end."""
        return is_unfinished(self.run_dir)

    # -- summary.json and plots

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        signals = find_callback(trainer, SaveOnSignal)
        received = signals is not None and signals.received
        self._close(trainer, pl_module, "interrupted" if received and self._owes(trainer) else "finished")

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
            try:
                self._draw(trainer, pl_module)
            finally:  # last: a run that says it is finished has everything
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
        """Write a file; where that fails, say so once, until it succeeds again."""
        try:
            for write in writes:
                write()
        except OSError as error:
            if name not in self._unwritten:
                say(f"{self.run_dir}: {name} not written ({error.strerror or error}); the run continues")
            self._unwritten.add(name)
        else:
            self._unwritten.discard(name)

    def _owes(self, trainer: Trainer) -> bool:
        """Whether steps or the last validation are still to be done."""
        row = self.table.rows.get(trainer.global_step, {}) if self.table is not None else {}
        return trainer.global_step != trainer.max_steps or (trainer.enable_validation and not _has_validation(row))

    def _summarise(self, trainer: Trainer, pl_module: Any, status: str, **entries: Any) -> None:
        result = getattr(pl_module, "last_step", None)
        self.summary = {
            "status": status,
            **entries,
            **_what_ran(trainer, pl_module),
            "steps": trainer.global_step,
            "max_steps": trainer.max_steps,
            "train_loss": result.loss.item() if result else self._newest("train/loss"),
            **_validation(validation_of(trainer, pl_module) or self._newest_validation()),
            **self._step_times(),
            "tokens_per_second": self._median("throughput/tokens_per_second"),
            "mfu": self._median("throughput/mfu"),
            **_peak_memory(pl_module),
            "run_dir": str(self.run_dir.resolve()),
            "wandb_dir": self._wandb_dir(trainer),
            "versions": versions(),
            **self.extra,
        }
        self._attempt(SUMMARY, lambda: write_json(self.run_dir / SUMMARY, self.summary))

    def _newest(self, name: str) -> float | None:
        """A metric where it was measured last, maybe before the run was resumed."""
        values = self.table.column(name)[1] if self.table is not None else []
        return values[-1] if values else None

    def _newest_validation(self) -> dict[str, float]:
        names = self.table.columns if self.table is not None else []
        found = {name: self._newest(name) for name in names if name.startswith("val/")}
        return {name: value for name, value in found.items() if value is not None}

    def _validated(self, trainer: Trainer, pl_module: Any) -> None:
        """Write what a validation by itself has measured, and of which checkpoint."""
        found = {
            "checkpoint": str(Path(trainer.ckpt_path).resolve()) if trainer.ckpt_path else None,
            "steps": getattr(pl_module, "loaded_step", None),
            **_what_ran(trainer, pl_module),
            **_validation(validation_of(trainer, pl_module)),
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
        "seq_len": _seq_len(trainer, pl_module),
        "model": _model_name(pl_module),
        "parameters": sum(parameter.numel() for parameter in pl_module.parameters()),
        "attention": getattr(pl_module, "attention", None),
        "device": device_name(pl_module.device),
        "precision": trainer.precision,
    }


def _model_name(pl_module: Any) -> str:
    return str(getattr(pl_module, "model_name", type(pl_module).__name__))


def _seq_len(trainer: Trainer, pl_module: Any) -> int | None:
    """Tokens in a row of the newest batch; before the first batch, of the data module."""
    seq_len = getattr(pl_module, "seq_len", None)
    return seq_len or getattr(trainer.datamodule, "seq_len", None)  # type: ignore[attr-defined]


def _has_validation(row: Mapping[str, Any]) -> bool:
    """Whether a row of the table has what a validation measured; modules name it `val/loss`, `val_loss` and so on."""
    return any(value is not None for name, value in row.items() if name.startswith("val"))


def _validation(found: Mapping[str, float]) -> dict[str, float | None]:
    """What a validation found; `val_loss` is None where there is none."""
    named = {re.sub("^val[/_]", "", name): value for name, value in found.items()}
    return {"val_loss": named.pop("loss", None), **named}


def _peak_memory(pl_module: Any) -> dict[str, Any]:
    return {
        "peak_memory_gib": peak_memory(memory_use(pl_module.device)),
        "peak_memory_of": "device" if pl_module.device.type == "cuda" else "process",
    }
