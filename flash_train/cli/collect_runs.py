"""Collect run directories into one file for docs/results: ``python scripts/collect_runs.py RUN_DIR … --out FILE``.

The directories must be of one kind. A training run gives one record: its summary.json, with the mean of its last ten
training losses from metrics.csv, the settings of its config.yaml that tell such runs apart, and the kernels of its last
profiled step. An ablation gives a record per trial, a search for the longest row gives one per attention and memory
mode.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean as mean
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from flash_train.cli.config.errors import ArgumentParser, UsageError, blame, one_line_errors
from flash_train.cli.sweep.tables import shared_settings
from flash_train.files import write_json
from flash_train.profiling.ablation.repeats import SEED
from flash_train.profiling.ablation.table import from_csv
from flash_train.records import read_column

LAST = 10
RUN_KEYS = ("model", "precision", "attention", "seq_len")  # these and SETTINGS identify a training run
SETTINGS = {
    "master": "optimizer.master",
    "recipe": "precision_fp8.recipe",
    "memory": "memory.mode",
    "memory_keep": "memory.keep",
    "memory_offload": "memory.offload",
    "moments": "optimizer.moments",
    "optimizer_offload": "optimizer.offload",
    "in_backward": "optimizer.in_backward",
    "batch_size": "batch_size",
    "accumulate": "accumulate",
    "cuda_graph": "trainer.cuda_graph",
}
LATER_AXES = {"parallel": "auto"}  # axes that records of earlier versions lack, and what ran then
ABLATION, LOSSES, FIND_MAX = "ablation.csv", "ablation_losses.csv", "find_max.json"

Records = list[dict[str, Any]]


def collect(run_dir: Path, commit: str | None) -> dict[str, Any]:
    """The record of one run.

    Raises:
        UsageError: the run has not finished, or did not train.
    """
    summary = _summary(run_dir)
    if summary["status"] != "finished":
        raise UsageError(f"{run_dir}: the run is {summary['status']}; allowed: one that has finished")
    losses = read_column(run_dir / "metrics.csv", "train/loss")[1]
    if not losses:
        raise UsageError(f"{run_dir}: metrics.csv has no training losses; allowed: a run that has trained")
    for path in ("run_dir", "wandb_dir"):  # paths on the machine that ran it
        summary.pop(path)
    if commit:
        summary["versions"]["commit"] = commit
    config = cast(DictConfig, OmegaConf.load(run_dir / "config.yaml"))
    settings = {name: OmegaConf.select(config, key) for name, key in SETTINGS.items()}
    means = {"train_loss_mean": mean(losses), f"train_loss_last_{LAST}": mean(losses[-LAST:])}
    return {**summary, **settings, **means, **_kernels(run_dir)}


def _kernels(run_dir: Path) -> dict[str, Any]:
    """The kernels by kind of the last profiled step; empty if there is none."""
    reports = sorted(run_dir.glob("kernels/step-*/kernels.json"))
    if not reports:
        return {}
    found = json.loads(reports[-1].read_text(encoding="utf-8"))
    return {"kernel_kinds": found["kinds"], "busy_seconds": found["busy_seconds"]}


def collect_ablation(run_dir: Path, commit: str | None) -> Records:
    """A record per trial: axes, status, measurements and losses; the other values come from a finished trial.

    Raises:
        UsageError: no trial has finished.
    """
    losses = run_dir / LOSSES
    curves = losses.read_text(encoding="utf-8") if losses.is_file() else ""
    rows = from_csv((run_dir / ABLATION).read_text(encoding="utf-8"), curves)
    trials = [(path.parent, _summary(path.parent)) for path in sorted(run_dir.glob("cells/*/summary.json"))]
    finished = next(((trial, summary) for trial, summary in trials if summary["status"] == "finished"), None)
    if finished is None:
        raise UsageError(f"{run_dir}: no trial has finished; allowed: an ablation with a finished trial")
    trial, summary = finished
    common = {key: summary[key] for key in ("device", "steps", "peak_memory_of", "versions")}
    common["settings"] = shared_settings(cast(DictConfig, OmegaConf.load(trial / "config.yaml")))
    if commit:
        common["versions"]["commit"] = commit
    return [
        {
            "axes": dict(row.axes), "status": row.status, "reason": row.reason, "measured": dict(row.measured),
            "losses": list(map(list, row.losses.items())), **common,
        }
        for row in rows
    ]  # fmt: skip


def join_trials(records: Records) -> Records:
    """Join several ablations, ordered by axis values, lengths ascending. If a trial occurs twice, the last counts."""
    most = sorted((record["axes"] for record in records), key=len, reverse=True)
    names = list(dict.fromkeys(name for axes in most for name in axes))
    records = [record | {"axes": {name: _axis_value(record, name) for name in names}} for record in records]
    trials = {tuple(record["axes"].items()): record for record in records}
    values: dict[str, list[Any]] = {}
    for record in trials.values():
        for axis, value in record["axes"].items():
            values.setdefault(axis, [])
            if value not in values[axis]:
                values[axis].append(value)
    values["seq_len"].sort()
    return sorted(trials.values(), key=lambda r: [values[axis].index(value) for axis, value in r["axes"].items()])


def _axis_value(record: dict[str, Any], axis: str) -> Any:
    """The value of an axis; records of earlier versions have the seed in their settings only."""
    if axis in record["axes"] or axis != SEED:
        return record["axes"].get(axis, LATER_AXES.get(axis))
    return int(next(text.partition("=")[2] for text in record["settings"] if text.startswith(f"{SEED}=")))


def _summary(run_dir: Path) -> dict[str, Any]:
    path = run_dir / "summary.json"
    if not path.is_file():
        raise UsageError(f"{run_dir}: has no summary.json; allowed: directories of runs")
    return json.loads(path.read_text(encoding="utf-8"))


def collect_find_max(run_dir: Path, commit: str | None) -> Records:
    """A record per attention and memory mode."""
    found = json.loads((run_dir / FIND_MAX).read_text(encoding="utf-8"))
    common = {"device": found["device"], "versions": found["versions"] | ({"commit": commit} if commit else {})}
    return [record | common for record in found["records"]]


def collect_all(run_dirs: list[Path], commit: str | None, known: Records) -> Records:
    """The records of directories of one kind, and the known records that they do not measure again."""
    if all((run / ABLATION).is_file() for run in run_dirs):
        return join_trials(known + [record for run in run_dirs for record in collect_ablation(run, commit)])
    if all((run / FIND_MAX).is_file() for run in run_dirs):
        found = known + [record for run in run_dirs for record in collect_find_max(run, commit)]
        return list({_search_of(record): record for record in found}.values())
    found = [collect(run, commit) for run in run_dirs]
    records = found + [record for record in known if not any(_are_same_run(record, new) for new in found)]
    return sorted(records, key=lambda record: (-record["seq_len"], -(record["tokens_per_second"] or 0)))


def _search_of(record: dict[str, Any]) -> tuple[str, ...]:
    """What identifies a search of the longest row; records of earlier versions lack the model."""
    return (record.get("model", "1b3"), record["attention"], record["memory"], record["device"])


def _are_same_run(known: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether a new record replaces a known one; records of earlier versions lack some settings."""
    settings = [name for name in SETTINGS if name in known]
    return all(known.get(name) == new.get(name) for name in (*RUN_KEYS, *settings))


@one_line_errors()
def main(arguments: list[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__, page="docs/benchmarks.md")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help="folder of a run, ablation or search")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON file to write")
    parser.add_argument(
        "--add", action="store_true", help="keep the records in FILE that these runs do not measure again"
    )
    parser.add_argument("--commit", help="the commit that ran, if the runs were outside a git checkout")
    options = parser.parse_args(arguments)
    with blame(f"--out {options.out}"):
        known = json.loads(options.out.read_text(encoding="utf-8")) if options.add and options.out.is_file() else {}
    with blame("RUN_DIR"):
        records = collect_all(options.runs, options.commit, known.get("records", []))
    with blame(f"--out {options.out}"):
        write_json(options.out, {"records": records})
    print(f"wrote {len(records)} record{'' if len(records) == 1 else 's'} to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
