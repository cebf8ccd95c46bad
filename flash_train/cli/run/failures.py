"""What can go wrong while a run is under way and is no bug: told in one line, like a mistake in the configuration."""

import os
import pickle
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig

from flash_train.cli.config.errors import OutOfMemoryError, UsageError, is_out_of_memory
from flash_train.cli.run.build import Run
from flash_train.cli.run.loggers import log_artifact
from flash_train.cli.run.memory_check import alternatives, capacity, flash_runs
from flash_train.cli.run.report import finish
from flash_train.files import write_bytes, write_text
from flash_train.profiling.memory.prediction import Prediction, predict
from flash_train.profiling.memory.step import Step
from flash_train.records.markdown import markdown_table
from flash_train.records.memory_use import bytes_in_words
from flash_train.training import NonFiniteLossError
from flash_train.training.callbacks import SnapshotOnError

REPORT, SNAPSHOT = "out_of_memory.md", "out_of_memory.pickle"
FIRST_RANK_SECONDS = 10.0  # for its pictures and W&B


@dataclass
class UnderWay:
    """What is known of the run by now: the step that it takes and on what, where its files are, what watches it, its
    logger, and which of its processes this is."""

    step: Step | None = None
    device: torch.device | None = None
    run_dir: Path | None = None
    watch: SnapshotOnError = field(default_factory=SnapshotOnError)
    logger: Logger | None = None
    rank: int = 0

    def begin(self, step: Step, parts: Run, run_dir: Path) -> None:
        """The run is built: what goes wrong from here on has a step, and is watched."""
        self.step, self.device, self.run_dir, self.logger = step, parts.device, run_dir, parts.logger
        self.rank = parts.trainer.global_rank
        parts.trainer.callbacks.insert(0, self.watch)  # type: ignore[attr-defined]


@contextmanager
def known_failures(config: DictConfig) -> Iterator[UnderWay]:
    """Turn a diverging loss and exhausted memory into a `UsageError`; everything else keeps its traceback.

    Where the run has said what its step is, exhausted memory leaves a table of that step in `out_of_memory.md`, on CUDA
    with the allocator's snapshot for PyTorch's viewer, and the error says which setting takes less.

    Every rank finds a diverging loss: the first one tells, the others exit with the same status.
    """
    under_way, parent = UnderWay(), os.getppid()
    try:
        yield under_way
    except NonFiniteLossError as error:
        if under_way.rank > 0:
            _outlast(parent)
            sys.exit(UsageError.status)
        raise UsageError(str(error)) from error
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        on_host = isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)
        of_cuda = under_way.device is not None and under_way.device.type == "cuda"
        on_gpu = isinstance(error, torch.OutOfMemoryError) or (of_cuda and not on_host)
        kind = "GPU memory" if on_gpu else "memory"
        hint = "try memory=checkpoint, a smaller batch_size with accumulate, or precision=bf16-true"
        if under_way.step is not None:
            hint = _way_out(under_way.step, under_way.device)
            hint += f" ({', '.join(_leave_behind(under_way, error))} in {under_way.run_dir})"
            finish(under_way.logger, OutOfMemoryError.status)
        where = f"seq_len={config.seq_len} batch_size={config.batch_size} memory={config.memory.mode}"
        raise OutOfMemoryError(f"out of {kind} at {where}: {hint}") from error


def _outlast(parent: int) -> None:
    """Wait a while for the end of the process that started this one.

    It is the first rank, which has yet to write its record and tell: Lightning kills it once another rank has failed.
    """
    end = time.monotonic() + FIRST_RANK_SECONDS
    while os.getppid() == parent and time.monotonic() < end:
        time.sleep(0.05)


def _way_out(step: Step, device: torch.device | None) -> str:
    """The first setting that fits the device and takes less by a tenth, and how much."""
    own = predict(step).peak_bytes
    most = 0.9 * own
    if device is not None and device.type == "cuda":
        most = min(most, capacity(device))
    for words, other in alternatives(step, flash_runs(step, device)):
        if (size := predict(other).peak_bytes) <= most:
            return f"{words} takes {bytes_in_words(size)} in place of {bytes_in_words(own)}"
    return "only a smaller model or a shorter row takes less"


def _leave_behind(under_way: UnderWay, error: BaseException) -> list[str]:
    """Write what may help to understand, to W&B too; the names of the files."""
    assert under_way.step is not None and under_way.run_dir is not None
    names = [REPORT]
    write_text(under_way.run_dir / REPORT, _table(predict(under_way.step), error))
    if under_way.watch.snapshot is not None:
        names.append(SNAPSHOT)
        write_bytes(under_way.run_dir / SNAPSHOT, pickle.dumps(under_way.watch.snapshot))
    log_artifact(under_way.logger, "out-of-memory", [under_way.run_dir / name for name in names])
    return names


def _table(prediction: Prediction, error: BaseException) -> str:
    kinds = sorted(prediction.peak.parts, key=lambda kind: -prediction.peak.parts[kind])
    lines = ["# Out of memory", "", f"    {str(error).splitlines()[0] if str(error) else type(error).__name__}", ""]
    lines += ["What the step was predicted to take at its peak, and at the peak of each phase:", ""]
    columns = [prediction.peak, *prediction.phases.values()]
    rows = [[kind, *(bytes_in_words(m.parts.get(kind, 0)) for m in columns)] for kind in kinds]
    rows.append(["all", *(bytes_in_words(m.total) for m in columns)])
    return "\n".join(lines) + "\n" + markdown_table(["part", "peak", *prediction.phases], rows)
