"""The report on a step's memory, measured and predicted: as JSON, as Markdown, and as one HTML page."""

import base64
import html
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from flash_train.attention.traffic import Traffic, flash_traffic, standard_traffic
from flash_train.files import write_json, write_text
from flash_train.precision import PRECISIONS
from flash_train.profiling.memory.allocations import PHASES, MemoryProfile
from flash_train.profiling.memory.ledger import PHASE_NAMES, Moment
from flash_train.profiling.memory.prediction import KINDS, Prediction
from flash_train.profiling.memory.step import Step
from flash_train.records.markdown import markdown_table

MIB = 2**20
DENSITIES = (0.5, 0.25, 0.125)
PHASES_PREDICTED = {"forward": ("forward", "loss"), "backward": ("backward",), "step": ("step",)}

Report = dict[str, Any]


def report(
    profile: MemoryProfile,
    prediction: Prediction,
    step: Step,
    *,
    allocated: int | None = None,
    reserved: int | None = None,
) -> Report:
    """Compare a measured step with its prediction, in bytes.

    Args:
        step: the predicted step.
        allocated: the device's count of the peak; if given, it replaces the profile's.
        reserved: the most that the allocator held of the device; the part that is not allocated is fragmentation.
    """
    peak = allocated or profile.peak_bytes
    found: Report = {
        "measured_peak_bytes": peak,
        "predicted_peak_bytes": prediction.peak_bytes,
        "reserved_peak_bytes": reserved,
        "fragmentation_bytes": None if reserved is None else reserved - peak,
        "parts": _by_kind(profile.peak, prediction.peak),
        "phases": {},
        "blocks": profile.kept_by_block,
        "predicted_block_bytes": prediction.per_layer,
        "attention_traffic": attention_traffic(step),
    }
    for phase in PHASES:
        expected = max((prediction.phases[name] for name in PHASES_PREDICTED[phase]), key=lambda moment: moment.total)
        measured = profile.phases[phase]
        found["phases"][phase] = {
            "measured_peak_bytes": measured.total,
            "predicted_peak_bytes": expected.total,
            "parts": _by_kind(measured, expected),
        }
    return found


def attention_traffic(step: Step) -> dict[str, dict[str, int]]:
    """Count the bytes that one block's attention moves, as standard attention and as our kernels.

    Both are counted, no matter which one ran. The kernels are also counted with block maps of several densities.
    """
    m, itemsize = step.model, PRECISIONS[step.precision].activation_bytes
    shape = (m.n_heads, m.n_kv_heads, m.head_dim, itemsize)
    found = {}
    counts: dict[str, Callable[..., Traffic]] = {"standard": standard_traffic, "flash": flash_traffic}
    for density in DENSITIES:
        counts[f"flash, {density:.1%} of the blocks"] = partial(flash_traffic, density=density)
    for name, count in counts.items():
        each = [count(length, *shape) for length in step.documents]
        found[name] = {"forward": sum(t.forward for t in each), "backward": sum(t.backward for t in each)}
    return found


def write_report(folder: Path, found: Report, title: str, picture: Path) -> list[Path]:
    """Write `memory.json`, `memory.md`, and `memory.html`, which holds the picture and needs no network."""
    write_json(folder / "memory.json", found)
    write_text(folder / "memory.md", markdown(found, title))
    write_text(folder / "memory.html", page(found, title, picture))
    return [folder / name for name in ("memory.json", "memory.md", "memory.html")]


def tables(found: Report) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return (heading, columns, rows) of each table, figures in MiB."""
    parts = [
        [kind, _mib(both["measured_bytes"]), _mib(both["predicted_bytes"])] for kind, both in found["parts"].items()
    ]
    parts.append(["all", _mib(found["measured_peak_bytes"]), _mib(found["predicted_peak_bytes"])])
    if found["reserved_peak_bytes"] is not None:
        parts.append(["reserved from the device", _mib(found["reserved_peak_bytes"]), "–"])
        parts.append(["reserved but not allocated (fragmentation)", _mib(found["fragmentation_bytes"]), "–"])
    phases = [
        [
            PHASE_NAMES[phase],
            _mib(both["measured_peak_bytes"]),
            _mib(both["predicted_peak_bytes"]),
            _largest(both["parts"]),
        ]
        for phase, both in found["phases"].items()
    ]
    traffic = [[name, _mib(one["forward"]), _mib(one["backward"])] for name, one in found["attention_traffic"].items()]
    blocks = [[name, _mib(size), _mib(found["predicted_block_bytes"])] for name, size in found["blocks"].items()]
    return [
        ("At the peak", ["part", "measured (MiB)", "predicted (MiB)"], parts),
        ("Peak of each phase", ["phase", "measured (MiB)", "predicted (MiB)", "largest parts (measured)"], phases),
        ("Kept by each block for its backward", ["block", "measured (MiB)", "predicted (MiB)"], blocks),
        (
            "What one block's attention reads and writes in the device's memory, by its algorithm",
            ["attention", "forward (MiB)", "backward (MiB)"],
            traffic,
        ),
    ]


def markdown(found: Report, title: str) -> str:
    lines = [f"# {title}", "", summary(found), ""]
    for heading, columns, rows in tables(found):
        lines += [f"## {heading}", "", markdown_table(columns, rows)]
    return "\n".join(lines)


def summary(found: Report) -> str:
    """Return one line: the measured and the predicted peak, and their relative difference."""
    measured, predicted = found["measured_peak_bytes"], found["predicted_peak_bytes"]
    off = (predicted - measured) / measured
    return f"peak {_mib(measured)} MiB measured, {_mib(predicted)} MiB predicted ({off:+.1%})"


def page(found: Report, title: str, picture: Path) -> str:
    """Return one HTML page with everything in it."""
    image = base64.b64encode(picture.read_bytes()).decode()
    body = [f"<h1>{html.escape(title)}</h1>", f"<p>{html.escape(summary(found))}</p>"]
    body.append(f'<img alt="memory over the step, and against length" src="data:image/png;base64,{image}">')
    for heading, columns, rows in tables(found):
        head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
        lines = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        body.append(
            f"<h2>{html.escape(heading)}</h2><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"
        )
    return PAGE.format(title=html.escape(title), body="\n".join(body))


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #222 }}
img {{ max-width: 100% }}
table {{ border-collapse: collapse; margin: 0 0 2rem }}
th, td {{ padding: .25rem 1rem .25rem 0; text-align: right; border-bottom: 1px solid #ddd }}
th:first-child, td:first-child {{ text-align: left }}
td {{ font-variant-numeric: tabular-nums }}
</style></head><body>
{body}
</body></html>
"""


def _by_kind(measured: Moment, predicted: Moment) -> dict[str, dict[str, int]]:
    """Return measured and predicted bytes by kind, largest first."""
    kinds = [kind for kind in KINDS if measured.parts.get(kind) or predicted.parts.get(kind)]
    kinds.sort(key=lambda kind: -max(measured.parts.get(kind, 0), predicted.parts.get(kind, 0)))
    return {
        kind: {"measured_bytes": measured.parts.get(kind, 0), "predicted_bytes": predicted.parts.get(kind, 0)}
        for kind in kinds
    }


def _largest(parts: dict[str, dict[str, int]]) -> str:
    sizes = sorted(((both["measured_bytes"], kind) for kind, both in parts.items()), reverse=True)
    return ", ".join(f"{kind} {_mib(size)}" for size, kind in sizes[:3] if size)


def _mib(size: int) -> str:
    return f"{size / MIB:,.0f}" if size >= 100 * MIB else f"{size / MIB:,.1f}"
