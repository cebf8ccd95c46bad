"""Fill the README's tables from docs/results/*.json: `python scripts/update_readme.py`, with --check to change nothing.

A table stands between <!-- results:NAME --> and <!-- /results:NAME -->, and comes from docs/results/NAME.json, which
holds {"records": [...]}: for `training` and `recall` what collect_runs gathers, for `attention` bench_attention's. The
latter is also drawn, as docs/results/attention.png.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flash_train.profiling.attention_plot import fingerprint, plot_attention

ROOT = Path(__file__).parents[1]
DIRECTIONS = ("forward", "backward")
NAMES = {"triton": "this project", "fa2": "FlashAttention-2", "cudnn": "cuDNN"}
MORE_NAMES = {"flex": "FlexAttention", "varlen_attn": "varlen_attn"}  # where they were measured
MARKED = re.compile(r"(<!-- results:(\w+) -->\n).*?(<!-- /results:\2 -->)", re.DOTALL)


def training_table(records: list[dict[str, Any]]) -> str:
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


def attention_table(records: list[dict[str, Any]]) -> str:
    """A row per case: each implementation's rates, forward · backward, and our ratios to FlashAttention-2.

    Sparse cases follow in a table of their own, in parts of the time without the pattern.
    """
    sparse = [record for record in records if record.get("density", 1) < 1]
    records = [record for record in records if record not in sparse]
    names = NAMES | measured(MORE_NAMES, records)
    rows = []
    for case, found in by_case(records, "tflops").items():
        pairs = {name: [found.get((name, way)) for way in DIRECTIONS] for name in names}
        theirs = pairs["fa2"] if any(pairs["fa2"]) else pairs.get("varlen_attn", pairs["fa2"])
        ratios = [a / b if a and b else None for a, b in zip(pairs["triton"], theirs, strict=True)]
        rows.append((case, *(joined(pair, ".0f") for pair in pairs.values()), joined(ratios, ".2f")))
    ratio = "ratio to FlashAttention-2" + (" (packed: varlen_attn)" if "varlen_attn" in names else "")
    dense = table(("case", *names.values(), ratio), rows)
    return dense + ("\n" + sparse_table(sparse) if sparse else "")


def sparse_table(records: list[dict[str, Any]]) -> str:
    """A row per case: the part of the blocks that is attended, and of the dense time that it takes."""
    names = measured(NAMES | MORE_NAMES, records)
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


def measured(names: dict[str, str], records: list[dict[str, Any]]) -> dict[str, str]:
    """The implementations that have records."""
    found = {record["implementation"] for record in records}
    return {name: label for name, label in names.items() if name in found}


def by_case(records: list[dict[str, Any]], key: str) -> dict[str, dict[tuple[str, str], float | None]]:
    """A number by (implementation, direction) of every case, in the records' order."""
    found: dict[str, dict[tuple[str, str], float | None]] = {}
    for record in records:
        found.setdefault(record["case"], {})[record["implementation"], record["direction"]] = record.get(key)
    return found


def recall_table(records: list[dict[str, Any]]) -> str:
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


TABLES = {"training": training_table, "attention": attention_table, "recall": recall_table}


def number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def joined(values: Iterable[float | None], form: str) -> str:
    return " · ".join(number(value, form) for value in values)


def table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    rule = tuple("---" if i == 0 else "---:" for i in range(len(header)))
    return "".join(f"| {' | '.join(row)} |\n" for row in (header, rule, *rows))


def fill(readme: str, results: Path) -> str:
    """The README with every table for which there are results written anew.

    Raises ValueError for a marker whose table nobody knows how to make.
    """

    def filled(match: re.Match[str]) -> str:
        opening, name, closing = match.groups()
        if name not in TABLES:
            raise ValueError(f"README.md: results:{name} is unknown; known are {', '.join(TABLES)}")
        source = results / f"{name}.json"
        if not source.is_file():
            return match[0]
        records = json.loads(source.read_text(encoding="utf-8"))["records"]
        return opening + TABLES[name](records) + closing

    return MARKED.sub(filled, readme)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with status 1 if the README isn't up to date")
    args = parser.parse_args(arguments)
    path, results = ROOT / "README.md", ROOT / "docs" / "results"
    before = path.read_text(encoding="utf-8")
    after = fill(before, results)
    source, picture = results / "attention.json", results / "attention.png"
    if args.check:
        return int(before != after or outdated(picture, source))
    path.write_text(after, encoding="utf-8")
    if source.is_file() and (outdated(picture, source) or not picture.is_file()):
        plot_attention(source, picture)
    return 0


def outdated(picture: Path, source: Path) -> bool:
    """Whether there is a picture that was drawn from something else."""
    return picture.is_file() and fingerprint(source).encode() not in picture.read_bytes()


if __name__ == "__main__":
    sys.exit(main())
