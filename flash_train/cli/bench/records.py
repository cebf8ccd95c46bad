"""Records of benchmarks. They are saved after every case, so that an interrupted benchmark can continue."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from flash_train.files import write_json
from flash_train.records import versions

Records = list[dict[str, Any]]
COMPARED_VERSIONS = ("commit", "gpu", "torch", "triton")  #: records can be compared only if these are equal

#: between the losses of two implementations, relative; two runs of one implementation differ by a tenth of this
LOSS_TOLERANCE = 5e-3


class Named(Protocol):
    @property
    def name(self) -> str: ...


C = TypeVar("C", bound=Named)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of every benchmark."""
    parser.add_argument("--out", type=Path, help="JSON file to write, or to continue")
    parser.add_argument("--only", default="", help="run only cases whose name contains this")
    parser.add_argument("--commit", help="commit to record, if this is no git checkout")
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="start no case after so many seconds")


def selected_cases(parser: argparse.ArgumentParser, options: argparse.Namespace, every: Sequence[C]) -> list[C]:
    """The cases that match ``--only``; it is an error if there is none."""
    wanted = [case for case in every if options.only in case.name]
    if not wanted:
        parser.error(f"--only {options.only!r} is part of no case's name; names are like {every[0].name}")
    return wanted


def environment_of(commit: str | None) -> dict[str, str | None]:
    """Versions, with the given commit if there is one."""
    return versions() | ({"commit": commit} if commit else {})


def known_records(path: Path | None, environment: dict[str, str | None]) -> Records:
    """The records of an earlier run with the same versions; empty if the code may have changed since."""
    if path is None or not path.is_file():
        return []
    found = json.loads(path.read_text(encoding="utf-8"))
    commit = environment["commit"]
    if commit is None or commit.endswith("-dirty"):
        print(f"{path}: starts over, as commit {commit} does not identify the code")
        return []
    differing = [key for key in COMPARED_VERSIONS if found["versions"].get(key) != environment[key]]
    if differing:
        print(f"{path}: starts over, as it differs in {', '.join(differing)}")
        return []
    return found["records"]


def run_cases(
    wanted: Sequence[C],
    records: Records,
    measure_case: Callable[[C], Records],
    shown: Callable[[Records], str],
    save: Callable[[Records], None],
    time_limit: float,
) -> list[C]:
    """Measure the cases without a record, and save after each one. Return the cases that the time limit left out.

    A case does not start if one as long as the longest so far would exceed the limit.
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
        print(f"{case.name}: {shown(rows)}", flush=True)
        longest = max(longest, time.monotonic() - begin)
    return left


def saving(path: Path | None, environment: dict[str, str | None], order: Sequence[str]) -> Callable[[Records], None]:
    """A function that writes records to `path`, if given, in the order of their cases."""
    place = {name: i for i, name in enumerate(order)}

    def save(records: Records) -> None:
        if path:
            in_order = sorted(records, key=lambda record: place.get(record["case"], len(place)))
            write_json(path, {"versions": environment, "records": in_order})

    return save


def measure_cases(
    options: argparse.Namespace,
    every: Sequence[C],
    wanted: Sequence[C],
    environment: dict[str, str | None],
    measure_case: Callable[[C], Records],
    shown: Callable[[Records], str],
) -> Records:
    """Call ``run_cases`` with the options of ``add_options``, and print how far it came. Returns all records, earlier
    ones too, in the order of ``every``."""
    records = known_records(options.out, environment)
    save = saving(options.out, environment, [case.name for case in every])
    left = run_cases(wanted, records, measure_case, shown, save, options.time_limit)
    if left:
        print(f"the time limit left {len(left)} of {len(wanted)} cases out; start again to continue")
    elif options.out:
        print(f"{options.out} holds all {len(wanted)} cases")
    return records
