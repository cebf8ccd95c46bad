"""The end of a run's output: a short table of results, and a text that the model generates."""

import unicodedata
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from flash_train.distributed.sharding import is_sharded
from flash_train.model.generate import evaluating
from flash_train.output import STDOUT
from flash_train.training.callbacks.base import find_callback
from flash_train.training.callbacks.progress import short
from flash_train.training.callbacks.record import RunRecord


class ClosingSample(Callback):
    """Prints the summary of `RunRecord`, which must run before this callback, as a table, then a generated text.

    Args:
        generate: takes the trained module and returns a text; called in evaluation mode under the run's precision, but
            not after an interruption. None prints only the table.
        console: where to print; None is standard output, and text that cannot be written there is dropped.
    """

    def __init__(
        self, generate: Callable[[LightningModule], str] | None = None, console: Console | None = None
    ) -> None:
        self.generate = generate
        self.console = console or Console(file=STDOUT)

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        record = find_callback(trainer, RunRecord, before=self)
        if record is None:
            raise ValueError(
                "ClosingSample needs RunRecord before it: Trainer(callbacks=[..., RunRecord(...), ClosingSample()])"
            )
        self._record = record

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        sharded = is_sharded(pl_module)  # then all ranks generate together, and the first prints
        if not trainer.is_global_zero and not sharded:
            return
        finished = False
        if trainer.is_global_zero:
            summary = self._record.summary
            self.console.print(summary_table(summary))
            finished = summary["status"] == "finished"
        if sharded:
            finished = trainer.strategy.broadcast(finished)
        if self.generate is not None and finished:
            # With whole weights on this rank alone: without DDP's wrapper the module does not communicate.
            with evaluating(pl_module), trainer.precision_plugin.forward_context():
                text = self.generate(pl_module)
            if not trainer.is_global_zero:
                return
            self.console.print(
                Panel(Text(printable(text)), title="sample", title_align="left", box=box.ROUNDED, border_style="dim")
            )


def printable(text: str) -> str:
    """Replace control characters, which a terminal would obey, by U+FFFD; newlines and tabs stay."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _val_loss(summary: dict) -> str:
    tokens = f" on {summary['val_tokens']:,} tokens" if summary.get("val_tokens") else ""
    return f"{summary['val_loss']:.4f}{tokens}"


def summary_table(summary: dict) -> Table:
    """Return the summary of a run as a table with two columns; entries without a value are left out."""
    formats = {
        "model": lambda s: f"{s['model']}, {short(s['parameters'])} parameters",
        "attention": lambda s: s["attention"],
        "device": lambda s: f"{s['device']}, {s['precision']}",
        "steps": lambda s: f"{s['steps']:,} of {s['max_steps']:,}" if s["max_steps"] > 0 else f"{s['steps']:,}",
        "train_loss": lambda s: f"{s['train_loss']:.4f}",
        "val_loss": _val_loss,
        "bits_per_byte": lambda s: f"{s['bits_per_byte']:.4f}",
        "answer_accuracy": lambda s: f"{s['answer_accuracy']:.1%}",
        "chance_level": lambda s: f"{s['chance_level']:.1%}",
        "tokens_per_second": lambda s: short(s["tokens_per_second"]),
        "mfu": lambda s: f"{s['mfu']:.1%}",
        "peak_memory_gib": lambda s: f"{s['peak_memory_gib']:.2f} GiB ({s['peak_memory_of']})",
        "run_dir": lambda s: s["run_dir"],
    }
    labels = {
        "tokens_per_second": "tokens/s",
        "mfu": "MFU",
        "peak_memory_gib": "peak memory",
        "run_dir": "run directory",
    }
    table = Table(box=box.SIMPLE_HEAD, show_header=False, title=f"run {summary['status']}", title_justify="left")
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, format_ in formats.items():
        if summary.get(name) is not None:
            table.add_row(labels.get(name, name.replace("_", " ")), Text(format_(summary)))
    return table
