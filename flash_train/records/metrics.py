"""A run's table of metrics by step, as CSV."""

import csv
import io
import os
from collections.abc import Mapping
from pathlib import Path

from flash_train.checks import cut
from flash_train.files import write_text

Rows = dict[int, dict[str, float | None]]


def read_column(path: str | os.PathLike[str], name: str) -> tuple[list[int], list[float]]:
    """Return the steps at which a metric was measured, and its values; empty if there is no such file.

    Does not write, so a run may be writing the file.
    """
    return _column(_read(Path(path))[1], name)


def _column(rows: Rows, name: str) -> tuple[list[int], list[float]]:
    values = {step: value for step, row in sorted(rows.items()) if (value := row.get(name)) is not None}
    return list(values), list(values.values())


def _read(path: Path) -> tuple[list[str], Rows]:
    """Return the columns and rows of a table; no rows if there is no file.

    Raises:
        ValueError: the file is damaged or is not a table of metrics; the message names the line if it is known.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder, and must be a table of metrics; move it away to begin a new one")
    text = path.read_bytes() if path.exists() else b""
    whole = text[: text.rfind(b"\n") + 1]  # a crash may have cut the last line, or a run is writing it
    remedy = "restore it, or move it away to begin a new one"
    try:
        lines = list(csv.reader(io.StringIO(whole.decode("utf-8"))))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is damaged ({error}); {remedy}") from error
    columns, *rest = lines or [["step"]]
    if not columns or columns[0] != "step":
        raise ValueError(f"{path} is not a table of metrics: its first column is not 'step'; {remedy}")
    rows: Rows = {}
    for number, line in enumerate(rest, start=2):
        if not line:
            continue
        try:
            if len(line) != len(columns):
                raise ValueError(f"it has {len(line)} field{'s' * (len(line) != 1)} and the header {len(columns)}")
            step, *values = line
            pairs = zip(columns[1:], values, strict=True)
            rows[int(step)] = {name: float(value) if value else None for name, value in pairs}
        except ValueError as error:
            raise ValueError(f"{path} is damaged in line {number} ({cut(str(error))}); {remedy}") from error
    return columns, rows


class MetricsTable:
    """`metrics.csv`: a row per step, a column per metric, floats with all their digits, empty cells if not measured.

    `write` writes a row to the file at once. Metrics of a step that has a row join this row; a new metric becomes a new
    column. If writing fails (OSError), rows stay in memory, and the next `write` or `flush` that succeeds writes them.

    Args:
        path: the file; read if it exists, then rewritten.
        up_to_step: rows past this step are dropped: a run that resumes from a checkpoint computes them again.
    """

    def __init__(self, path: str | os.PathLike[str], *, up_to_step: int | None = None) -> None:
        self.path = Path(path)
        self.columns, rows = _read(self.path)
        self.rows = {step: row for step, row in rows.items() if up_to_step is None or step <= up_to_step}
        self._is_behind = True  # the file lacks a row or has one too many
        self.flush()

    def write(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Add `metrics` to the row of `step`. A NumPy number or a tensor of one element is stored as a float."""
        metrics = {name: None if value is None else float(value) for name, value in metrics.items()}
        appends = not self._is_behind and step not in self.rows and all(name in self.columns for name in metrics)
        self.rows.setdefault(step, {}).update(metrics)
        self.columns += [name for name in metrics if name not in self.columns]
        self._is_behind = True  # until the line is written as a whole
        if appends:
            with open(self.path, "a", encoding="utf-8", newline="") as file:
                file.write(self._format([step]))
            self._is_behind = False
        self.flush()

    def flush(self) -> None:
        """Rewrite the file if it lacks rows."""
        if self._is_behind:
            self._rewrite()
            self._is_behind = False

    def column(self, name: str) -> tuple[list[int], list[float]]:
        """Return the steps at which `name` was measured, and its values."""
        return _column(self.rows, name)

    def _rewrite(self) -> None:
        header = io.StringIO()
        csv.writer(header, lineterminator="\n").writerow(self.columns)
        write_text(self.path, header.getvalue() + self._format(sorted(self.rows)))

    def _format(self, steps: list[int]) -> str:
        lines = io.StringIO()
        writer = csv.writer(lines, lineterminator="\n")
        for step in steps:
            values = [self.rows[step].get(name) for name in self.columns[1:]]
            writer.writerow([step, *("" if value is None else repr(value) for value in values)])
        return lines.getvalue()
