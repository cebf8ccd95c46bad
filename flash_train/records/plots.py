"""The three plots of a run, from its table of metrics."""

import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from flash_train.files import replacing
from flash_train.records.metrics import MetricsTable

# Okabe & Ito (2008): distinct under every common colour blindness.
BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
MARKED_POINTS = 40  # more points than this are a line without markers
SMOOTHED_POINTS = 200  # more points than this also get a moving average

#: by metric: label, color, mark and line
MEMORY = {
    "memory/reserved_gib": ("reserved", ORANGE, "s", "-"),
    "memory/peak_gib": ("peak allocated", VERMILION, "D", "--"),
    "memory/allocated_gib": ("allocated at the step's end", BLUE, "o", "-"),
    "memory/process_peak_gib": ("peak resident", VERMILION, "D", "--"),
    "memory/process_gib": ("resident at the step's end", BLUE, "o", "-"),
}


def plot_run(table: MetricsTable, folder: str | os.PathLike[str], *, title: str = "") -> list[Path]:
    """Write `loss.png`, `throughput.png` and `memory.png` to `folder`, as far as the table has metrics to draw.

    A picture without a metric in the table is not written, and an older file of its name is removed, since its rows are
    no longer in the table. If a metric has no finite value, its panel is empty and says so.

    Returns:
        The files written.
    """
    written = []
    for name, (draw, metrics) in PICTURES.items():
        path = Path(folder) / name
        if any(table.column(metric)[0] for metric in metrics):
            written.append(save_figure(draw(table, title), path))
        else:
            path.unlink(missing_ok=True)
    return written


def save_figure(figure: Figure, path: str | os.PathLike[str], **options: Any) -> Path:
    """Write a PNG whole or not at all. `options` go to `Figure.savefig`."""
    path = Path(path)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150, format="png", **options)
    return path


def finite(values: Iterable[float | None]) -> list[float]:
    """Return the finite values, which an axis can show."""
    return [value for value in values if value is not None and math.isfinite(value)]


def say_empty(panel: Axes, words: str = "no finite value") -> None:
    """Write in the middle of a panel why it is empty."""
    panel.text(0.5, 0.5, words, transform=panel.transAxes, ha="center", va="center", color="0.4")


def short_length(n: int) -> str:
    """Format a length in the shortest exact form: 16k is 16,384."""
    for unit, size in (("M", 2**20), ("k", 2**10)):
        if n >= size and n % size == 0:
            return f"{n // size}{unit}"
    return f"{n:,}"


def _figure(title: str, *labels: str) -> tuple[Figure, list[Axes]]:
    """Make a figure with a panel for each label of a vertical axis, over a common axis of steps."""
    figure = Figure(figsize=(8, 3 + 1.75 * len(labels)), layout="constrained")
    panels = list(figure.subplots(len(labels), 1, sharex=True, squeeze=False)[:, 0])
    for panel, label in zip(panels, labels, strict=True):
        panel.set_ylabel(label)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[0].set_title(title, fontsize=11, loc="left")
    panels[-1].set_xlabel("optimizer step")
    return figure, panels


def _line(panel: Axes, table: MetricsTable, name: str, *, scale: float = 1.0, smooth: bool = False, **style) -> None:
    steps, values = table.column(name)
    values = [value * scale if math.isfinite(value) else math.nan for value in values]  # a gap in the line
    if not finite(values):
        return
    # Few points get markers: a line of one point would be invisible.
    marker = style.pop("marker", "o")
    marker = marker if len(steps) <= MARKED_POINTS else None
    if smooth and len(steps) > SMOOTHED_POINTS:
        width = len(steps) // 50
        panel.plot(steps, values, **{**style, "linewidth": 0.6, "alpha": 0.35})
        means = [sum(values[i - width : i]) / width for i in range(width, len(values) + 1)]
        panel.plot(steps[width - 1 :], means, **{**style, "label": f"mean of {width} rows"})
    else:
        panel.plot(steps, values, marker=marker, markersize=4, **style)


def _finish(figure: Figure, table: MetricsTable, *, from_zero: bool = True) -> Figure:
    """Put legends above the panels, where they hide no data, and set limits that also show a single point."""
    for panel in figure.axes:
        if panel.get_legend_handles_labels()[0]:
            panel.legend(frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0)
        shown = finite(y for line in panel.lines for y in np.asarray(line.get_ydata()).tolist())
        if not shown:
            say_empty(panel)
        if from_zero:
            panel.set_ylim(0, 1.1 * max([*shown, 0.0]) or 1)
    steps = sorted(table.rows)
    margin = max(1, 0.02 * (steps[-1] - steps[0]))
    figure.axes[0].set_xlim(steps[0] - margin, steps[-1] + margin)
    return figure


def _loss(table: MetricsTable, title: str) -> Figure:
    figure, (panel,) = _figure(title, "loss (nats per token)")
    _line(panel, table, "train/loss", smooth=True, color=BLUE, linewidth=1.5, label="training")
    _line(panel, table, "val/loss", color=VERMILION, linewidth=1.5, marker="D", label="validation")
    return _finish(figure, table, from_zero=False)


def _throughput(table: MetricsTable, title: str) -> Figure:
    known = bool(table.column("throughput/mfu")[0])
    lower = "model FLOP utilisation (%)" if known else "seconds per step"
    figure, (speed, use) = _figure(title, "tokens per second", lower)
    _line(speed, table, "throughput/tokens_per_second", color=BLUE, linewidth=1.5)
    speed.yaxis.set_major_formatter(EngFormatter(sep=""))
    if known:
        _line(use, table, "throughput/mfu", scale=100, color=GREEN, linewidth=1.5)
    else:
        _line(use, table, "time/step_seconds", color=GREEN, linewidth=1.5, label="whole step")
        _line(use, table, "time/data_wait_seconds", color=ORANGE, linewidth=1.5, marker="s", label="waiting for data")
    return _finish(figure, table)


def _memory(table: MetricsTable, title: str) -> Figure:
    of_process = "memory/process_gib" in table.columns
    figure, (panel,) = _figure(title, "process memory (GiB)" if of_process else "device memory (GiB)")
    for name, (label, color, marker, line) in MEMORY.items():
        _line(panel, table, name, color=color, linewidth=1.5, marker=marker, linestyle=line, label=label)
    return _finish(figure, table)


#: by file name: the function that draws a picture, and the metrics that it shows
PICTURES: dict[str, tuple[Callable[[MetricsTable, str], Figure], tuple[str, ...]]] = {
    "loss.png": (_loss, ("train/loss", "val/loss")),
    "throughput.png": (_throughput, ("throughput/tokens_per_second", "throughput/mfu", "time/step_seconds")),
    "memory.png": (_memory, tuple(MEMORY)),
}
