"""The records of the memory benchmark as tables and as a plot: predicted and measured peaks, growth, traffic."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from flash_train.model.recompute import MEMORY_MODES
from flash_train.profiling.ablation.plot import STYLES
from flash_train.profiling.attention.memory import FITTED_FROM, exponents
from flash_train.profiling.memory.plot import MODES
from flash_train.records.markdown import difference, markdown_table
from flash_train.records.memory_use import GIB
from flash_train.records.plots import save_figure, short_length

MIB = 2**20
RELATIVE, ABSOLUTE = 0.05, 64 * MIB  #: allowed error of a prediction: the larger of these
LINES = {"flash": "-", "standard": "--"}
CARDS = (24, 48, 80)  #: GiB, in the table of modes that fit
FREE = 0.1  #: the share of a card that a mode leaves free there

Record = dict[str, Any]


def allowed_error(measured: int) -> float:
    """Return the bytes by which a prediction may be off."""
    return max(RELATIVE * measured, ABSOLUTE)


def compared(records: Iterable[Record]) -> list[Record]:
    """Return the measured steps, each with `error_bytes`: predicted minus measured."""
    ran = [record for record in records if record["kind"] == "step" and record["status"] == "ok"]
    return [record | {"error_bytes": record["predicted_bytes"] - record["measured_bytes"]} for record in ran]


def own_sizes(records: Iterable[Record]) -> dict[str, dict[int, int]]:
    """Return the bytes of attention by itself, by backend and length."""
    found: dict[str, dict[int, int]] = {}
    for record in records:
        if record["kind"] == "attention" and record["status"] == "ok":
            found.setdefault(record["attention"], {})[record["seq_len"]] = record["own_bytes"]
    return found


def summary_table(records: Sequence[Record]) -> str:
    """Return a table by attention and memory mode: the number of steps, the longest row, and the worst prediction."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in compared(records):
        groups.setdefault((record["attention"], record["memory"]), []).append(record)
    rows = []
    for (attention, memory), found in sorted(groups.items(), key=_sort_key):
        worst = max(found, key=lambda record: abs(record["error_bytes"]) / allowed_error(record["measured_bytes"]))
        inside = sum(abs(record["error_bytes"]) <= allowed_error(record["measured_bytes"]) for record in found)
        longest, largest = max(r["seq_len"] for r in found), max(r["measured_bytes"] for r in found)
        rows.append(
            (attention, memory, f"{inside} of {len(found)}", f"{longest:,}", _gib(largest), _error(worst))
        )  # fmt: skip
    header = ("attention", "memory", "steps within 5 % or 64 MiB", "longest row", "largest peak (GiB)", "worst error")
    return markdown_table(header, rows, left=2)


def worst_error(records: Sequence[Record]) -> str:
    """Return how many steps were measured, and the largest error of their predictions, as a sentence."""
    found = [record for record in compared(records) if record["measured_bytes"]]
    worst = max(found, key=lambda record: abs(record["error_bytes"]) / record["measured_bytes"])
    error = abs(worst["error_bytes"]) / worst["measured_bytes"]
    return f"{len(found)} steps were measured. The largest error of a prediction is {error:.2%} (`{worst['case']}`)."


def first_modes_table(records: Sequence[Record]) -> str:
    """Return a table of the first memory mode whose measured peak fits, by model, length and size of the card.

    It has the models' own shapes with `flash`, and leaves out lengths that fit with `memory=none` on every card. A mode
    that was not measured, since the card had too little memory, does not fit.
    """
    peaks: dict[tuple[str, int], dict[str, float]] = {}
    for record in compared(records):
        own_shape = record["case"] == f"{record['model']}-n{record['seq_len']}-{record['memory']}-flash"
        if own_shape:
            place = peaks.setdefault((record["model"], record["seq_len"]), {})
            place[record["memory"]] = record["measured_bytes"] / GIB
    rows = []
    models = list(dict.fromkeys(model for model, _ in peaks))
    for model, seq_len in sorted(peaks, key=lambda place: (models.index(place[0]), place[1])):
        found = peaks[model, seq_len]
        modes = [
            next((mode for mode in MEMORY_MODES if mode in found and found[mode] <= (1 - FREE) * card), "–")
            for card in CARDS
        ]
        if set(modes) != {MEMORY_MODES[0]}:
            rows.append((model, f"{seq_len:,}", *modes))
    return markdown_table(("model", "seq_len", *(f"{card} GB" for card in CARDS)), rows, left=2 + len(CARDS))


def _sort_key(group: tuple[tuple[str, str], list[Record]]) -> tuple[bool, str, int]:
    (attention, memory), _ = group
    return attention not in LINES, attention, MEMORY_MODES.index(memory)


def cases_table(records: Sequence[Record]) -> str:
    """Return a table with a row per step; if a step did not run, its row has the reason."""
    rows = []
    errors = {record["case"]: record for record in compared(records)}
    for record in records:
        if record["kind"] != "step":
            continue
        predicted = _gib(record["predicted_bytes"]) if "predicted_bytes" in record else "–"
        if record["case"] not in errors:
            reason = "more than the card has" if record["status"] == "unavailable" else record["status"]
            rows.append((record["case"], predicted, reason, "–", "–"))
            continue
        record = errors[record["case"]]
        reserved = _gib(record["reserved_bytes"]) if "reserved_bytes" in record else "–"
        rows.append((record["case"], predicted, _gib(record["measured_bytes"]), _error(record), reserved))
    header = ("step", "predicted (GiB)", "measured (GiB)", "error", "reserved (GiB)")
    return markdown_table(header, rows)


def growth_table(records: Sequence[Record]) -> str:
    """Return a table with a column per backend, a row per length, and fitted exponents."""
    sizes, asked = own_sizes(records), [record for record in records if record["kind"] == "attention"]
    names = list(dict.fromkeys(record["attention"] for record in asked))
    failed = {(record["attention"], record["seq_len"]): record["status"] for record in asked}
    rows = []
    for length in sorted({record["seq_len"] for record in asked}):
        cells = [
            f"{sizes[name][length] / MIB:,.0f}" if length in sizes.get(name, {}) else failed.get((name, length), "–")
            for name in names
        ]
        rows.append((f"{length:,}", *cells))
    fitted = exponents(sizes)
    powers = [f"{p:.2f}" if (p := fitted.get(name)) is not None else "–" for name in names]
    rows.append((f"exponent from {FITTED_FROM:,} on", *powers))
    return markdown_table(("seq_len", *(f"{name} (MiB)" for name in names)), rows)


def traffic_table(records: Sequence[Record]) -> str:
    """Return a table with a row per call: the bytes by its algorithm, and the bytes by the card's counters."""
    rows = []
    for record in records:
        if record["kind"] != "traffic":
            continue
        seen = "–" if record["status"] == "ok" else record["reason"]
        cells = ("–", "–", seen)
        if record["status"] == "ok":
            read, written = record["read_bytes"], record["written_bytes"]
            asked_for = record["algorithm_bytes"]
            ratio = f"{(read + written) / asked_for:.2f}" if asked_for else "–"
            cells = (f"{read / MIB:,.0f}", f"{written / MIB:,.0f}", ratio)
        asked = f"{record['algorithm_bytes'] / MIB:,.0f}"
        rows.append((record["attention"], f"{record['seq_len']:,}", record["direction"], asked, *cells))
    header = ("attention", "seq_len", "pass", "by its algorithm (MiB)", "read (MiB)", "written (MiB)", "ratio")
    return markdown_table(header, rows)


def plot_memory_results(
    records: Sequence[Record], path: str | os.PathLike[str], *, metadata: dict[str, str] | None = None
) -> Path:
    """Draw a panel per model, with lines for predictions and marks for measurements; then a panel for growth."""
    steps = [record for record in compared(records) if not record["case"].startswith("other")]
    models = list(dict.fromkeys(record["model"] for record in steps))
    sizes = own_sizes(records)
    panels_wanted = len(models) + bool(sizes)
    if not panels_wanted:
        raise ValueError("no record has a measurement: there is nothing to draw")
    figure = Figure(figsize=(1 + 3.8 * panels_wanted, 5), layout="constrained")
    panels = list(figure.subplots(1, panels_wanted, squeeze=False)[0])
    entries: dict[str, Line2D] = {}
    for panel, model in zip(panels, models, strict=False):
        entries |= _draw_model(panel, [record for record in steps if record["model"] == model])
        panel.set_title(f"{model}: peak of a step (GiB)", fontsize=10, loc="left")
    if entries:
        legend = {"title": "lines: predicted, marks: measured", "frameon": False, "ncols": 3, "fontsize": 9}
        figure.legend(handles=list(entries.values()), labels=list(entries), loc="outside lower left", **legend)
    if sizes:
        _draw_growth(panels[-1], sizes)
    return save_figure(figure, path, metadata=metadata)


def _draw_model(panel: Axes, steps: Sequence[Record]) -> dict[str, Line2D]:
    """Return the legend entry of each series."""
    series: dict[tuple[str, str], list[Record]] = {}
    for record in sorted(steps, key=lambda record: record["seq_len"]):
        series.setdefault((record["attention"], record["memory"]), []).append(record)
    entries = {}
    for (attention, memory), found in series.items():
        color, mark = MODES[memory]
        style: dict[str, Any] = {"color": color, "linestyle": LINES.get(attention, ":"), "linewidth": 1.3}
        marks: dict[str, Any] = {"marker": mark, "markersize": 6}
        if attention != "flash":  # two modes of standard attention may be equal and hide each other
            marks |= {"markerfacecolor": "none", "markersize": 6 if memory == "none" else 8}
        lengths = [record["seq_len"] for record in found]
        panel.plot(lengths, [record["predicted_bytes"] / GIB for record in found], **style)
        measured = [record["measured_bytes"] / GIB for record in found]
        panel.plot(lengths, measured, **style | {"linestyle": ""}, **marks)
        entries[f"{attention}, memory={memory}"] = Line2D([], [], **style, **marks)
    _axes(panel, [record["seq_len"] for record in steps])
    return entries


def _draw_growth(panel: Axes, sizes: dict[str, dict[int, int]]) -> None:
    fitted = exponents(sizes)
    for name, by_length in sizes.items():
        color, mark = STYLES.get(name, ("black", "x"))
        power = fitted[name]
        label = name if power is None else rf"{name}:  $\propto n^{{{power:.2f}}}$"
        panel.plot(
            list(by_length), [size / GIB for size in by_length.values()], color=color, marker=mark, markersize=5,
            linewidth=1.5, label=label,
        )  # fmt: skip
    panel.set_title("attention by itself (GiB)", fontsize=10, loc="left")
    _axes(panel, [length for by_length in sizes.values() for length in by_length])
    panel.legend(frameon=False, fontsize=9, loc="upper left")


def _axes(panel: Axes, lengths: Iterable[int]) -> None:
    shown = sorted(set(lengths))
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(shown, [short_length(n) for n in shown], fontsize=8)
    panel.xaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.set_xlabel("tokens in a row")
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"


def _error(record: Record) -> str:
    measured = record["measured_bytes"]
    return difference(record["error_bytes"] / measured if measured else None)
