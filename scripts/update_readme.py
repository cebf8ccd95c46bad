"""Fill the README's tables from docs/results/*.json: `python scripts/update_readme.py`, with --check to change nothing.

A table stands between <!-- results:NAME --> and <!-- /results:NAME -->, and comes from docs/results/NAME.json, which
holds {"records": [...]}: for `training` and `recall` what collect_runs gathers, for `attention` bench_attention's.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
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
    """A row per case: each implementation's rates, forward · backward, and our ratios to FlashAttention-2."""
    rates: dict[str, dict[tuple[str, str], float | None]] = {}
    for record in records:
        rates.setdefault(record["case"], {})[record["implementation"], record["direction"]] = record.get("tflops")
    names = {"triton": "this project", "fa2": "FlashAttention-2", "cudnn": "cuDNN"}
    rows = []
    for case, found in rates.items():
        pairs = [[found.get((name, way)) for way in ("forward", "backward")] for name in names]
        ratios = [ours / theirs if ours and theirs else None for ours, theirs in zip(*pairs[:2], strict=True)]
        cells = [" · ".join(number(rate, ".0f") for rate in pair) for pair in pairs]
        rows.append((case, *cells, " · ".join(number(ratio, ".2f") for ratio in ratios)))
    return table(("case", *names.values(), "ratio to FlashAttention-2"), rows)


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
    path = ROOT / "README.md"
    before = path.read_text(encoding="utf-8")
    after = fill(before, ROOT / "docs" / "results")
    if args.check:
        return int(before != after)
    path.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
