"""Fill the tables of README.md and docs/*.md from docs/results/*.json: `python scripts/update_readme.py`.

With --check it changes nothing and exits with 1 if a table or picture is not up to date.

A table stands between <!-- results:NAME --> and <!-- /results:NAME --> in any page. NAME and NAME.PART come from
docs/results/NAME.json, which holds {"records": [...]}. collect_runs writes the records of `training`, `recall`,
`graphs`, `long_rows`, `fp8`, `updates`, `ablation` and `find_max`; benchmarks write `attention_h200`, `attention_h100`,
`memory`, `training_peer`, `start` and `parallel`; the compile tier writes `compile_tier`. Some records also have a
picture, docs/results/NAME.png. Without a record its tables are empty, and its picture is removed.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flash_train.attention.kernels.families import FAMILIES, PORTABLE
from flash_train.profiling import parallel_results, training_results
from flash_train.profiling.ablation import table as ablation
from flash_train.profiling.ablation.plot import plot_ablation
from flash_train.profiling.attention.plot import fingerprint, plot_attention
from flash_train.profiling.memory import longest
from flash_train.profiling.memory import results as memory_results
from flash_train.profiling.memory.longest import plot_longest
from flash_train.profiling.memory.results import plot_memory_results
from flash_train.records.markdown import joined, number
from flash_train.records.markdown import markdown_table as table

ROOT = Path(__file__).parents[1]
Records = list[dict[str, Any]]
DIRECTIONS = ("forward", "backward")
OURS = "this project"
OWN = dict.fromkeys(FAMILIES, OURS) | {PORTABLE.name: "… portable"}
NAMES = {"fa2": "FlashAttention-2", "cudnn": "cuDNN", "flex": "FlexAttention", "varlen_attn": "varlen_attn"}
#: cases of the short table of attention, in the words of a reader who does not know the names of the cases
SHORT_CASES = {
    "d128-h16-n16384-causal": "head_dim 128, causal",
    "d64-h32-n16384-causal": "head_dim 64, causal",
    "d256-h8-n16384-causal": "head_dim 256, causal",
    "d128-h16-n16384-full": "head_dim 128, full",
    "d128-h16-n16384-causal-dropout0.1": "head_dim 128, causal, dropout 0.1",
}
SHORT_PEERS = ("fa2", "cudnn", "flex")
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


def attention_table(records: Records) -> str:
    """A row per case: each implementation's rates, forward · backward, and our ratios to cuDNN.

    Sparse cases follow in a table of their own, as fractions of the time without the pattern.
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


def attention_short(records: Records) -> str:
    """A row per case of ``SHORT_CASES``, without our portable kernels and without the peers of packed rows."""
    names = {"hopper": OWN["hopper"], **{name: NAMES[name] for name in SHORT_PEERS}}
    gpu = records[0]["gpu"]
    words = f"The attention operator over 16,384 tokens in TFLOP/s, forward · backward, bf16 ({gpu}):\n\n"
    rows = []
    for case, found in by_case(records, "tflops").items():
        if case in SHORT_CASES:
            rates = (joined([found.get((name, way)) for way in DIRECTIONS], ".0f") for name in names)
            rows.append((SHORT_CASES[case], *rates))
    return words + table(("case", *names.values()), rows)


def sparse_table(records: Records) -> str:
    """A row per case: the share of the blocks that is attended, and the time as a fraction of the dense time."""
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
    words = (
        "The peak of a step, predicted from its configuration, compared with `max_memory_allocated`. All steps are in"
    )
    return f"{words}\n[Memory](memory.md#how-good-the-prediction-is).\n\n{memory_results.summary_table(records)}"


def memory_steps(records: Records) -> str:
    picture = (
        "![Peak of a step against length, predicted (lines) and measured (marks); attention's own](results/memory.png)"
    )
    return f"{memory_results.cases_table(records)}\n{picture}\n"


def find_max_table(records: Records) -> str:
    words = "The longest row that trains, within 2 %, as `find_max=true` finds it:"
    return f"{words}\n\n{longest.table(list(map(longest.from_record, records)))}"


def find_max_details(records: Records) -> str:
    picture = "![The longest row, by attention and memory mode](results/find_max.png)"
    return f"{longest.table(list(map(longest.from_record, records)))}\n{picture}\n"


def ablation_summary(records: Records) -> str:
    rows = ablation_rows(records)
    words = "Milliseconds of an optimizer step and peak GiB, by attention. All measurements are in"
    text = f"{words} [Ablations](ablation.md).\n\n{ablation.by_length(rows)}"
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
        trials = (f"attention={r['axes']['attention']} seq_len={r['axes']['seq_len']} ({r['steps']})" for r in shorter)
        text += f"\nThese take long, and so have fewer steps and no losses: {', '.join(trials)}.\n"
    return f"{text}\n{picture}\n"


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
    "fp8": training_results.fp8_table,
    "long_rows": training_results.long_rows_table,
    "updates": training_results.updates_table,
    "training_peer": training_results.peer_table,
    "training_peer.summary": training_results.peer_summary,
    "transformers": training_results.attention_functions_table,
    "start": start_sentences,
    "attention_h200": attention_table,
    "attention_h200.summary": attention_short,
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
    "compile_tier": compile_tier_table,
    "parallel": parallel_results.training_section,
    "parallel.attention": parallel_results.attention_section,
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
