"""Tables and the plot of several GPUs, from the records of ``scripts/bench_parallel.py``."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from flash_train.profiling.attention.shared import QUEUED
from flash_train.records.markdown import joined, number, paragraph
from flash_train.records.markdown import markdown_table as table
from flash_train.records.plots import BLUE, GREEN, ORANGE, save_figure

Records = Sequence[dict[str, Any]]
DIRECTIONS = ("forward", "forward+backward")
DIVISIONS = {
    "sharded": "sharded weights, a row each",
    "context": "sharded weights, one row",
    "replicated": "whole weights, a row each",
}
OTHERS = {"transformers": "transformers + Liger + FSDP2", "one": "each GPU alone"}
COLORS = {"gather": BLUE, "ulysses": ORANGE}


def training_section(records: Records) -> str:
    ranks, gpu = records[0]["ranks"], records[0]["gpu"]
    words = paragraph(
        f"Training on {ranks} {gpu}, in bf16, rows of one document. Ours runs in Lightning's `Trainer`, with",
        "`memory=selective memory.keep=auto` (`none` with whole weights). With sharded weights and a row each,",
        f"the other is {OTHERS['transformers']}: a Llama of `transformers` with Liger's operations, the same weights",
        "and tokens. It takes less memory, because it recomputes every layer; ours was allowed to fill the card.",
        "With whole weights the other is each GPU alone.",
    )
    picture = "![Attention as a share of the ideal, and tokens per second of training](results/parallel.png)"
    return f"{words}\n{training_table(records)}\n{picture}\n"


def attention_section(records: Records) -> str:
    found = _attention(records)
    ones = [record for ways in found.values() for record in ways["one"].values()]
    words = [f"Forward · forward and backward, on {ones[0]['ranks']} {ones[0]['gpu']}."]
    if (rows := max(record["rows"] for record in ones)) > 1:
        words.append(f"`packed` is the median of {rows} rows, with the worst share in brackets.")
    if any(f"{QUEUED}ms" in record for record in ones):
        words.append("The host queues calls that take less than a second ahead of the GPU.")
    return f"{paragraph(*words)}\n{attention_table(records)}"


def long_section(records: Records) -> str:
    """Training on rows that all GPUs share, each a single document."""
    ours = [ways["flash_train"] for ways in _training(records).values()]
    shared = [record for record in ours if record["divided"] == "context" and record.get("documents", 1) == 1]
    rows = [
        (
            record["model"],
            f"{record['tokens']:,}",
            f"`{record['memory']}`" + _kept_where(record),
            number(record["step_seconds"], ",.1f"),
            number(record["tokens_per_second"] / record["ranks"], ",.0f"),
            number(record["mfu"], ".1%"),
            number(record["peak_memory_gib"], ".1f"),
            number(record["predicted_memory_gib"], ".1f"),
        )
        for record in shared
    ]
    header = ("model", "seq_len", "memory", "step (s)", "tokens/s a GPU", "MFU", "peak GiB", "predicted")
    words = f"Rows of one document that {shared[0]['ranks']} {shared[0]['gpu']} share, in bf16:"
    return f"{words}\n\n{table(header, rows, left=3)}"


def _kept_where(record: dict[str, Any]) -> str:
    kept = f", {record['keep']:.0%} of the blocks keep everything" if record["keep"] else ""
    return kept + (f", {record['offload']:.0%} of the inputs in the host's memory" if record.get("offload") else "")


def weak_section(records: Records) -> str:
    """Training whose work grows with the GPUs: a row per division, with the MFU on each number of GPUs."""
    found: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for record in records:
        if re.search(r"-(sharded|context)-x\d+$", record["case"]) and "mfu" in record:
            found.setdefault((record["model"], record["divided"]), {})[record["ranks"]] = record
    rows = []
    for (model, divided), by_ranks in found.items():
        for ranks, record in sorted(by_ranks.items()):
            share = record["mfu"] / by_ranks[1]["mfu"] if 1 in by_ranks else None
            each = number(record["tokens_per_second"] / ranks, ",.0f")
            what = "a row of one document each" if divided == "sharded" else "one packed row"
            rows.append((model, what, str(ranks), each, number(record["mfu"], ".1%"), number(share, ".3f")))
    header = ("model", "rows", "GPUs", "tokens/s a GPU", "MFU", "of one GPU's")
    return table(header, rows, left=2)


def attention_table(records: Records) -> str:
    """A row per case: milliseconds on one GPU and of `gather`, and the shares of the ideal of both methods.

    Of several rows with the same name these are medians, and the worst share of `gather` follows in brackets. Queued
    calls are shown rather than single ones. The rates are of the forward and of the backward alone.
    """
    rows = []
    for case, ways in _attention(records).items():
        gather = ways.get("gather", {})
        times = [_pair(found, "ms", ".2f") for found in (ways["one"], gather)]
        shares = _pair(gather, "share", ".2f")
        if any(record["rows"] > 1 for record in gather.values()):
            shares += f" ({_pair(gather, 'worst', '.2f')})"
        rates, other = joined(_rates(gather), ".0f"), _pair(ways.get("ulysses", {}), "share", ".2f")
        rows.append((case, *times, shares, rates, other))
    return table(("case", "one GPU (ms)", "`gather` (ms)", "share", "TFLOP/s a GPU", "`ulysses`, share"), rows)


def training_table(records: Records) -> str:
    """A row per case: ours, and what it is compared with."""
    rows = []
    for ways in _training(records).values():
        ours = ways["flash_train"]
        other = next((record for way, record in ways.items() if way != "flash_train"), {})
        rows.append(
            (
                ours["model"],
                f"{ours['tokens']:,}",
                DIVISIONS[ours["divided"]],
                number(ours.get("tokens_per_second"), ",.0f"),
                number(ours.get("mfu"), ".1%"),
                number(ours.get("peak_memory_gib"), ".1f"),
                number(other.get("tokens_per_second"), ",.0f"),
                number(other.get("peak_memory_gib"), ".1f"),
                number(ours.get("ratio"), ".2f"),
            )
        )
    header = ("model", "seq_len", "plan", "tokens/s", "MFU", "peak GiB", "other tokens/s", "peak GiB", "ratio")
    return table(header, rows, left=3)


def plot_parallel(records: Records, path: str | os.PathLike[str], *, metadata: dict[str, str] | None = None) -> Path:
    """Draw the shares of the ideal of each attention case, and the rates of training.

    Raises:
        ValueError: no record has a rate.
    """
    cases, runs = _attention(records), _training(records)
    if not cases and not runs:
        raise ValueError("no record has a rate: there is nothing to draw")
    figure = Figure(figsize=(11, 1.8 + 0.45 * max(len(cases), len(runs))), layout="constrained")
    left, right = figure.subplots(1, 2)
    for place, ways in enumerate(cases.values()):
        for offset, (method, color) in zip((-0.13, 0.13), COLORS.items(), strict=True):
            for direction, mark in zip(DIRECTIONS, ("o", "D"), strict=True):
                if (record := ways.get(method, {}).get(direction)) is not None:
                    label = f"{method}, {direction}" if place == 0 else None
                    left.scatter(record["share"], place + offset, color=color, marker=mark, s=34, label=label, zorder=3)
    left.axvline(1, color="0.6", linewidth=1)
    left.set_yticks(range(len(cases)), list(cases))
    left.set_xlim(0, 1.15)
    left.set_xlabel("attention: one GPU's time / (GPUs · time on them)")
    figure.legend(fontsize=8, frameon=False, loc="outside upper left", ncols=4)
    for place, ways in enumerate(runs.values()):
        ours = ways["flash_train"]
        found = [("this project", BLUE, ours)]
        found += [(OTHERS[way], GREEN, record) for way, record in ways.items() if way != "flash_train"]
        for offset, (label, color, record) in zip((-0.2, 0.2), found, strict=False):
            rate = record["tokens_per_second"]
            right.barh(place + offset, rate, height=0.36, color=color)
            right.text(rate, place + offset, f" {label}: {rate:,.0f}", va="center", fontsize=8)
    names = [ways["flash_train"] for ways in runs.values()]
    right.set_yticks(range(len(runs)), [f"{r['model']}, {r['tokens']:,}\n{DIVISIONS[r['divided']]}" for r in names])
    highest = max((record["tokens_per_second"] for ways in runs.values() for record in ways.values()), default=1)
    right.set_xlim(0, 1.9 * highest)
    right.xaxis.set_major_locator(MaxNLocator(4))
    right.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    right.set_xlabel("training: tokens/s of all GPUs")
    for panel, count in ((left, len(cases)), (right, len(runs))):
        panel.set_ylim(count - 0.4, -0.6)  # the first case at the top
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="x", alpha=0.25)
    return save_figure(figure, path, metadata=metadata)


def _attention(records: Records) -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    """Records with a rate by case, way and direction. Rows that differ only in their seed are one case."""
    found: dict[str, dict[str, dict[str, list[dict[str, Any]]]]] = {}
    for record in records:
        if record["kind"] == "attention" and "ms" in record:
            ways = found.setdefault(re.sub(r"-seed\d+", "", record["case"]), {})
            best = {key: record.get(f"{QUEUED}{key}", record[key]) for key in ("ms", "share", "tflops")}
            ways.setdefault(record["way"], {}).setdefault(record["direction"], []).append(record | best)
    return {
        case: {way: {key: _of_rows(own) for key, own in by_direction.items()} for way, by_direction in ways.items()}
        for case, ways in found.items()
    }


def _rates(found: dict[str, dict[str, Any]]) -> list[float | None]:
    """TFLOP/s of a GPU in the forward, and in the backward alone, which has 2.5 times its FLOPs."""
    if len(found) < len(DIRECTIONS):
        return [None, None]
    forward, both = (found[direction] for direction in DIRECTIONS)
    return [forward["tflops"], 2.5 * forward["tflops"] * forward["ms"] / (both["ms"] - forward["ms"])]


def _of_rows(records: Records) -> dict[str, Any]:
    """Return one record for several rows: the medians, and the worst share."""
    medians = {key: median(record[key] for record in records) for key in ("ms", "share", "tflops", "documents")}
    return {**records[0], **medians, "worst": min(record["share"] for record in records), "rows": len(records)}


def _training(records: Records) -> dict[str, dict[str, dict[str, Any]]]:
    """Records with a rate by case and way."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for record in records:
        if record["kind"] == "training" and "tokens_per_second" in record:
            found.setdefault(record["case"], {})[record["way"]] = record
    return found


def _pair(found: dict[str, dict[str, Any]], key: str, form: str) -> str:
    return joined([found.get(direction, {}).get(key) for direction in DIRECTIONS], form)
