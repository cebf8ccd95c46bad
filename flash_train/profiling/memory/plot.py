"""The plot of a step's memory: the memory over time, and its peak against the length of a row."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from flash_train.profiling.memory.ledger import PHASE_NAMES, Moment
from flash_train.profiling.memory.prediction import KINDS
from flash_train.records.memory_use import GIB
from flash_train.records.plots import BLUE, GREEN, ORANGE, VERMILION, save_figure, say_empty

# Okabe & Ito (2008) and greys: memory that outlives the step is grey, other memory has a colour.
COLORS = {
    "weights": "#555555", "gradients": "#999999", "optimizer state": "#777777", "autocast copies": "#BBBBBB",
    "matrix-product workspace": "#DDDDDD", "batch and tables": "#EEEEEE", "residual stream": "#0072B2",
    "norms": "#56B4E9", "attention": "#D55E00", "attention workspace": "#CC79A7", "mlp": "#E69F00",
    "logits and loss": "#009E73", "gathered weights": "#332288", "gradients to reduce": "#882255",
    "exchanged heads": "#F0E442",
}  # fmt: skip
BELOW = ("weights", "optimizer state", "gradients", "autocast copies", "matrix-product workspace", "batch and tables")
ORDER = (*BELOW, *(kind for kind in KINDS if kind not in BELOW))
MODES = {"none": (BLUE, "o"), "selective": (ORANGE, "s"), "checkpoint": (GREEN, "D"), "offload": (VERMILION, "^")}
POINTS = 1500  # with more moments than this, only the fullest of each stretch is drawn


def plot_memory(
    path: str | os.PathLike[str],
    moments: Sequence[tuple[str, Moment]],
    curves: Mapping[str, tuple[Sequence[int], Sequence[int]]],
    measured: tuple[int, int, str],
    title: str,
) -> Path:
    """Draw the measured step as stacked areas, and predicted peaks against length.

    Args:
        moments: the memory held, in order, each with its phase.
        curves: by memory mode, lengths and predicted peaks in bytes.
        measured: the length, the peak in bytes and the memory mode of the measured step.
    """
    figure = Figure(figsize=(14, 5.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _step(left, moments)
    _lengths(right, curves, measured)
    figure.suptitle(title, fontsize=12, x=0.01, ha="left")
    return save_figure(figure, path)


def _step(panel: Axes, moments: Sequence[tuple[str, Moment]]) -> None:
    chosen = thinned([(phase, moment) for phase, moment in moments if phase in PHASE_NAMES])
    unit, name = _unit(max((moment.total for _, moment in chosen), default=1))
    kinds = [kind for kind in ORDER if any(moment.parts.get(kind) for _, moment in chosen)]
    heights = [[moment.parts.get(kind, 0) / unit for _, moment in chosen] for kind in kinds]
    places = range(len(chosen))
    if kinds:
        panel.stackplot(places, heights, labels=kinds, colors=[COLORS[kind] for kind in kinds], linewidth=0)
    else:
        say_empty(panel, "no allocation was recorded")
    top = max((moment.total for _, moment in chosen), default=1) / unit
    panel.set_ylim(0, 1.12 * top)
    panel.set_xlim(0, max(1, len(chosen) - 1))
    begins = [i for i in places if i == 0 or chosen[i][0] != chosen[i - 1][0]]
    for i, begin in enumerate(begins):
        end = begins[i + 1] if i + 1 < len(begins) else len(chosen)
        if begin:
            panel.axvline(begin, color="black", linewidth=0.8, linestyle=":")
        if end - begin > 0.06 * len(chosen):  # a narrower stretch has no room for its name
            panel.text(
                (begin + end) / 2, 1.07 * top, PHASE_NAMES[chosen[begin][0]], ha="center", va="center", fontsize=10
            )
    panel.set(ylabel=f"memory ({name})", xlabel="allocations and releases of one step, in order", xticks=[])
    panel.spines[["top", "right"]].set_visible(False)
    handles, labels = panel.get_legend_handles_labels()
    panel.legend(handles[::-1], labels[::-1], frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))


def _lengths(
    panel: Axes, curves: Mapping[str, tuple[Sequence[int], Sequence[int]]], measured: tuple[int, int, str]
) -> None:
    length, peak, measured_mode = measured
    unit, name = _unit(max([peak, *(size for _, sizes in curves.values() for size in sizes)]))
    for mode, (lengths, sizes) in curves.items():
        color, marker = MODES[mode]
        panel.plot(
            lengths, [size / unit for size in sizes], color=color, marker=marker, markersize=4,
            label=f"memory={mode}, predicted",
        )  # fmt: skip
    panel.plot(
        [length], [peak / unit], marker="*", markersize=15, linestyle="", markeredgecolor="black",
        color=MODES[measured_mode][0], label=f"memory={measured_mode}, measured",
    )  # fmt: skip
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1024:g}k" if x >= 1024 else f"{x:g}"))
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    panel.yaxis.set_minor_locator(NullLocator())
    panel.set(xlabel="tokens in a row", ylabel=f"peak ({name})")
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, fontsize=9)


def thinned(moments: Sequence[tuple[str, Moment]]) -> list[tuple[str, Moment]]:
    """Thin out to about POINTS moments: the fullest of each stretch within a phase."""
    width = -(-len(moments) // POINTS)
    found: list[tuple[str, Moment]] = []
    start = 0
    while start < len(moments):
        stop = start
        while stop < len(moments) and stop - start < width and moments[stop][0] == moments[start][0]:
            stop += 1
        found.append(max(moments[start:stop], key=lambda item: item[1].total))
        start = stop
    return found


def _unit(largest: float) -> tuple[int, str]:
    return (GIB, "GiB") if largest >= GIB else (2**20, "MiB")
