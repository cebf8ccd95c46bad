"""Recorded steps of a run: which steps are recorded, and the report on the memory of each."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from omegaconf import DictConfig

from flash_train.cli.components.loggers import log_artifact
from flash_train.cli.memory.check import step_of
from flash_train.cli.memory.parallel_choice import of_plan
from flash_train.cli.run.build import Run
from flash_train.files import write_bytes
from flash_train.model.recompute import MEMORY_MODES
from flash_train.output import say
from flash_train.profiling.memory.plot import plot_memory
from flash_train.profiling.memory.prediction import predict
from flash_train.profiling.memory.report import report, summary, write_report
from flash_train.records import device_name, versions
from flash_train.training.callbacks import ClosingSample, MemorySnapshot, MissedValidation, RecordedStep, RunRecord


def record_every(steps: int, config: DictConfig, run: Run, run_dir: Path) -> None:
    """Record one step out of `steps`, and write the report on each to its own folder."""

    def write(recorded: RecordedStep) -> None:
        folder = run_dir / "memory" / f"step-{recorded.step:06}"
        with unwritten_is_said(folder):
            write_memory(config, run, recorded, folder)

    run.trainer.callbacks.append(MemorySnapshot(write, every=steps))  # type: ignore[attr-defined]


@contextmanager
def unwritten_is_said(folder: Path) -> Iterator[None]:
    """Print a line if the files of a report cannot be written, as on a full disk: the run continues without them."""
    try:
        yield
    except OSError as error:
        say(f"{folder} not written ({error.strerror or error}); the run continues")


def only_measure(trainer: Trainer, callback: Callback) -> None:
    """Replace the run's validation and record by a callback that measures."""
    trainer.limit_val_batches = 0
    recording = (RunRecord, ClosingSample, MissedValidation)
    kept = [c for c in trainer.callbacks if not isinstance(c, recording)]  # type: ignore[attr-defined]
    trainer.callbacks = [*kept, callback]  # type: ignore[attr-defined]


def write_memory(config: DictConfig, run: Run, recorded: RecordedStep, folder: Path) -> None:
    """Write the files of the report on a recorded step, log them to W&B, and print a line."""
    model, device = run.module.model.config, run.module.device
    step = of_plan(step_of(config, model, run.attention[0], device), run.plan)
    chosen = {"keep": run.module.model.keep, "offload": run.module.model.offload}
    step = replace(step, lengths=recorded.lengths, row_entries=run.data.info["capacity"], **chosen)
    found = report(
        recorded.profile, predict(step), step, allocated=recorded.allocated_bytes, reserved=recorded.reserved_bytes
    )
    found = {"settings": settings(config, run), **found, "device": device_name(device), "versions": versions()}
    whole = replace(step, lengths=None, row_entries=None)
    lengths = sorted({max(2, step.seq_len * 2**i // 8) for i in range(7)})
    curves = {
        mode: (lengths, [predict(replace(whole, memory=mode, seq_len=n)).peak_bytes for n in lengths])
        for mode in MEMORY_MODES
    }
    title = f"{model.name}, {step.seq_len:,} tokens, {step.precision}, memory={step.memory}, {run.attention[0]}"
    note = "; the prediction is for the model without compile=true" if config.compile else ""
    title += note
    folder.mkdir(parents=True, exist_ok=True)
    picture = plot_memory(
        folder / "memory.png", recorded.profile.moments, curves,
        (step.seq_len, found["measured_peak_bytes"], step.memory), title,
    )  # fmt: skip
    written = [*write_report(folder, found, f"Memory of a training step: {title}", picture), picture]
    if recorded.snapshot is not None:
        written.append(folder / "snapshot.pickle")
        write_bytes(written[-1], pickle.dumps(recorded.snapshot))
    log_artifact(run.logger, "memory", written)
    print(f"{summary(found)}{note}\n{folder}: {', '.join(path.name for path in written)}")


def settings(config: DictConfig, run: Run) -> dict[str, Any]:
    """The settings that the memory of a step depends on most, for its record."""
    chosen = {"model": config.model.name, "attention": run.attention[0], "memory": config.memory.mode}
    return chosen | {key: config[key] for key in ("seq_len", "batch_size", "accumulate", "precision")}
