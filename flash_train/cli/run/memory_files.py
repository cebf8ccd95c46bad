"""What a recorded step leaves behind: the report's files, a line on the terminal, an artifact at W&B."""

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from flash_train.cli.run.build import Run
from flash_train.cli.run.loggers import log_artifact
from flash_train.cli.run.memory_check import step_of
from flash_train.files import write_bytes
from flash_train.model.recompute import MEMORY_MODES
from flash_train.profiling.memory.plot import plot_memory
from flash_train.profiling.memory.prediction import predict
from flash_train.profiling.memory.report import report, summary, write_report
from flash_train.records import device_name, versions
from flash_train.training.callbacks import RecordedStep


def write_memory(config: DictConfig, parts: Run, recorded: RecordedStep, folder: Path) -> None:
    """The report's files, and one line of it to the terminal."""
    model, device = parts.module.model.config, parts.module.device
    step = replace(step_of(config, model, parts.attention[0], device), lengths=recorded.lengths)
    found = report(
        recorded.profile, predict(step), step, allocated=recorded.allocated_bytes, reserved=recorded.reserved_bytes
    )
    found = {"settings": settings(config, parts), **found, "device": device_name(device), "versions": versions()}
    lengths = sorted({max(2, step.seq_len * 2**i // 8) for i in range(7)})
    curves = {
        mode: (lengths, [predict(replace(step, memory=mode, seq_len=n, lengths=None)).peak_bytes for n in lengths])
        for mode in MEMORY_MODES
    }
    title = f"{model.name}, {step.seq_len:,} tokens, {step.precision}, memory={step.memory}, {parts.attention[0]}"
    folder.mkdir(parents=True, exist_ok=True)
    picture = plot_memory(
        folder / "memory.png", recorded.profile.moments, curves,
        (step.seq_len, found["measured_peak_bytes"], step.memory), title,
    )  # fmt: skip
    written = [*write_report(folder, found, f"Memory of a training step: {title}", picture), picture]
    if recorded.snapshot is not None:
        written.append(folder / "snapshot.pickle")
        write_bytes(written[-1], pickle.dumps(recorded.snapshot))
    log_artifact(parts.logger, "memory", written)
    print(f"{summary(found)}\n{folder}: {', '.join(path.name for path in written)}")


def settings(config: DictConfig, parts: Run) -> dict[str, Any]:
    chosen = {"model": config.model.name, "attention": parts.attention[0], "memory": config.memory.mode}
    return chosen | {key: config[key] for key in ("seq_len", "batch_size", "accumulate", "precision")}
