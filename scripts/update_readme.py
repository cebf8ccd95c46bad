"""Fill the README's tables from docs/results/*.json: `python scripts/update_readme.py`, with --check to change nothing.

A table stands between <!-- results:NAME --> and <!-- /results:NAME -->, and comes from docs/results/NAME.json, which
holds {"records": [...]}: for `training` the summary.json of each run, for `attention` the records of bench_attention.
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
            number(record["train_loss"], ".3f"),
        )
        for record in records
    ]
    return table(("attention", "seq_len", "tokens/s", "MFU", "peak GiB", "final loss"), rows)


def attention_table(records: list[dict[str, Any]]) -> str:
    """A row per case and implementation, which the records have one of for each direction."""
    cases: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for record in records:
        cases.setdefault((record["case"], record["implementation"]), {})[record["direction"]] = record
    rows = []
    for (case, implementation), by_direction in cases.items():
        directions = [by_direction.get(name, {}) for name in ("forward", "backward")]
        rates = [number(record.get("tflops"), ".0f") for record in directions]
        ratios = [number(record.get("ratio_to_fa2"), ".2f") for record in directions]
        rows.append((case, implementation, *rates, " / ".join(ratios)))
    return table(("case", "implementation", "forward TFLOP/s", "backward TFLOP/s", "ratio to FA2 (fwd / bwd)"), rows)


TABLES = {"training": training_table, "attention": attention_table}


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
