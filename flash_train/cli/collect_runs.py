"""Gather run directories into one record for docs/results: ``python scripts/collect_runs.py RUN_DIR … --out FILE``.

Each record is a run's summary.json, with the mean of its last ten training losses from metrics.csv beside it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from flash_train.profiling import MetricsTable, write_json

LAST = 10


def collect(run_dir: Path, commit: str | None) -> dict[str, Any]:
    """The record of one finished run."""
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    losses = MetricsTable(run_dir / "metrics.csv").column("train/loss")[1][-LAST:]
    for path in ("run_dir", "wandb_dir"):  # of the machine that ran it, not of the result
        summary.pop(path)
    if commit:
        summary["versions"]["commit"] = commit
    return {**summary, f"train_loss_last_{LAST}": sum(losses) / len(losses)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--commit", help="commit that ran, where the runs did not see a git checkout")
    options = parser.parse_args(arguments)
    records = [collect(run, options.commit) for run in options.runs]
    records.sort(key=lambda record: (-record["seq_len"], -(record["tokens_per_second"] or 0)))
    write_json(options.out, {"records": records})
    print(f"wrote {len(records)} records to {options.out}")
    return 0
