"""Fill the tables of README.md and docs/*.md from docs/results/*.json: `python scripts/update_readme.py`.

With --check it changes nothing and exits with 1 if a table or picture is not up to date.

A table stands between <!-- results:NAME --> and <!-- /results:NAME --> in any page. NAME and NAME.PART come from
docs/results/NAME.json, which holds {"records": [...]}. A line below it names the record, its cards, versions and
commits, and the commands that make it, which are in flash_train/profiling/sources.py. The table `index` lists all
records. Some records also have a picture, docs/results/NAME.png. Without a record its tables are empty, and its picture
is removed.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flash_train.profiling import parallel_results, sources, training_results
from flash_train.profiling.ablation import table as ablation
from flash_train.profiling.ablation.plot import plot_ablation
from flash_train.profiling.attention import tables as attention
from flash_train.profiling.attention.plot import fingerprint, plot_attention
from flash_train.profiling.memory import longest
from flash_train.profiling.memory import results as memory_results
from flash_train.profiling.memory.longest import plot_longest
from flash_train.profiling.memory.results import plot_memory_results
from flash_train.records.markdown import markdown_table as table
from flash_train.records.markdown import number, paragraph

ROOT = Path(__file__).parents[1]
Records = list[dict[str, Any]]
INDEX = "index"  # the table that comes from all records
LONG = 2048  # tokens; attention is hardly any part of a step over shorter rows
MARKED = re.compile(r"(<!-- results:([\w.]+) -->\n).*?(<!-- /results:\2 -->)", re.DOTALL)


def start_sentences(records: Records) -> str:
    """A sentence per case."""
    cold, warm = ([record for record in records if record["cache"] == cache] for cache in ("cold", "warm"))
    return "".join(
        f"From the command to the first optimizer step (`{first['case']}`, `data=stdlib`, {first['gpu']}): "
        f"{again['seconds']:.0f} s;\n"
        f"the first time, with kernels to compile and text to tokenise, {first['seconds']:.0f} s.\n"
        for first, again in zip(cold, warm, strict=True)
    )


def recall_table(records: Records) -> str:
    """A row per run."""
    rows = [
        (
            f"{record['seq_len']:,}",
            record["attention"],
            record["device"],
            f"{record['steps']:,}",
            number(record["answer_accuracy"], ".1%"),
            number(record["chance_level"], ".1%"),
        )
        for record in records
    ]
    return table(("seq_len", "attention", "device", "steps", "right answers", "chance"), rows)


def cards_of(records: Records) -> str:
    return " and ".join(sources.facts_of(records).cards)


def memory_summary(records: Records) -> str:
    words = paragraph(
        "The peak of a step on one GPU, predicted from its configuration, compared with `max_memory_allocated`.",
        memory_results.worst_error(records),
        "[All measurements](measurements.md#memory-of-a-step) has every step.",
    )
    return f"{words}\n{memory_results.summary_table(records)}"


def memory_modes(records: Records) -> str:
    words = paragraph(
        "The first of `none`, `selective` and `checkpoint` whose measured peak leaves a tenth of the card free, with",
        "`precision=bf16-mixed`, `batch_size=1` and packed documents. –: no mode does. The measured lengths that are",
        f"not in the table fit with `none` on all three cards. The peaks were measured on {cards_of(records)}.",
    )
    return f"{words}\n{memory_results.first_modes_table(records)}"


def memory_picture(records: Records) -> str:
    shown = "Peak of a step against length, predicted (lines) and measured (marks); attention's own"
    return f"![{shown}](results/memory.png)\n"


def memory_steps(records: Records) -> str:
    return memory_results.cases_table(records)


def find_max_table(records: Records) -> str:
    text = ""
    for device in dict.fromkeys(record["device"] for record in records):
        found = [longest.from_record(record) for record in records if record["device"] == device]
        text += f"The longest row that trains on {device}, within 2 %, as `find_max=true` finds it:\n\n"
        text += f"{longest.table(found)}\n"
    if any("optimizer" not in record for record in records):
        text += paragraph(
            "The searches with no master ran before recomputed blocks ran their MLP in tiles. Today `selective` and",
            "`checkpoint` reach longer rows, also with an exact master.",
        )
    return f"{text}\n![The longest row, by attention and memory mode](results/find_max.png)\n"


def find_max_summary(records: Records) -> str:
    words = paragraph(
        "The longest rows of packed short documents that train on one GPU. [Train on long rows](docs/long_rows.md) has",
        "the times of rows that are a single document.",
    )
    return f"{words}\n{longest.best_table(list(map(longest.from_record, records)))}"


def ablation_summary(records: Records) -> str:
    rows = ablation_rows(records)
    words = paragraph(
        "Milliseconds of an optimizer step and peak GiB, by attention.",
        "[All measurements](measurements.md#attention-backends-in-a-training-step) has the parts of each step.",
        about_graphs(rows),
    )
    text = f"{words}\n{ablation.by_length(rows)}"
    if saved := saved_by_flash(rows):
        text += "\n" + paragraph(*saved)
    if slower := ablation.where_slower(rows, "flash"):
        text += "\nWhere `flash` is not the fastest:\n\n" + "".join(f"- {place}\n" for place in slower)
    return text


def saved_by_flash(rows: list[ablation.Row]) -> list[str]:
    """By how much `flash` shortens attention and a step of long rows, compared with `sdpa`: a sentence per dropout."""
    by_setting: dict[tuple[Any, ...], dict[str, ablation.Row]] = {row.without("attention"): {} for row in rows}
    for row in rows:
        by_setting[row.without("attention")][row.axes["attention"]] = row
    found: dict[float, dict[str, dict[int, float]]] = {}
    for setting in by_setting.values():
        own, other = setting.get("flash"), setting.get("sdpa")
        if own is None or other is None or own.axes["seq_len"] < LONG or {own.status, other.status} != {"ok"}:
            continue
        for name in ("attention_seconds", "step_seconds"):
            if name in own.measured and name in other.measured:
                by_length = found.setdefault(own.axes["dropout"], {}).setdefault(name, {})
                by_length[own.axes["seq_len"]] = 1 - own.measured[name] / other.measured[name]

    def less(saved: dict[int, float]) -> str:
        return f"{percents([*saved.values()])} less time ({min(saved):,} tokens or more)"

    return [
        f"With dropout {dropout:g}, a step with `flash` takes {less(saved['step_seconds'])} than with `sdpa`, "
        f"and attention alone {less(saved['attention_seconds'])}."
        for dropout, saved in found.items()
        if len(saved) == 2
    ]


def percents(shares: list[float]) -> str:
    """The smallest and the largest share."""
    return f"{round(100 * min(shares))} to {round(100 * max(shares))} %"


def about_graphs(rows: list[ablation.Row]) -> str:
    """Which trials could run with a CUDA graph: those whose steps were not split into parts."""
    is_split = ["forward_seconds" in row.measured for row in rows if row.measured]
    if not any(is_split):
        return ""
    if all(is_split):
        return (
            "The trials split each step into its parts (`callbacks.step_times=true`), which prevents CUDA graphs. "
            "Without a graph a step of 4,096 tokens is launch-bound."
        )
    return (
        "Trials without such parts ran as a training does, with a CUDA graph where there could be one. In the other "
        "trials the times of the parts (`callbacks.step_times=true`) prevented a graph."
    )


def ablation_details(records: Records) -> str:
    rows = ablation_rows(records)
    shorter = [record for record in records if record["steps"] < most_steps(records) and record["status"] == "ok"]
    steps = f"{most_steps(records)} steps" + " (fewer in the trials listed at the end)" * bool(shorter)
    text = ablation.describe_all(rows, [steps, *records[0]["settings"]])
    if shorter:
        axes = ablation.varying(rows)
        trials = (
            "".join(f"{axis}={record['axes'][axis]} " for axis in axes) + f"({record['steps']})" for record in shorter
        )
        text += "\n" + paragraph(f"These take long, and so have fewer steps and no losses: {', '.join(trials)}.")
    return text


def ablation_picture(records: Records) -> str:
    return "![Time, memory and loss against length, by attention](results/ablation.png)\n"


def ablation_rows(records: Records) -> list[ablation.Row]:
    """The trials. Those with fewer steps have no losses, which would be of another point of the curve."""
    rows, most = [], most_steps(records)
    for record in records:
        measured, losses = dict(record["measured"]), dict(record["losses"])
        if record["steps"] < most:
            measured |= {"train_loss": None, "val_loss": None}
            losses = {}
        rows.append(ablation.Row(record["axes"], record["status"], record["reason"], measured, losses))
    return rows


def most_steps(records: Records) -> int:
    return max(record["steps"] for record in records)


def compile_tier_table(records: Records) -> str:
    """A row per chip and kind of kernels, and a column per version of Triton."""
    cells = {(record["kind"], record["triton"]): record for record in records}
    versions = sorted({record["triton"] for record in records})
    rows = []
    for kind in sorted({record["kind"] for record in records}, key=lambda kind: (len(kind.split()[0]), kind)):
        chip, family = kind.split()
        found = [cells.get((kind, version)) for version in versions]
        rows.append((f"{chip}, {family}", *(compile_tier_cell(record) for record in found)))
    return table(("chip, kernels", *versions), rows)


def compile_tier_cell(record: dict[str, Any] | None) -> str:
    if record is None:
        return "–"
    good = record["kernels"] - record["failures"]
    return f"{good} of {record['kernels']} · {record['stack']} B · {record['shared'] / 1024:.0f} KiB"


TABLES: dict[str, Callable[[Records], str]] = {
    "training": training_results.runs_table,
    "graphs": training_results.graphs_table,
    "kernels": training_results.kernels_table,
    "fp8": training_results.fp8_table,
    "long_rows": training_results.long_rows_table,
    "updates": training_results.updates_table,
    "training_peer": training_results.peer_table,
    "training_peer.summary": training_results.peer_summary,
    "transformers": training_results.attention_functions_table,
    "start": start_sentences,
    "attention_h200": attention.full_table,
    "attention_h200.summary": attention.short_table,
    "attention_h100": attention.full_table,
    "recall": recall_table,
    "memory": memory_summary,
    "memory.modes": memory_modes,
    "memory.picture": memory_picture,
    "memory.steps": memory_steps,
    "memory.growth": memory_results.growth_table,
    "memory.traffic": memory_results.traffic_table,
    "find_max": find_max_table,
    "find_max.summary": find_max_summary,
    "ablation": ablation_summary,
    "ablation.picture": ablation_picture,
    "ablation.details": ablation_details,
    "compile_tier": compile_tier_table,
    "parallel": parallel_results.training_section,
    "parallel.attention": parallel_results.attention_section,
    "parallel_x4": parallel_results.long_section,
    "parallel_x4.weak": parallel_results.weak_section,
    "parallel_x4.attention": parallel_results.attention_section,
}


def draw_memory(source: Path, picture: Path) -> None:
    plot_memory_results(records_of(source), picture, metadata={"Source": fingerprint(source)})


def draw_find_max(source: Path, picture: Path) -> None:
    rows = list(map(longest.from_record, records_of(source)))
    plot_longest(rows, picture, "Longest row that trains", metadata={"Source": fingerprint(source)})


def draw_ablation(source: Path, picture: Path) -> None:
    records = records_of(source)
    title = ablation.title(records[0]["device"], most_steps(records))
    memory_of, metadata = records[0]["peak_memory_of"], {"Source": fingerprint(source)}
    plot_ablation(ablation_rows(records), picture, title=title, memory_of=memory_of, metadata=metadata)


def draw_parallel(source: Path, picture: Path) -> None:
    parallel_results.plot_parallel(records_of(source), picture, metadata={"Source": fingerprint(source)})


PICTURES: dict[str, Callable[[Path, Path], Any]] = {
    "parallel": draw_parallel,
    "attention_h200": plot_attention,
    "memory": draw_memory,
    "find_max": draw_find_max,
    "ablation": draw_ablation,
}


def records_of(source: Path) -> Records:
    return json.loads(source.read_text(encoding="utf-8"))["records"]


def fill(page: str, results: Path) -> str:
    """The page with all its tables made from their records; tables without a record are empty.

    Raises ValueError for a marker that is not in ``TABLES``.
    """

    def filled(match: re.Match[str]) -> str:
        opening, name, closing = match.groups()
        if name == INDEX:
            return opening + sources.index(results) + closing
        if name not in TABLES:
            raise ValueError(f"results:{name} is unknown; known are {INDEX}, {', '.join(TABLES)}")
        record = name.partition(".")[0]
        path = results / f"{record}.json"
        if not path.is_file():
            return opening + closing
        records = records_of(path)
        return f"{opening}{TABLES[name](records)}\n{sources.source_line(record, records)}{closing}"

    return MARKED.sub(filled, page)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with status 1 if a page or picture isn't up to date")
    args = parser.parse_args(arguments)
    return update(ROOT, args.check)


def update(root: Path, check: bool) -> int:
    """Write pages and pictures that are not up to date; with `check` only return 1 if there are any."""
    results = root / "docs" / "results"
    pages = {path: path.read_text(encoding="utf-8") for path in (root / "README.md", *sorted(root.glob("docs/*.md")))}
    after = {path: fill(text, results) for path, text in pages.items()}
    pictures = [(results / f"{name}.json", results / f"{name}.png", draw) for name, draw in PICTURES.items()]
    stale = [(source, picture, draw) for source, picture, draw in pictures if outdated(picture, source)]
    if check:
        return int(pages != after or bool(stale))
    for path, text in after.items():
        if text != pages[path]:
            path.write_text(text, encoding="utf-8")
    for source, picture, draw in stale:
        if source.is_file():
            draw(source, picture)
        else:
            picture.unlink()
    return 0


def outdated(picture: Path, source: Path) -> bool:
    """Whether a picture is missing, was drawn from other records, or has no records any more."""
    if source.is_file() != picture.is_file():
        return True
    return source.is_file() and fingerprint(source).encode() not in picture.read_bytes()


if __name__ == "__main__":
    sys.exit(main())
