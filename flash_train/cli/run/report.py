"""What a run prints before it starts (its choices and their reasons) and after its end (where its files are)."""

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig

from flash_train.cli.components.loggers import sync_hint
from flash_train.cli.config.paths import CHECKPOINTS, holds_checkpoint
from flash_train.output import counted
from flash_train.precision import PRECISIONS
from flash_train.training.callbacks.record import is_unfinished

TORCHELASTIC = "TORCHELASTIC_RUN_ID"  # an environment variable of torchrun's processes
FILES = ("config.yaml", "metrics.csv", "summary.json", "validation.json", "loss.png", "throughput.png", "memory.png")


@rank_zero_only
def announce(attention: tuple[str, str], data: dict[str, Any], notes: Mapping[str, str | None]) -> None:
    """Print the attention backend with its reason, the data, and the notes."""
    backend, reason = attention
    print(f"attention: {backend} ({reason})")
    print(f"data: {describe_data(data)}", flush=True)
    for topic, note in notes.items():
        if note:
            print(f"{topic}: {note}", flush=True)


def unused_settings(config: DictConfig) -> dict[str, str]:
    """Notes on settings that have no effect with another one, by their keys.

    They are no errors: a sweep over `precision` or `memory` may give them, and so may the options of a resumed run.
    """
    if config.validate_only:
        return {}
    notes, precision = {}, config.precision
    if config.optimizer.master not in (None, "none") and not PRECISIONS[precision].has_bf16_weights:
        master = config.optimizer.master
        notes["optimizer.master"] = f"{master} has no effect with precision={precision}, whose weights are not bf16"
    if config.precision_fp8.recipe == "rowwise" and precision != "fp8":
        notes["precision_fp8.recipe"] = f"rowwise has no effect with precision={precision}; it is for precision=fp8"
    if config.memory.mode == "none" and config.memory.keep not in (0, "auto"):  # auto: all blocks, which is true
        notes["memory.keep"] = f"{config.memory.keep} has no effect with memory=none, where all blocks keep everything"
    return notes


def finish(logger: Logger | None, status: int = 0) -> None:
    """Finish the W&B run with our exit status; otherwise the next run of `-m` would continue it."""
    if isinstance(logger, WandbLogger):
        logger.experiment.finish(exit_code=status)


def describe_data(info: dict[str, Any]) -> str:
    """One line about `PackedDataModule.info`."""
    train = info.get("train")
    if train is None:  # the corpus generates its rows during the run
        return f"{info['corpus']}, rows of {info['seq_len']:,} tokens"
    val, streamed = info["val"], "streamed, its first chunk has " if info.get("streaming") else ""
    return (
        f"{info['corpus']}, {streamed}{_documents(train)} in {counted(train['rows'], 'row')} of {info['seq_len']:,} "
        f"({train['packing_efficiency']:.2%} used); "
        f"held out for validation: {_documents(val)} in {counted(val['rows'], 'row')}; hash {info['corpus_hash'][:12]}"
    )


def program() -> str:
    """Return how the running command is called: the script by Python, or the installed command by its name."""
    called = Path(sys.argv[0])
    if TORCHELASTIC in os.environ:
        return f"torchrun … {called}"  # its own arguments are not known here
    return f"python {called}" if called.suffix == ".py" else called.name


def _documents(part: Mapping[str, Any]) -> str:
    return f"{counted(part['documents'], 'document')}, {_count(part['tokens'])} tokens"


def _count(number: int) -> str:
    return f"{number:,}" if number < 1_000_000 else f"{number / 1e6:,.1f}M"


@rank_zero_only
def report_files(trainer: Trainer, logger: Logger | None, run_dir: Path) -> None:
    """Print where the run's files are, and how to continue it."""
    there = [name for name in FILES if (run_dir / name).is_file()]
    there += sorted(f"{CHECKPOINTS}/{path.name}" for path in (run_dir / CHECKPOINTS).glob("*.ckpt"))
    print(f"{run_dir}: {', '.join(there)}")
    if trainer.state.fn == "validate":
        print(", ".join(f"{name} {float(value):.4f}" for name, value in trainer.callback_metrics.items()))
    elif holds_checkpoint(run_dir):
        saved = (run_dir / CHECKPOINTS / f"step-{trainer.global_step:06d}.ckpt").exists()
        ended = trainer.global_step >= trainer.max_steps and saved and not is_unfinished(run_dir)
        more = f" max_steps={2 * trainer.max_steps}" if ended else ""
        print(f"to continue: {program()} {shlex.quote(f'run_dir={run_dir}')} resume=last{more}")
    if hint := sync_hint(logger, run_dir):
        print(hint)
