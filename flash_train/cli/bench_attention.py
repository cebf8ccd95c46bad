"""Speed of the attention operator beside its peers on one GPU: ``python scripts/bench_attention.py --out FILE``.

Every implementation is checked against fp32 before it is timed, on the inputs that are timed; a wrong one gets no
figure. Rates are model FLOPs (causal: half; backward: 2.5 times the forward) over the median time. FILE is written
after every case; started again with the same commit, GPU and versions, the command goes on behind the last one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flash_train.profiling import versions, write_json
from flash_train.profiling.attention_cases import Case, cases
from flash_train.profiling.attention_peers import add_ratios, implementations, measure

Records = list[dict[str, Any]]
SAME = ("commit", "gpu", "torch", "triton")  #: what must be equal for records to stand beside each other


def known_records(path: Path | None, environment: dict[str, str | None]) -> Records:
    """The records of an earlier run in the same surroundings; none where the code may have changed since."""
    if path is None or not path.is_file():
        return []
    found = json.loads(path.read_text(encoding="utf-8"))
    commit = environment["commit"]
    if commit is None or commit.endswith("-dirty"):
        print(f"{path}: begun anew, since commit {commit} does not say which code runs")
        return []
    differing = [key for key in SAME if found["versions"].get(key) != environment[key]]
    if differing:
        print(f"{path}: begun anew, since it differs in {', '.join(differing)}")
        return []
    return found["records"]


def run_cases(
    wanted: list[Case],
    records: Records,
    measure_case: Callable[[Case], Records],
    save: Callable[[Records], None],
    time_limit: float,
) -> list[Case]:
    """Measure what has no record yet and save after each case; return what the time limit left out.

    A case is not begun where the longest so far would no longer fit.
    """
    done = {record["case"] for record in records}
    left = [case for case in wanted if case.name not in done]
    start, longest = time.monotonic(), 0.0
    while left:
        begin = time.monotonic()
        if begin - start + longest > time_limit:
            break
        case = left.pop(0)
        rows = measure_case(case)
        records += rows
        save(records)
        print(f"{case.name}: {_shown(rows)}", flush=True)
        longest = max(longest, time.monotonic() - begin)
    return left


def measure_all(case: Case, environment: dict[str, str | None], timer: Callable[[Callable[[], Any]], float]) -> Records:
    """Every implementation's records of a case, with ratios and what they were measured on."""
    rows = [row for name in implementations(case) for row in measure(name, case, timer)]
    add_ratios(rows)
    return [row | {key: environment[key] for key in SAME} for row in rows]


def _shown(rows: Records) -> str:
    def one(row: dict[str, Any]) -> str:
        figure = f"{row['tflops']:.0f} TFLOP/s" if row.get("tflops") else f"none ({row['reason']})"
        ratio = f", {row['time_to_dense']:.3f} of dense's time" if "time_to_dense" in row else ""
        return f"{row['implementation']} {row['direction']} {figure}{ratio}"

    return "; ".join(map(one, rows))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the records to this JSON file, or go on with it")
    parser.add_argument("--only", default="", help="cases whose name contains this, such as d128 or causal")
    parser.add_argument("--rep", type=int, default=120, help="milliseconds of repetitions per figure")
    parser.add_argument("--commit", help="recorded commit, where this is no git checkout")
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="seconds after which no case is begun")
    options = parser.parse_args(arguments)
    wanted = [case for case in cases() if options.only in case.name]
    if not wanted:
        parser.error(f"--only {options.only!r} is part of no case's name; names are like {next(cases()).name}")
    if not torch.cuda.is_available():
        print("bench_attention needs an NVIDIA GPU: none was found", file=sys.stderr)
        return 1
    from triton.testing import do_bench

    torch.manual_seed(0)
    environment = versions()
    if options.commit:
        environment["commit"] = options.commit
    order = [case.name for case in cases()]

    def save(records: Records) -> None:
        if options.out:
            sorted_records = sorted(records, key=lambda record: order.index(record["case"]))
            write_json(options.out, {"versions": environment, "records": sorted_records})

    def timer(call: Callable[[], Any]) -> float:
        return do_bench(call, warmup=25, rep=options.rep, return_mode="median")

    records = known_records(options.out, environment)
    left = run_cases(wanted, records, lambda case: measure_all(case, environment, timer), save, options.time_limit)
    if left:
        print(f"the time limit left {len(left)} of {len(wanted)} cases out; start again to go on")
    elif options.out:
        print(f"{options.out} holds all {len(wanted)} cases")
    return 0
