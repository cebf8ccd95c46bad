"""Failures of a run that are no bugs: a diverging loss and exhausted memory, each reported in one line."""

import pickle
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import DictConfig

from flash_train.cli.components.loggers import log_artifact
from flash_train.cli.config.errors import OutOfMemoryError, UsageError, is_out_of_memory
from flash_train.cli.config.paths import holds_checkpoint
from flash_train.cli.memory.check import alternatives, flash_runs, total_memory_of
from flash_train.cli.run.build import Run
from flash_train.cli.run.report import finish
from flash_train.data.errors import DataError
from flash_train.files import write_bytes, write_text
from flash_train.profiling.memory.prediction import Prediction, predict
from flash_train.profiling.memory.step import Step
from flash_train.records.markdown import markdown_table
from flash_train.records.memory_use import bytes_in_words
from flash_train.training import NonFiniteLossError
from flash_train.training.callbacks import SnapshotOnError

REPORT, SNAPSHOT = "out_of_memory.md", "out_of_memory.pickle"


@dataclass
class WatchedRun:
    """What a report on a failure needs. The fields are set once the run is built."""

    step: Step | None = None
    device: torch.device | None = None
    run_dir: Path | None = None
    watch: SnapshotOnError = field(default_factory=SnapshotOnError)
    logger: Logger | None = None
    rank: int = 0
    ranks: int = 1

    def begin(self, step: Step, run: Run, run_dir: Path) -> None:
        """Set the fields, and have the allocator's snapshot taken if memory runs out."""
        self.step, self.device, self.run_dir, self.logger = step, run.device, run_dir, run.logger
        self.rank, self.ranks = run.trainer.global_rank, run.trainer.world_size
        run.trainer.strategy.exit_status = exit_status  # type: ignore[attr-defined]
        run.trainer.callbacks.insert(0, self.watch)  # type: ignore[attr-defined]


@contextmanager
def known_failures(config: DictConfig) -> Iterator[WatchedRun]:
    """Turn a diverging loss, exhausted memory and lost data into a `UsageError`; other errors keep their traceback.

    If the run has begun, exhausted memory leaves a table of the step's memory in `out_of_memory.md`, and on CUDA the
    allocator's snapshot for PyTorch's viewer. The error names a setting that takes less memory.

    Every rank finds a diverging loss, and the first one reports it. If memory runs out on one of several ranks, the
    error names it.
    """
    watched = WatchedRun()
    try:
        yield watched
    except NonFiniteLossError as error:
        if watched.rank > 0:
            sys.exit(UsageError.status)
        raise UsageError(str(error)) from error
    except DataError as error:
        # The message of a worker process begins with its traceback.
        text = str(error).strip().splitlines()[-1].rpartition("DataError: ")[2]
        if watched.run_dir is not None and holds_checkpoint(watched.run_dir):
            text += f"; once it is repaired, run_dir={watched.run_dir} resume=last continues the run"
        raise UsageError(text) from error
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        on_host = isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)
        of_cuda = watched.device is not None and watched.device.type == "cuda"
        on_gpu = isinstance(error, torch.OutOfMemoryError) or (of_cuda and not on_host)
        kind = "GPU memory" if on_gpu else "memory"
        hint = "try memory=checkpoint, a smaller batch_size with accumulate, or precision=bf16-true"
        if watched.step is not None:
            hint = _smaller_setting(watched.step, watched.device)
            hint += f" ({', '.join(_write_report(watched, error))} in {watched.run_dir})"
            finish(watched.logger, OutOfMemoryError.status)
        where = f"seq_len={config.seq_len} batch_size={config.batch_size} memory={config.memory.mode}"
        on_rank = f" on rank {watched.rank}" if watched.ranks > 1 else ""
        raise OutOfMemoryError(f"out of {kind}{on_rank} at {where}: {hint}") from error


def exit_status(error: BaseException) -> int:
    """The status with which a run exits after an exception."""
    if isinstance(error, KeyboardInterrupt | SIGTERMException):
        return 128 + (signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
    return OutOfMemoryError.status if is_out_of_memory(error) else UsageError.status


def _smaller_setting(step: Step, device: torch.device | None) -> str:
    """The first setting that fits the device and takes at least a tenth less, and its predicted memory."""
    own = predict(step).peak_bytes
    most = 0.9 * own
    if device is not None and device.type == "cuda":
        most = min(most, total_memory_of(device))
    for setting, other in alternatives(step, flash_runs(step, device)):
        if (size := predict(other).peak_bytes) <= most:
            return f"{setting} takes {bytes_in_words(size)} instead of {bytes_in_words(own)}"
    return "only a smaller model or a shorter row takes less"


def _write_report(watched: WatchedRun, error: BaseException) -> list[str]:
    """Write the files that explain the failure, and log them to W&B; returns their names."""
    assert watched.step is not None and watched.run_dir is not None
    names = [REPORT]
    write_text(watched.run_dir / REPORT, _table(predict(watched.step), error))
    if watched.watch.snapshot is not None:
        names.append(SNAPSHOT)
        write_bytes(watched.run_dir / SNAPSHOT, pickle.dumps(watched.watch.snapshot))
    log_artifact(watched.logger, "out-of-memory", [watched.run_dir / name for name in names])
    return names


def _table(prediction: Prediction, error: BaseException) -> str:
    kinds = sorted(prediction.peak.parts, key=lambda kind: -prediction.peak.parts[kind])
    lines = ["# Out of memory", "", f"    {str(error).splitlines()[0] if str(error) else type(error).__name__}", ""]
    lines += ["The predicted memory of the step, at its peak and at the peak of each phase:", ""]
    columns = [prediction.peak, *prediction.phases.values()]
    rows = [[kind, *(bytes_in_words(m.parts.get(kind, 0)) for m in columns)] for kind in kinds]
    rows.append(["all", *(bytes_in_words(m.total) for m in columns)])
    return "\n".join(lines) + "\n" + markdown_table(["part", "peak", *prediction.phases], rows)
