"""The table that `-m` prints at its end: a row per run with its swept values, status and results."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flash_train.cli.launch.outcome import Status


@dataclass(frozen=True)
class EndedRun:
    """A run of a sweep that has ended. `name` lists its swept values. `folder` may lack summary.json."""

    name: str
    status: Status
    folder: Path | None = None


#: header, entry of summary.json, and how the value is written
COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("steps", "steps", str),
    ("train loss", "train_loss", "{:.4f}".format),
    ("val loss", "val_loss", "{:.4f}".format),
    ("tokens/s", "tokens_per_second", "{:,.0f}".format),
    ("MFU", "mfu", "{:.1%}".format),
    ("peak GiB", "peak_memory_gib", "{:.2f}".format),
)


def run_table(runs: Sequence[EndedRun]) -> str:
    """The table as aligned columns. A column without any value is left out; a missing value is a dash."""
    summaries = [_summary(run.folder) for run in runs]
    shown = [column for column in COLUMNS if any(summary.get(column[1]) is not None for summary in summaries)]
    rows = [["run", "swept", "status", *(header for header, _, _ in shown)]]
    for number, (run, summary) in enumerate(zip(runs, summaries, strict=True)):
        values = [(summary.get(entry), write) for _, entry, write in shown]
        measured = ["-" if value is None else write(value) for value, write in values]
        rows.append([str(number), run.name or "-", run.status, *measured])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = 3  # the first columns are text, aligned left; numbers are aligned right
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _summary(folder: Path | None) -> dict[str, Any]:
    """The run's summary.json; empty if it has none, as a run that could not begin."""
    file = folder / "summary.json" if folder else None
    if file is None or not file.is_file():
        return {}
    found = json.loads(file.read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else {}
