"""An ablation's trials as CSV and Markdown, with the best trials, ratios, and the differences between losses."""

import csv
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeGuard

from flash_train.output import counted
from flash_train.profiling.ablation.repeats import combine_seeds
from flash_train.profiling.ablation.row import DISTURBED, Row
from flash_train.records.markdown import escape, markdown_table

BASELINE = "standard"  # the attention that ratios refer to
COMPARED = ("memory", "attention")  # trials that differ only in these compute the same
MIN_STEPS = 3  # with fewer logged steps, a time comes from a single step: too few to mark a trial as the best
TIMES = """Times are in milliseconds per optimizer step: the median of a trial's steps 2 to N, or its only step. Each
column has its own median, so the parts need not add up. Attention's time is part of forward and backward. The rest of
a step, between forward, backward, optimizer and data wait, is logging and callbacks. The loss is the last step's.
"""
MARK = "†"  # marks a time whose steps were disturbed
DISTURBANCE = (
    f"{MARK}: the spread is more than {DISTURBED:.0%}: something disturbed the trial. "
    "None of its times is marked as the best."
)
SPREAD = f"""Spread: the distance between the quartiles of a trial's steps 2 to N, over their median; with several seeds
the range of their medians, if it is larger.
{DISTURBANCE}
"""


@dataclass(frozen=True)
class Difference:
    """The difference between the losses of a group of comparable trials.

    Attributes:
        settings: the settings that distinguish the group from others.
        largest: the largest (max - min) / |max| of all steps; NaN if a loss is not finite.
        masks_differ: whether its backends drew different dropout masks.
        not_finite: names of the trials whose loss is not finite.
    """

    settings: str
    largest: float
    masks_differ: bool = False
    not_finite: tuple[str, ...] = ()

    @property
    def finding(self) -> str:
        if self.not_finite:
            return f"a loss that is not finite: {', '.join(self.not_finite)}"
        why = ", because dropout masks differ between backends" if self.masks_differ else ""
        return f"largest relative difference {self.largest:.1e}{why}"


@dataclass(frozen=True)
class Column:
    """A measurement in the Markdown table.

    `best` picks its best value; with None, none is marked. `timed`: it depends on what else runs on the machine.
    """

    name: str
    label: str
    shown: Callable[[float], str]
    best: Callable[[Iterable[float]], float] | None = min
    ratio: bool = False
    timed: bool = False


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}" if seconds < 1 else f"{1e3 * seconds:,.0f}"


COLUMNS = (
    Column("step_seconds", "step ms", _milliseconds, ratio=True, timed=True),
    Column("step_spread", "spread", lambda spread: f"{spread:.0%}", None),
    Column("forward_seconds", "forward", _milliseconds, timed=True),
    Column("backward_seconds", "backward", _milliseconds, timed=True),
    Column("optimizer_seconds", "optimizer", _milliseconds, timed=True),
    Column("data_wait_seconds", "data wait", _milliseconds, None, timed=True),
    Column("attention_seconds", "attention", _milliseconds, timed=True),
    Column("attention_share", "attention's share", lambda share: f"{share:.0%}", None),
    Column("tokens_per_second", "tokens/s", lambda rate: f"{rate:,.0f}", max, timed=True),
    Column("mfu", "MFU", lambda part: f"{part:.1%}", max, timed=True),
    Column("peak_memory_gib", "peak GiB", lambda gib: f"{gib:.2f}", ratio=True),
    Column("train_loss", "loss", lambda loss: f"{loss:.4f}", None),
    Column("val_loss", "val. loss", lambda loss: f"{loss:.4f}", None),
    Column("val_tokens", "val. tokens", lambda number: f"{number:,.0f}", None),
)

#: the number of runs in a trial; shown only if trials with several seeds are merged
RUNS = Column("runs", "runs", lambda number: f"{number:.0f}", None)
OUTCOME_COLUMNS = ("status", "reason", "ran")  # the columns that say how a trial ended, and with which attention


def to_csv(rows: Sequence[Row]) -> str:
    """Write a line per trial: axes, status, reason, the attention that ran, measurements with all their digits."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header(rows))
    writer.writerows(["" if value is None else value for value in values(row)] for row in rows)
    return out.getvalue()


def losses_to_csv(rows: Sequence[Row]) -> str:
    """Write a line per trial and step: axes, step, training loss."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*(rows[0].axes if rows else ()), "step", "loss"])
    writer.writerows([*row.axes.values(), step, loss] for row in rows for step, loss in row.losses.items())
    return out.getvalue()


def from_csv(text: str, losses: str = "") -> list[Row]:
    """Read the rows that `to_csv` wrote, with the losses that `losses_to_csv` wrote."""
    curves: dict[tuple[Any, ...], dict[int, float]] = {}
    for line in csv.DictReader(io.StringIO(losses)):
        step, loss = int(line.pop("step")), float(line.pop("loss"))
        curves.setdefault(tuple(map(_parsed, line.values())), {})[step] = loss
    names = [column.name for column in COLUMNS]
    rows = []
    for line in csv.DictReader(io.StringIO(text)):
        axes = {name: _parsed(value) for name, value in line.items() if name not in (*OUTCOME_COLUMNS, *names)}
        measured = {name: float(line[name]) for name in names if line.get(name)}
        curve = curves.get(tuple(axes.values()), {})
        rows.append(Row(axes, line["status"], line["reason"] or None, measured, curve, line.get("ran") or None))
    return rows


def _parsed(text: str) -> Any:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text or None


def header(rows: Sequence[Row]) -> list[str]:
    return [*(rows[0].axes if rows else ()), *OUTCOME_COLUMNS, *(column.name for column in COLUMNS)]


def values(row: Row) -> list[Any]:
    """Return a row's values in the order of `header`."""
    return [*row.axes.values(), row.status, row.reason, row.ran, *(row.measured.get(column.name) for column in COLUMNS)]


def title(device: str, steps: int) -> str:
    """Return the heading of the tables and plots."""
    return f"Ablation on {device}, {counted(steps, 'step')}"


def format_versions(versions: Mapping[str, str | None]) -> list[str]:
    """Format the commit, and the versions of torch and triton, as far as they are known."""
    commit, _, dirty = (versions.get("commit") or "").partition("-")
    known = {"commit": commit[:12] + ("-" + dirty if dirty else "")}
    known |= {label: versions.get(name) or "" for name, label in (("torch", "torch"), ("triton", "Triton"))}
    return [f"{label} {version}" for label, version in known.items() if version]


def to_markdown(rows: Sequence[Row], title: str, common: Sequence[str] = ()) -> str:
    return f"# {title}\n\n{describe_all(rows, common)}"


def describe_all(rows: Sequence[Row], common: Sequence[str] = ()) -> str:
    """Describe the trials that ran, with the best of each group bold and ratios to standard attention; then the others.

    Args:
        common: settings that all trials share, such as `data=stdlib`.
    """
    ended, rows = rows, combine_seeds(rows)
    axes = varying(rows)
    ran, others = [row for row in rows if row.status == "ok"], [row for row in ended if row.status != "ok"]
    columns = [column for column in (RUNS, *COLUMNS) if any(row.measured.get(column.name) is not None for row in ran)]
    if validated := validation_tokens(ran):
        columns = [column for column in columns if column.name != "val_tokens"]
        common = [*common, f"val_tokens={validated:,}"]
    compared = _baselines(ran)
    labels = [label for column in columns for label in _labels(column, bool(compared))]
    lines = [
        [*(row.shown(name) for name in axes), *_figures(row, ran, columns, compared)]
        for group in groups(ran)
        for row in group
    ]
    fixed = [f"{name}={value}" for name, value in rows[0].axes.items() if name not in axes] if rows else []
    common = [words for words in common if not rows or words.partition("=")[0] not in rows[0].axes]
    text = f"Every trial has {', '.join([*fixed, *common])}.\n\n" if fixed or common else ""
    if lines:
        marks = f"**Bold**: the best of the trials that differ only in {' and '.join(COMPARED)}"
        if all(_has_few_steps(row) for row in ran):
            marks = f"Nothing is marked as the best: that takes {MIN_STEPS} steps"
        marks += f"; ×: ratio to {BASELINE} attention.\n\n" if compared else ".\n\n"
        spread = f"\n{SPREAD}" if any(row.measured.get("step_spread") is not None for row in ran) else ""
        text += f"{TIMES}{spread}\n{marks}{markdown_table([*axes, *labels], lines, left=len(axes))}"
    if others:
        axes = varying(ended)
        lines = [[*(str(row.axes[name]) for name in axes), row.status, escape(row.reason)] for row in others]
        text += "\nWithout figures:\n\n" + markdown_table([*axes, "status", "reason"], lines, left=len(axes) + 2)
    if differences := loss_differences(ended):
        text += f"\nTraining losses of trials that differ only in {' and '.join(COMPARED)}:\n\n"
        text += "".join(f"- {each.settings}{': ' if each.settings else ''}{each.finding}\n" for each in differences)
    return text


def validation_tokens(rows: Iterable[Row]) -> int | None:
    """Return how many tokens all trials were validated on; None if unknown, or if they differ."""
    numbers = {row.measured.get("val_tokens") for row in rows if row.status == "ok"}
    number = numbers.pop() if len(numbers) == 1 else None
    return int(number) if number is not None and math.isfinite(number) else None


def _has_few_steps(row: Row) -> bool:
    return len(row.losses) < MIN_STEPS


def by_length(rows: Sequence[Row]) -> str:
    """Return a short table: a row per length and other differing axes, a column per attention."""
    rows = combine_seeds(rows)
    backends = list(dict.fromkeys(row.axes["attention"] for row in rows))
    others = [name for name in varying(rows) if name not in ("attention", "seq_len")]
    axes = ["seq_len", *others]
    places: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        places.setdefault(tuple(row.axes[name] for name in axes), {})[row.axes["attention"]] = row
    lines = [
        [f"{place[0]:,}", *map(str, place[1:]), *(_time_and_memory(found.get(name)) for name in backends)]
        for place, found in places.items()
    ]
    table = markdown_table([*axes, *(f"{name}: ms · GiB" for name in backends)], lines)
    return table + (f"\n{DISTURBANCE}\n" if any(row.disturbed for row in rows) else "")


def _time_and_memory(row: Row | None) -> str:
    if row is None or row.status != "ok":
        return row.status if row else "–"
    seconds, gib = row.measured.get("step_seconds"), row.measured.get("peak_memory_gib")
    mark = f" {MARK}" if row.disturbed else ""
    return f"{'–' if seconds is None else _milliseconds(seconds)}{mark} · {'–' if gib is None else f'{gib:.1f}'}"


def where_slower(rows: Sequence[Row], attention: str) -> list[str]:
    """Return a phrase for each undisturbed trial of `attention` that another attention beat in the same setting."""
    found = []
    rows = combine_seeds(rows)
    ran = [
        (seconds, row)
        for row in rows
        if row.status == "ok"
        and _is_finite(seconds := row.measured.get("step_seconds"))
        and not (_has_few_steps(row) or row.disturbed)
    ]
    for ours, own in ran:
        if own.axes["attention"] != attention:
            continue
        same = [(seconds, row) for seconds, row in ran if row.without("attention") == own.without("attention")]
        theirs, best = min(same, key=lambda pair: pair[0])
        if theirs < ours:
            place = ", ".join(f"{name}={own.axes[name]}" for name in varying(rows) if name != "attention")
            times = f"{_milliseconds(ours)} ms, {best.axes['attention']} {_milliseconds(theirs)} ms"
            found.append(f"{place} ({times})")
    return found


def varying(rows: Sequence[Row]) -> list[str]:
    """Return the axes on which the trials differ; length and attention are always included."""
    names = list(rows[0].axes) if rows else []
    return [n for n in names if n in ("seq_len", "attention") or len({row.axes[n] for row in rows}) > 1]


def groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Group trials that differ only in attention and memory; groups are ordered by their first trial."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(row.without(*COMPARED), []).append(row)
    return list(found.values())


def describe(group: Sequence[Row], rows: Sequence[Row]) -> str:
    """Return the settings that a group's trials share and other groups do not."""
    return ", ".join(f"{name}={group[0].axes[name]}" for name in varying(rows) if name not in COMPARED)


def loss_differences(rows: Sequence[Row]) -> list[Difference]:
    """Compare losses in each group that has two or more trials that ran."""
    found = []
    for group in groups(rows):
        ran = [row for row in group if row.status == "ok" and row.losses]
        curves = [row.losses for row in ran]
        if len(curves) < 2:
            continue
        steps = set.intersection(*(set(curve) for curve in curves))
        invalid = tuple(_name(row, group) for row in ran if not all(map(math.isfinite, row.losses.values())))
        at_each = [[curve[step] for curve in curves] for step in steps] if not invalid else []
        spread = max(((max(x) - min(x)) / (abs(max(x)) or 1.0) for x in at_each), default=math.nan if invalid else 0.0)
        several = len({row.ran or row.axes.get("attention") for row in ran}) > 1
        found.append(Difference(describe(group, rows), spread, several and bool(ran[0].axes.get("dropout")), invalid))
    return found


def _name(row: Row, group: Sequence[Row]) -> str:
    """Return the settings in which a trial differs from others of its group."""
    names = [name for name in COMPARED if len({other.axes.get(name) for other in group}) > 1] or ["attention"]
    return " ".join(f"{name}={row.axes[name]}" for name in names)


def _is_finite(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _baselines(rows: Sequence[Row]) -> dict[tuple[Any, ...], Row]:
    """Return standard attention's trials, by their values on the other axes."""
    return {row.without("attention"): row for row in rows if row.axes.get("attention") == BASELINE}


def _labels(column: Column, with_ratio: bool) -> list[str]:
    return [column.label, "×"] if column.ratio and with_ratio else [column.label]


def _figures(
    row: Row, ran: Sequence[Row], columns: Sequence[Column], compared: Mapping[tuple[Any, ...], Row]
) -> list[str]:
    group = [other for other in ran if other.without(*COMPARED) == row.without(*COMPARED)]
    figures = []
    for column in columns:
        value = row.measured.get(column.name)
        figure = "–" if value is None else column.shown(value)
        known = [x for other in group if _is_finite(x := other.measured.get(column.name))]
        disturbed = column.timed and row.disturbed
        if (
            _is_finite(value)
            and column.best
            and not disturbed
            and not _has_few_steps(row)  # its figure may be by chance; others are still compared with it
            and len(known) > 1
            and figure == column.shown(column.best(known))
        ):
            figure = f"**{figure}**"
        figures.append(f"{figure} {MARK}" if disturbed and column.name == "step_seconds" else figure)
        if column.ratio and compared:
            base = compared.get(row.without("attention"))
            theirs = base.measured.get(column.name) if base else None
            figures.append(f"{value / theirs:.2f}" if _is_finite(value) and _is_finite(theirs) and theirs else "–")
    return figures
