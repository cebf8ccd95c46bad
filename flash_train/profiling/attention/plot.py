"""The plot of the attention benchmark: a row per case, a mark per implementation."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flash_train.attention.kernels.families import FAMILIES, PORTABLE
from flash_train.records.plots import BLUE, GREEN, ORANGE, VERMILION, save_figure

#: label, color and mark of each implementation, in the legend's order; the marks also differ, for prints in gray
STYLES = {
    **dict.fromkeys(FAMILIES, ("this project", BLUE, "o")),
    PORTABLE.name: ("its portable kernels", "#56B4E9", "o"),
    "fa2": ("FlashAttention-2", ORANGE, "s"),
    "fa4": ("FlashAttention-4", "black", "x"),
    "varlen_attn": ("varlen_attn", VERMILION, "v"),
    "cudnn": ("cuDNN", GREEN, "D"),
    "cudnn_packed": ("cuDNN, packed", GREEN, "d"),
    "flex": ("FlexAttention", "#CC79A7", "^"),
    "flex_fa4": ("FlexAttention on FA-4", "#CC79A7", "<"),
}


def plot_attention(source: str | os.PathLike[str], path: str | os.PathLike[str]) -> Path:
    """Write ``path``, a PNG of the records in ``source``, the benchmark's JSON file.

    Raises ValueError if no record has a rate.
    """
    records = json.loads(Path(source).read_text(encoding="utf-8"))["records"]
    return save_figure(_draw(records), path, metadata={"Source": fingerprint(source)})


def fingerprint(source: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file. A picture stores it to name its source."""
    return hashlib.sha256(Path(source).read_bytes()).hexdigest()


def _draw(records: list[dict[str, Any]]) -> Figure:
    rates: dict[str, dict[tuple[str, str], float]] = {}
    for record in records:
        if record.get("tflops"):
            found = rates.setdefault(record["case"], {})
            found[record["implementation"], record["direction"]] = record["tflops"]
    if not rates:
        raise ValueError("no record has a rate: there is nothing to draw")
    figure = Figure(figsize=(11, 1.6 + 0.27 * len(rates)), layout="constrained")
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    for panel, direction in zip(panels, ("forward", "backward"), strict=True):
        _panel(panel, rates, direction)
    panels[0].set_yticks(range(len(rates)), list(rates))
    panels[0].set_ylim(len(rates) - 0.3, -0.7)  # the first case at the top
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(len(labels), 5), frameon=False)
    return figure


def _panel(panel: Axes, rates: dict[str, dict[tuple[str, str], float]], direction: str) -> None:
    for i, found in enumerate(rates.values()):  # from the slowest to the fastest
        values = [rate for (_, way), rate in found.items() if way == direction]
        if values:
            panel.hlines(i, min(values), max(values), color="0.8", linewidth=1, zorder=1)
    for name, (label, color, mark) in STYLES.items():
        points = {i: found[name, direction] for i, found in enumerate(rates.values()) if (name, direction) in found}
        if points:
            size = 48 if name in FAMILIES and name != PORTABLE.name else 30  # larger, and drawn first
            panel.scatter(list(points.values()), list(points), label=label, color=color, marker=mark, s=size, zorder=2)
    panel.set_xlim(left=0)
    panel.set_xlabel(f"{direction} (TFLOP/s)")
    panel.grid(axis="x", alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
