"""The longest row that trains: a search in few trials, and tables and plots of its results."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from flash_train.profiling.memory.plot import MODES
from flash_train.records.markdown import markdown_table, number
from flash_train.records.plots import save_figure

UNIT = 64  # lengths are multiples of this


@dataclass(frozen=True)
class Longest:
    """The result of a search: `seq_len` fits (0: nothing fitted); `too_long`, if known, does not."""

    seq_len: int
    too_long: int | None
    trials: tuple[tuple[int, bool], ...]

    def within(self, tolerance: float, limit: int) -> bool:
        """Whether the answer is within the tolerance, or at the limit."""
        if self.seq_len >= limit:
            return True
        return self.too_long is not None and self.too_long - self.seq_len <= max(UNIT, tolerance * self.too_long)


def search(fits: Callable[[int], bool], guess: int, limit: int, trials: int = 4, tolerance: float = 0.02) -> Longest:
    """Search the longest row that fits, to `tolerance`, in at most `trials` trials.

    A good guess takes two trials: it fits, and a row longer by the tolerance does not. After a bad guess, steps grow
    until the answer is between two trials; then bisection follows.

    Args:
        fits: tries a length.
        guess: the first length to try.
        limit: tokens; longer rows are not tried.
    """
    limit = max(UNIT, limit // UNIT * UNIT)
    found = Longest(0, None, ())
    length, stride = _round_to_unit(guess, limit), tolerance
    while len(found.trials) < trials:
        fit = fits(length)
        found = Longest(
            length if fit else found.seq_len,
            found.too_long if fit else length,
            (*found.trials, (length, fit)),
        )
        if found.within(tolerance, limit) or (not fit and length == UNIT):
            break
        if found.too_long is None:
            length = _round_to_unit(math.ceil(found.seq_len * (1 + stride) / UNIT) * UNIT, limit)
        elif found.seq_len == 0:
            length = _round_to_unit(found.too_long * (1 - min(stride, 0.75)), limit)
        else:
            length = _round_to_unit((found.seq_len + found.too_long) / 2, limit)
        stride *= 3
    return found


def _round_to_unit(length: float, limit: int) -> int:
    return min(limit, max(UNIT, int(length) // UNIT * UNIT))


@dataclass(frozen=True)
class Row:
    """The result of one attention backend and memory mode.

    Args:
        found: the search's result; its `seq_len` is 0 if `status` is not ok.
        predicted: the longest row that was predicted to fit, at most `limit`; None without a prediction.
        peak_gib: the peak of the longest row that fitted, if measured.
        exact: whether a row longer by the search's tolerance did not fit.
        limit: tokens; longer rows were not tried.
        status: ok, oom (nothing fitted), failed or unavailable.
        reason: why it is not ok.
        model: its name.
        optimizer: how it stores weights and moments.
        step_seconds: the time of the last step of the longest row that fitted, if measured.
        device: where it was measured, if known.
    """

    attention: str
    memory: str
    found: Longest
    predicted: int | None
    peak_gib: float | None
    exact: bool
    limit: int
    status: str = "ok"
    reason: str | None = None
    model: str = "1b3"  # of records of earlier versions, as is the optimizer
    optimizer: str = "no master, bf16 moments"
    step_seconds: float | None = None
    device: str = ""

    @property
    def at_limit(self) -> bool:
        """Whether the search ended at the limit; longer rows may fit, too."""
        return self.status == "ok" and self.found.seq_len >= self.limit

    def answer(self, unit: str = "") -> str:
        """Return the result as text, with a unit after its number."""
        if self.status != "ok":
            return {"oom": "nothing fitted"}.get(self.status, self.status)
        return (
            ("" if self.exact else "≥ ") + f"{self.found.seq_len:,}{unit}" + (" (the limit)" if self.at_limit else "")
        )


def markdown(rows: Sequence[Row], title: str) -> str:
    return f"# {title}\n\n{table(rows)}"


def table(rows: Sequence[Row]) -> str:
    """Return a table with a row per backend and memory mode, then notes on the limit and on rows without an answer."""
    lines = []
    for row in rows:
        peak, seconds = number(row.peak_gib, ".1f"), number(row.step_seconds, ".1f")
        predicted = "–"
        if row.predicted is not None:
            predicted = ("≥ " if row.predicted >= row.limit else "") + f"{row.predicted:,}"
        trials = str(len(row.found.trials))
        settings = (row.model, row.attention, row.memory, row.optimizer)
        lines.append((*settings, row.answer(), peak, predicted, seconds, trials))
    names = ("model", "attention", "memory", "optimizer")
    header = (*names, "longest row (tokens)", "peak (GiB)", "predicted (tokens)", "step (s)", "trials")
    text = markdown_table(header, lines, left=len(names))
    if any(row.at_limit for row in rows):
        text += "\n(the limit): longer rows were not tried; find_max.limit=… allows them.\n"
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row.reason:
            reasons.setdefault((row.attention, row.answer(), row.reason), []).append(row.memory)
    notes = [
        f"- attention={attention}, memory={', '.join(modes)}: {words}: {reason}\n"
        for (attention, words, reason), modes in reasons.items()
    ]
    return text + ("\n" + "".join(notes) if notes else "")


def best_table(rows: Sequence[Row]) -> str:
    """Return a table of the longest row of each model and device."""
    best: dict[tuple[str, str], Row] = {}
    for row in rows:
        key = (row.device, row.model)
        if row.status == "ok" and (key not in best or row.found.seq_len > best[key].found.seq_len):
            best[key] = row
    lines = [
        (
            device, f"`{model}`", f"`{row.memory}`", row.optimizer, row.answer(), number(row.peak_gib, ".1f"),
            number(row.step_seconds, ".1f"),
        )
        for (device, model), row in best.items()
    ]  # fmt: skip
    header = ("GPU", "model", "`memory=`", "optimizer", "longest row (tokens)", "peak GiB", "step (s)")
    limit = "\n(the limit): longer rows were not tried.\n" if any(row.at_limit for row in best.values()) else ""
    return markdown_table(header, lines, left=4) + limit


def to_record(row: Row, tolerance: float) -> dict[str, Any]:
    """Return plain values. An exact answer is exact to `tolerance`."""
    return {
        "model": row.model,
        "optimizer": row.optimizer,
        "attention": row.attention,
        "memory": row.memory,
        "seq_len": row.found.seq_len,
        "too_long": row.found.too_long,
        "predicted_seq_len": row.predicted,
        "peak_memory_gib": row.peak_gib,
        "step_seconds": row.step_seconds,
        "exact_to": tolerance if row.exact else None,
        "limit": row.limit,
        "status": row.status,
        "reason": row.reason,
        "trials": [{"seq_len": length, "fits": fit} for length, fit in row.found.trials],
    }


def from_record(record: Mapping[str, Any]) -> Row:
    trials = tuple((trial["seq_len"], trial["fits"]) for trial in record["trials"])
    return Row(
        record["attention"],
        record["memory"],
        Longest(record["seq_len"], record["too_long"], trials),
        record["predicted_seq_len"],
        record["peak_memory_gib"],
        record["exact_to"] is not None,
        record["limit"],
        record["status"],
        record["reason"],
        **{name: record[name] for name in ("model", "optimizer", "step_seconds", "device") if name in record},
    )


def plot_longest(
    rows: Sequence[Row], path: str | os.PathLike[str], title: str, *, metadata: dict[str, str] | None = None
) -> Path:
    """Draw a bar for each backend and memory mode."""
    several = len({row.device for row in rows}) > 1
    figure = Figure(figsize=(10 if several else 8, 1.4 + 0.45 * len(rows)), layout="constrained")
    panel = figure.subplots()
    places = range(len(rows))
    lengths = [row.found.seq_len for row in rows]
    panel.barh(places, lengths, color=[MODES[row.memory][0] for row in rows], height=0.7)
    for place, row in zip(places, rows, strict=True):
        panel.text(row.found.seq_len, place, f" {row.answer()}", va="center", fontsize=9)
    panel.set_yticks(
        list(places),
        [f"{row.model}, {row.attention}, memory={row.memory}" + f", {row.device}" * several for row in rows],
    )
    panel.invert_yaxis()
    panel.set_xlim(0, 1.45 * max([*lengths, UNIT]))
    panel.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    panel.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    panel.set_xlabel("longest row that trains (tokens)")
    panel.set_title(title, fontsize=11, loc="left")
    panel.spines[["top", "right"]].set_visible(False)
    return save_figure(figure, path, metadata=metadata)
