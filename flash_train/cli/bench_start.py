"""From a command to its first optimizer step: ``python scripts/bench_start.py --out FILE``.

Each start is a new process. A cold start finds neither compiled kernels nor tokens; the warm start after it finds both.
A first start, which does not count, brings Python's files into the system's cache. The record has the median of
``--rounds``.

FILE is written after every case. A second start with the same commit, GPU and versions continues after the last case.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flash_train.cli.bench.records import (
    COMPARED_VERSIONS,
    Records,
    add_options,
    environment_of,
    measure_cases,
    selected_cases,
)
from flash_train.cli.config.errors import ArgumentParser, UsageError, one_line_errors

COMMAND = (sys.executable, "-c", "from flash_train.cli.train import main; main()")
SETTINGS = ("max_steps=1", "logger=none", "trainer.checkpoints=false")
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME")
POLL_SECONDS = 0.02
PATIENCE_SECONDS = 600.0


@dataclass(frozen=True)
class StartCase:
    name: str
    overrides: tuple[str, ...]


CASES = (StartCase("1b3-n16384", ("model=1b3", "precision=bf16-true", "seq_len=16384", "data=stdlib")),)


def first_step(overrides: Sequence[str], run_dir: Path, caches: Path) -> float:
    """Seconds until a new process has recorded its first optimizer step; then the process is killed.

    Raises:
        UsageError: the process ended before that (with its last line), or took more than `PATIENCE_SECONDS`.
    """
    log = run_dir.with_suffix(".log")
    arguments = (*overrides, *SETTINGS, f"run_dir={run_dir}", f"data.cache_dir={caches / 'tokens'}")
    environment = os.environ | {name: str(caches / name.lower()) for name in CACHES}
    with log.open("wb") as output:
        begin = time.monotonic()
        process = subprocess.Popen((*COMMAND, *arguments), stdout=output, stderr=output, env=environment)
        try:
            while not _steps(run_dir / "metrics.csv"):
                if time.monotonic() - begin > PATIENCE_SECONDS:
                    raise UsageError(f"no step was taken within {PATIENCE_SECONDS:.0f} s")
                if process.poll() is not None:
                    last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
                    raise UsageError(f"no step was taken: {' '.join([*last, 'exit status', str(process.poll())])}")
                time.sleep(POLL_SECONDS)
            return time.monotonic() - begin
        finally:
            process.kill()
            process.wait()


def _steps(metrics: Path) -> int:
    """The number of recorded rows, without the header."""
    return max(metrics.read_text(encoding="utf-8").count("\n") - 1, 0) if metrics.is_file() else 0


def measure(case: StartCase, rounds: int, environment: dict[str, str | None]) -> Records:
    """One record for cold starts, and one for warm starts."""
    seconds: dict[str, list[float]] = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        first_step(case.overrides, folder / "read", folder / "caches")
        for number in range(rounds):
            for cache, found in seconds.items():
                found.append(first_step(case.overrides, folder / f"{cache}{number}", folder / f"caches{number}"))
    same = {key: environment[key] for key in COMPARED_VERSIONS}
    return [
        {"case": case.name, "cache": cache, "seconds": statistics.median(found), "rounds": found, **same}
        for cache, found in seconds.items()
    ]


def shown(records: Records) -> str:
    return ", ".join(f"{record['cache']} {record['seconds']:.1f} s" for record in records)


@one_line_errors()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__, page="docs/benchmarks.md")
    add_options(parser)
    parser.add_argument("--rounds", type=int, default=3, help="cold and warm starts (default: 3)")
    options = parser.parse_args(arguments)
    wanted = selected_cases(parser, options, CASES)
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: must be 1 or more")
    environment = environment_of(options.commit)
    measure_cases(options, CASES, wanted, environment, lambda case: measure(case, options.rounds, environment), shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
