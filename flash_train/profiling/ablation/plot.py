"""Plots of an ablation: time, memory and loss against length (bars for one length), and losses by step."""

import math
import os
from collections.abc import Iterable, Sequence
from itertools import starmap
from typing import Any, TypeGuard

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator, ScalarFormatter

from flash_train.profiling.ablation.repeats import combine_seeds
from flash_train.profiling.ablation.row import DISTURBED, Row
from flash_train.profiling.ablation.table import COMPARED, MARK, describe, groups, validation_tokens, varying
from flash_train.records.plots import BLUE, GREEN, ORANGE, VERMILION, finite, save_figure, say_empty, short_length

#: color and mark of each attention backend; the marks also differ, for prints in gray
STYLES = {
    "standard": (VERMILION, "v"),
    "chunked": (ORANGE, "D"),
    "sdpa": (GREEN, "s"),
    "flash": (BLUE, "o"),
    "auto": ("#CC79A7", "^"),
}
OTHER = ("#56B4E9", "P")
LINES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))  # these show the other axes
TICKS = 9  # labels of lengths that fit on an axis
CURVES_ABREAST = 3
STATUSES = {"oom": "out of memory"}  # statuses that are not plain English

Name = tuple[str, ...]  # the name of a series: its attention, then its values on the other axes
Series = dict[Name, list[Row]]


def fit_exponent(lengths: Sequence[float], values: Sequence[float]) -> float | None:
    """Fit `values` to c · lengths^p by least squares on logarithmic axes and return p; None below two lengths."""
    points = [(math.log(n), math.log(value)) for n, value in zip(lengths, values, strict=True) if n > 0 and value > 0]
    if len({x for x, _ in points}) < 2:
        return None
    mean_x, mean_y = (sum(axis) / len(points) for axis in zip(*points, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


def plot_ablation(
    rows: Sequence[Row],
    path: str | os.PathLike[str],
    *,
    title: str = "",
    memory_of: str = "",
    metadata: dict[str, str] | None = None,
) -> bool:
    """Write a PNG of step time, peak memory and training loss. Returns False if no trial ran.

    Several lengths make curves with fitted exponents; one length makes a bar for each trial. The memory of a whole
    process (`memory_of`) is not fitted: most of it belongs to libraries. Step times have a vertical line as long as
    their spread. A disturbed trial is hollow, and its times are not fitted. Trials that differ only in their seed are
    merged.
    """
    rows = combine_seeds(rows)
    series = _series(rows)
    if not any(row.status == "ok" for row in rows):
        return False
    validated = any(row.measured.get("val_loss") is not None for row in rows)
    part, name = ("validation", "val_loss") if validated else ("last training", "train_loss")
    whose = f" of the {memory_of}" if memory_of else ""
    tokens = validation_tokens(rows) if validated else None
    on = f" on {tokens:,} tokens" if tokens else ""
    panels = (
        ("step_seconds", "seconds per optimizer step", True),
        ("peak_memory_gib", f"peak memory{whose} (GiB)", memory_of != "process"),
        (name, f"{part} loss{on} (nats per token)", False),
    )
    lengths = {row.axes["seq_len"] for row in rows}
    height = 1.2 + 0.32 * len(series) if len(lengths) == 1 else 4.6 + 0.19 * len(series)
    figure = Figure(figsize=(14, height), layout="constrained")
    if len(lengths) == 1:
        title = ", ".join(filter(None, (title, f"seq_len={lengths.pop()}")))
        shared = figure.subplots(1, 3, sharey=True)
        for panel, (column, heading, _) in zip(shared, panels, strict=True):
            _bars(panel, series, column, heading)
        shared[0].invert_yaxis()
    else:
        for panel, (column, heading, fitted) in zip(figure.subplots(1, 3), panels, strict=True):
            _panel(panel, series, column, heading, fitted)
    if any(row.disturbed for row in rows if row.status == "ok"):
        title += f"  (hollow, {MARK}: disturbed and not fitted, steps spread over more than {DISTURBED:.0%})"
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    save_figure(figure, path, metadata=metadata)
    return True


def plot_losses(rows: Sequence[Row], path: str | os.PathLike[str], *, title: str = "") -> bool:
    """Write a PNG of losses by step, a panel for each group of comparable trials. Returns False if there are none."""
    found = [(group, kept) for group in groups(rows) if (kept := [r for r in group if r.status == "ok" and r.losses])]
    if not found:
        return False
    abreast = min(CURVES_ABREAST, len(found))
    down = math.ceil(len(found) / abreast)
    figure = Figure(figsize=(max(7, 4.7 * abreast), 1.0 + 3.0 * down), layout="constrained")
    panels = list(figure.subplots(down, abreast, squeeze=False).flat)
    axes = [name for name in varying(rows) if name in COMPARED]
    styles = _styles(_name(row, axes) for row in rows)
    entries: dict[str, Artist] = {}
    for panel, (group, ran) in zip(panels, found, strict=False):
        for i, row in enumerate(ran):
            # Curves that agree hide one another: the earlier ones are wider, and show on both sides of the later.
            name = _name(row, axes)
            style = styles[name] | ({} if len(row.losses) == 1 else {"marker": None})
            wide = 1.2 + min(1.8, 5 / len(ran)) * (len(ran) - 1 - i)
            steps = sorted(row.losses)
            (drawn,) = panel.plot(steps, [row.losses[step] for step in steps], linewidth=wide, **style)
            entries.setdefault(_label(name, [row]), drawn)
        if not any(finite(row.losses.values()) for row in ran):
            say_empty(panel)
        _add_grid(panel)
        panel.set_title(describe(group, rows), fontsize=9, loc="left")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.set_xlabel("optimizer step")
    for panel in panels[len(found) :]:
        panel.set_visible(False)
    for panel in panels[::abreast][:down]:
        panel.set_ylabel("loss (nats per token)")
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    figure.legend(
        handles=list(entries.values()),
        labels=list(entries),
        loc="outside lower center",
        ncols=4,
        frameon=False,
        handlelength=4,
    )
    save_figure(figure, path)
    return True


def _series(rows: Sequence[Row]) -> Series:
    """Group trials that differ only in length into series, shortest first."""
    axes = [name for name in varying(rows) if name != "seq_len"]
    found: Series = {_name(row, axes): [] for row in rows}
    for row in sorted(rows, key=lambda row: row.axes["seq_len"]):
        found[_name(row, axes)].append(row)
    return found


def _name(row: Row, axes: Sequence[str]) -> Name:
    return str(row.axes["attention"]), *(f"{name} {row.axes[name]}" for name in axes if name != "attention")


def _label(name: Name, rows: Sequence[Row]) -> str:
    """Return the label of a series; for `attention=auto` it includes the backend that ran."""
    shown = next((row.shown("attention") for row in rows if row.ran), name[0])
    return ", ".join((shown, *name[1:]))


def _styles(names: Iterable[Name]) -> dict[Name, dict[str, Any]]:
    """Return the style of each series: color and mark show the attention, the line the other axes.

    If all series have the same attention, color and mark show the other axes.
    """
    known = list(dict.fromkeys(names))
    others = list(dict.fromkeys(name[1:] for name in known))
    palette = [*STYLES.values(), OTHER]
    styles = {}
    for i, name in enumerate(known):
        by_attention = len(known) == 1 or len({name[0] for name in known}) > 1
        color, mark = STYLES.get(name[0], OTHER) if by_attention else palette[i % len(palette)]
        line = LINES[(others.index(name[1:]) if by_attention else i // len(palette)) % len(LINES)]
        styles[name] = {"color": color, "marker": mark, "linestyle": line}
    return styles


def _panel(panel: Axes, series: Series, name: str, heading: str, fitted: bool) -> None:
    lengths = sorted({row.axes["seq_len"] for rows in series.values() for row in rows})
    styles = _styles(series)
    values: list[float] = []
    n_out_of_memory = 0
    for series_name, rows in series.items():
        trials = {
            row.axes["seq_len"]: (row, value)
            for row in rows
            if row.status == "ok" and _drawable(value := row.measured.get(name))
        }
        points = {length: value for length, (_, value) in trials.items()}
        values += points.values()
        timed = name == "step_seconds"
        disturbed = {length: value for length, (row, value) in trials.items() if timed and row.disturbed}
        sound = {length: value for length, value in points.items() if length not in disturbed}
        fits = fitted and len(sound) > 2  # two points fit any line
        power = fit_exponent(list(sound), list(sound.values())) if fits else None
        out_of_memory = sorted(row.axes["seq_len"] for row in rows if row.status == "oom")
        label = _legend(_label(series_name, rows), bool(points), power, out_of_memory, _status(rows))
        style = styles[series_name]
        panel.plot(list(points), list(points.values()), label=label, markersize=5, linewidth=1.5, **style)
        if disturbed:
            hollow = style | {"linestyle": "", "markerfacecolor": "white"}
            panel.plot(list(disturbed), list(disturbed.values()), markersize=5, zorder=3, **hollow)
        if timed:
            spreads = {length: row.measured.get("step_spread") or 0.0 for length, (row, _) in trials.items()}
            low, high = ([x * (1 + sign * spreads[n] / 2) for n, x in points.items()] for sign in (-1, 1))
            panel.vlines(list(points), low, high, color=style["color"], linewidth=1)
            values += finite(x for x in (*low, *high) if x > 0)
        if out_of_memory:  # drawn above all points, one series below the other
            height = 0.97 - 0.05 * (n_out_of_memory % 6)
            top = panel.get_xaxis_transform()
            panel.plot(
                out_of_memory[:1],
                [height],
                transform=top,
                color=style["color"],
                marker="X",
                markersize=7,
                clip_on=False,
            )
            n_out_of_memory += 1
    _axes(panel, lengths, values, room=0.05 * min(n_out_of_memory, 6))
    panel.set_xlabel("seq_len (tokens)")
    panel.set_title(heading, fontsize=10, loc="left")
    panel.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14), fontsize=8.5, handlelength=4)


def _bars(panel: Axes, series: Series, name: str, heading: str) -> None:
    """Draw a bar with its figure for each trial; for a trial that did not run, say how it ended."""
    styles = _styles(series)
    values = [row.measured.get(name) if row.status == "ok" else None for (row,) in series.values()]
    lengths = [value if _drawable(value) else 0.0 for value in values]
    for place, (series_name, (row,)) in enumerate(series.items()):
        color, value, length = styles[series_name]["color"], values[place], lengths[place]
        disturbed = name == "step_seconds" and row.disturbed
        panel.barh(place, length, color="white" if disturbed else color, edgecolor=color, height=0.7)
        label = STATUSES.get(row.status, row.status) if row.status != "ok" else "–" if value is None else f"{value:.4g}"
        if name == "step_seconds" and (spread := row.measured.get("step_spread")) is not None:
            label += f", spread {spread:.0%}" + (f" {MARK}" if disturbed else "")
        panel.text(length, place, f" {label}", va="center", fontsize=9)
    panel.set_yticks(range(len(values)), list(starmap(_label, series.items())), fontsize=9)
    panel.set_xlim(0, (1.6 if name == "step_seconds" else 1.25) * (max(lengths, default=0.0) or 1.0))
    panel.xaxis.set_major_locator(MaxNLocator(5))
    panel.set_title(heading, fontsize=10, loc="left")
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(alpha=0.25, axis="x")
    panel.set_axisbelow(True)


def _drawable(value: float | None) -> TypeGuard[float]:
    """Whether a logarithmic axis can show it."""
    return value is not None and math.isfinite(value) and value > 0


def _status(rows: Sequence[Row]) -> str:
    return next((row.status for row in rows if row.status != "ok"), "")


def _legend(label: str, has_points: bool, power: float | None, out_of_memory: Sequence[int], status: str) -> str:
    """Return the name of a series, its exponent, and why it has no points."""
    text = rf"{label}:  $\propto n^{{{power:.2f}}}$" if power is not None else label
    if out_of_memory:
        return f"{text}  (X: out of memory {'from' if len(out_of_memory) > 1 else 'at'} {out_of_memory[0]:,})"
    return text if has_points else f"{text}  ({status or 'no finite value'})"


def _axes(panel: Axes, lengths: Sequence[int], values: Sequence[float], room: float) -> None:
    """Set logarithmic axes for any number of points; a share `room` of the height stays free above them."""
    _add_grid(panel)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    shown = _spaced_labels(lengths)
    panel.set_xticks(shown, [short_length(n) for n in shown])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_xlim(lengths[0] / 1.3, lengths[-1] * 1.3)
    if not values:
        say_empty(panel)
    low, high = (min(values), max(values)) if values else (1.0, 1.0)
    margin = max(1.15, (high / low) ** 0.08)
    bottom, top = low / margin, high * margin
    top *= (top / bottom) ** (room / (1 - room))
    panel.set_ylim(bottom, top)
    decades = math.log10(top / bottom)
    if decades < 1:
        panel.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
        panel.yaxis.set_minor_locator(NullLocator())
        panel.yaxis.set_major_formatter(ScalarFormatter())
    else:
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 2.5 else (1,)))
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.yaxis.set_minor_formatter(NullFormatter())


def _spaced_labels(lengths: Sequence[int]) -> list[int]:
    """Return the longest length, and others whose labels do not touch on a logarithmic axis."""
    gap = (lengths[-1] / lengths[0]) ** (1 / TICKS)
    shown = [lengths[-1]]
    for n in reversed(lengths):
        if shown[-1] / n >= gap > 1:
            shown.append(n)
    return shown


def _add_grid(panel: Axes) -> None:
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(alpha=0.25)
