"""Fill the tables of README.md and docs/*.md from docs/results/*.json: `python scripts/update_readme.py`.

With --check it changes nothing, and its exit status says whether all is up to date.

A table stands between <!-- results:NAME --> and <!-- /results:NAME -->, and comes from docs/results/NAME.json, or for
NAME.PART from that of NAME, which holds {"records": [...]}: for `training`, `recall`, `ablation` and `find_max` what
collect_runs gathers, for `attention_h200` and `attention_h100`, `memory`, `training_peer` and `start` what their
benchmarks write. Those that have a picture are drawn as docs/results/NAME.png. Where there is no such file, neither
table nor picture stays.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from flash_train.attention.kernels.families import FAMILIES, PORTABLE
from flash_train.profiling.ablation import table as ablation
from flash_train.profiling.ablation.plot import plot_ablation
from flash_train.profiling.attention.plot import fingerprint, plot_attention
from flash_train.profiling.memory import longest
from flash_train.profiling.memory import results as memory_results
from flash_train.profiling.memory.longest import plot_longest
from flash_train.profiling.memory.results import plot_memory_results
from flash_train.records.markdown import markdown_table as table

ROOT = Path(__file__).parents[1]
Records = list[dict[str, Any]]
DIRECTIONS = ("forward", "backward")
OURS = "this project"
OWN = dict.fromkeys(FAMILIES, OURS) | {PORTABLE.name: "… portable"}
NAMES = {"fa2": "FlashAttention-2", "cudnn": "cuDNN", "flex": "FlexAttention", "varlen_attn": "varlen_attn"}
PEERS = {"flash_train": "this project", "transformers": "transformers + Liger"}
PARTS = ("forward", "backward", "optimizer")
MARKED = re.compile(r"(<!-- results:([\w.]+) -->\n).*?(<!-- /results:\2 -->)", re.DOTALL)


def training_table(records: Records) -> str:
    """A row per run."""
    rows = [
        (
            record["attention"],
            f"{record['seq_len']:,}",
            number(record["tokens_per_second"], ",.0f"),
            number(record["mfu"], ".1%"),
            number(record["peak_memory_gib"], ".1f"),
            number(record["train_loss_last_10"], ".3f"),
        )
        for record in records
    ]
    return table(("attention", "seq_len", "tokens/s", "MFU", "peak GiB", "loss (mean of last 10)"), rows)


def training_peer_table(records: Records) -> str:
    """What was compared, and a row per case and implementation."""
    words = (
        "Training beside what one would write today, a Llama of `transformers` with Liger's operations: the same\n"
        "weights (`1b3` with a vocabulary of 32,768), tokens and AdamW, bf16, one document a row; where ours keeps\n"
        "less, the peer checkpoints its layers. Ours runs in Lightning's `Trainer`, with its gradients' norm and its\n"
        f"log. The losses of every step agree within 0.5 % ({records[0]['gpu']}).\n\n"
    )
    rows = [
        (
            f"{record['seq_len']:,}",
            record["memory"],
            PEERS[record["implementation"]],
            number(record.get("tokens_per_second"), ",.0f"),
            number(record.get("mfu"), ".1%"),
            number(record.get("peak_memory_gib"), ".1f"),
            joined([milliseconds(record, part) for part in PARTS], ",.0f"),
            number(milliseconds(record, "attention"), ",.0f"),
            number(record.get("ratio_to_transformers"), ".2f"),
        )
        for record in records
    ]
    parts = f"{' · '.join(PARTS)} (ms)"
    return words + table(
        ("tokens", "memory", "", "tokens/s", "MFU", "peak GiB", parts, "of it attention", "ratio"), rows
    )


def start_words(records: Records) -> str:
    """A sentence per case."""
    cold, warm = ([record for record in records if record["cache"] == cache] for cache in ("cold", "warm"))
    return "".join(
        f"From the command to the first optimizer step (`{first['case']}`, `data=stdlib`, {first['gpu']}): "
        f"{again['seconds']:.0f} s;\n"
        f"the first time, when kernels are compiled and texts turned into tokens, {first['seconds']:.0f} s.\n"
        for first, again in zip(cold, warm, strict=True)
    )


def milliseconds(record: dict[str, Any], part: str) -> float | None:
    seconds = record.get(f"{part}_seconds")
    return None if seconds is None else seconds * 1e3


def attention_table(records: Records) -> str:
    """A row per case: each implementation's rates, forward · backward, and our ratios to cuDNN.

    Sparse cases follow in a table of their own, in parts of the time without the pattern.
    """
    sparse = [record for record in records if record.get("density", 1) < 1]
    records = [record for record in records if record not in sparse]
    names = own_names(records) | measured(NAMES, records)
    ours = next(iter(names))
    rows = []
    for case, found in by_case(records, "tflops").items():
        pairs = {name: [found.get((name, way)) for way in DIRECTIONS] for name in names}
        theirs = next((pairs[name] for name in ("cudnn", "varlen_attn") if any(pairs.get(name, ()))), (None, None))
        ratios = [a / b if a and b else None for a, b in zip(pairs[ours], theirs, strict=True)]
        rows.append((case, *(joined(pair, ".0f") for pair in pairs.values()), joined(ratios, ".2f")))
    ratio = "ratio to cuDNN" + (" (packed: varlen_attn)" if "varlen_attn" in names else "")
    dense = table(("case", *names.values(), ratio), rows)
    return dense + ("\n" + sparse_table(sparse) if sparse else "")


def sparse_table(records: Records) -> str:
    """A row per case: the part of the blocks that is attended, and of the dense time that it takes."""
    names = own_names(records) | measured(NAMES, records)
    density = {record["case"]: record["density"] for record in records}
    rows = [
        (
            case,
            number(density[case], ".1%"),
            *(joined([found.get((name, way)) for way in DIRECTIONS], ".3f") for name in names),
        )
        for case, found in by_case(records, "time_to_dense").items()
    ]
    labels = (f"{label}: time / dense" for label in names.values())
    return table(("case", "blocks attended", *labels), rows)


def own_names(records: Records) -> dict[str, str]:
    """Our kernels that have records; where there are none but the portable ones, they are "this project"."""
    found = measured(OWN, records)
    return found if len(found) > 1 else dict.fromkeys(found or [PORTABLE.name], OURS)


def measured(names: dict[str, str], records: Records) -> dict[str, str]:
    """The implementations that have records."""
    found = {record["implementation"] for record in records}
    return {name: label for name, label in names.items() if name in found}


def by_case(records: Records, key: str) -> dict[str, dict[tuple[str, str], float | None]]:
    """A number by (implementation, direction) of every case, in the records' order."""
    found: dict[str, dict[tuple[str, str], float | None]] = {}
    for record in records:
        found.setdefault(record["case"], {})[record["implementation"], record["direction"]] = record.get(key)
    return found


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


def memory_summary(records: Records) -> str:
    words = "A step's peak by its configuration alone, beside `max_memory_allocated`; each step is in"
    return f"{words} [docs/memory.md](docs/memory.md):\n\n{memory_results.summary_table(records)}"


def memory_steps(records: Records) -> str:
    picture = (
        "![Peak of a step against length, predicted (lines) and measured (marks); attention's own](results/memory.png)"
    )
    return f"{memory_results.cases_table(records)}\n{picture}\n"


def find_max_table(records: Records) -> str:
    words = "The longest row that trains, to 2 %, of `find_max=true`:"
    return f"{words}\n\n{longest.table(list(map(longest.from_record, records)))}"


def find_max_details(records: Records) -> str:
    picture = "![The longest row, by attention and memory mode](results/find_max.png)"
    return f"{longest.table(list(map(longest.from_record, records)))}\n{picture}\n"


def ablation_summary(records: Records) -> str:
    rows = ablation_rows(records)
    words = "Milliseconds of an optimizer step and peak GiB, by attention; all of it is in"
    text = f"{words} [docs/ablation.md](docs/ablation.md):\n\n{ablation.by_length(rows)}"
    if slower := ablation.where_slower(rows, "flash"):
        text += "\nWhere `flash` is not the fastest:\n\n" + "".join(f"- {place}\n" for place in slower)
    return text


def ablation_details(records: Records) -> str:
    picture = "![Time, memory and loss against length, by attention](results/ablation.png)"
    first = records[0]
    each = (ablation.format_versions(record["versions"]) for record in records)
    versions = (" or ".join(dict.fromkeys(words)) for words in zip(*each, strict=True))
    common = [f"{most_steps(records)} steps", *first["settings"], *versions]
    text = ablation.describe_all(ablation_rows(records), common)
    if shorter := [record for record in records if record["steps"] < most_steps(records) and record["status"] == "ok"]:
        cells = (f"attention={r['axes']['attention']} seq_len={r['axes']['seq_len']} ({r['steps']})" for r in shorter)
        text += f"\nOf fewer steps, for the time they take, and so without losses: {', '.join(cells)}.\n"
    return f"{text}\n{picture}\n"


def ablation_rows(records: Records) -> list[ablation.Row]:
    """The cells; those of fewer steps than others without their losses, which lie elsewhere on the curve."""
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


TABLES: dict[str, Callable[[Records], str]] = {
    "training": training_table,
    "training_peer": training_peer_table,
    "start": start_words,
    "attention_h200": attention_table,
    "attention_h100": attention_table,
    "recall": recall_table,
    "memory": memory_summary,
    "memory.steps": memory_steps,
    "memory.growth": memory_results.growth_table,
    "memory.traffic": memory_results.traffic_table,
    "find_max": find_max_table,
    "find_max.details": find_max_details,
    "ablation": ablation_summary,
    "ablation.details": ablation_details,
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


PICTURES: dict[str, Callable[[Path, Path], Any]] = {
    "attention_h200": plot_attention,
    "memory": draw_memory,
    "find_max": draw_find_max,
    "ablation": draw_ablation,
}


def records_of(source: Path) -> Records:
    return json.loads(source.read_text(encoding="utf-8"))["records"]


def number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def joined(values: Iterable[float | None], form: str) -> str:
    return " · ".join(number(value, form) for value in values)


def fill(page: str, results: Path) -> str:
    """A page with every table for which there are results written anew, and no other.

    Raises ValueError for a marker whose table nobody knows how to make.
    """

    def filled(match: re.Match[str]) -> str:
        opening, name, closing = match.groups()
        if name not in TABLES:
            raise ValueError(f"results:{name} is unknown; known are {', '.join(TABLES)}")
        source = results / f"{name.partition('.')[0]}.json"
        return opening + (TABLES[name](records_of(source)) if source.is_file() else "") + closing

    return MARKED.sub(filled, page)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with status 1 if a page or picture isn't up to date")
    args = parser.parse_args(arguments)
    return update(ROOT, args.check)


def update(root: Path, check: bool) -> int:
    """Write pages and pictures anew; with `check` only say, by 1, that some are not up to date."""
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
    """Whether a picture is not that of its records: missing, drawn from others, or left of some that are gone."""
    if source.is_file() != picture.is_file():
        return True
    return source.is_file() and fingerprint(source).encode() not in picture.read_bytes()


if __name__ == "__main__":
    sys.exit(main())
