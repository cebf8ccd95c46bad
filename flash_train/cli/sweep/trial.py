"""One training command in a fresh process and a directory of its own: what came of it, kept in `cell.json`.

A directory holds what any run leaves there, `log.txt` with the process's output, and `cell.json` once it has ended.
"""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from flash_train.cli.config.errors import OUT_OF_MEMORY, OutOfMemoryError, UnavailableError, UsageError
from flash_train.cli.config.overrides import quote

Status = Literal["ok", "oom", "failed", "unavailable", "interrupted"]

RECORD, LOG = "cell.json", "log.txt"
STATUSES: dict[int, Status] = {OutOfMemoryError.status: "oom", UnavailableError.status: "unavailable"}
ALL_ENDED: dict[str, type[UsageError]] = {"oom": OutOfMemoryError, "unavailable": UnavailableError}
COMMAND = (sys.executable, "-m", "flash_train.cli.sweep.trial")
SAME = ("flash-train", "torch", "triton", "commit")  # of `versions`, what must be equal beside the device
STOP_SECONDS = 10.0  # for a child that is told to stop; it is killed then
POLL_SECONDS = 0.05
OF_ONE_WANDB_RUN = ("WANDB_RUN_ID", "WANDB_RESUME")  # variables that several runs cannot share
ERROR_LINE = re.compile(
    r"(\[rank\d+\]: )?(flash-train: |([\w.]+\.)?\w*(Error|Exception|Interrupt)\b|terminate called|\s+what\(\): )"
)


@dataclass(frozen=True)
class Cell:
    """A training command.

    Args:
        folder: the run's directory; whatever an unfinished run left there is removed when it starts.
        overrides: of `flash-train`, all but `run_dir`.
    """

    folder: Path
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.folder.name


@dataclass(frozen=True)
class Result:
    """What came of a cell: `summary` is the run's summary.json as far as it got; `reason` says why it isn't ok."""

    status: Status
    reason: str | None = None
    seconds: float = 0.0
    summary: dict[str, Any] = field(default_factory=dict)


def known_result(cell: Cell) -> Result | None:
    """The result of an earlier run of this command, unless it failed; None where it must run.

    Raises:
        UsageError: the folder holds what another command, other versions or another device measured.
    """
    try:
        record = json.loads((cell.folder / RECORD).read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    result = Result(**record["result"])
    if result.status == "failed":  # the cause may be gone
        return None
    differing = _differing_settings(record["overrides"], cell.overrides) + _differing_versions(record["versions"])
    if not differing:
        return result
    if result.status == "unavailable":  # nothing was measured that could be lost
        return None
    raise UsageError(
        f"{cell.folder}: another command, machine or version made what is there ({'; '.join(differing)}); "
        "allowed: the one that made it, or another run_dir"
    )


def count(statuses: Sequence[str]) -> str:
    """How many cells ended in each way, in words."""
    return ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))


def require_one(statuses: Sequence[str], what: str, where: str) -> None:
    """See to it that a command of which nothing came does not end as if all were well; the error gives the exit status.

    Where some ran out of memory and all others can't run here, everything asked for has its answer: that ends well.

    Args:
        what: a word for what ended so.
        where: the file that says why.

    Raises:
        UsageError: none ended ok, and some failed.
        UnavailableError: none could run here.
        OutOfMemoryError: all ran out of memory.
    """
    kinds = set(statuses)
    if not statuses or "ok" in kinds or kinds == set(ALL_ENDED):
        return
    kind = UsageError if "failed" in kinds else ALL_ENDED[next(iter(kinds))]
    raise kind(f"no {what} ended ok ({count(statuses)}); {where} says why")


def keep(cell: Cell, result: Result) -> None:
    """Write `cell.json`, in one move."""
    from flash_train.files import write_json  # and with it PyTorch, for which mistakes need not wait

    record = {"overrides": cell.overrides, "versions": _versions(), "result": dataclasses.asdict(result)}
    write_json(cell.folder / RECORD, record)


def run_cell(cell: Cell, environ: Mapping[str, str] | None = None) -> Result:
    """Run one cell to its end and keep its result."""
    ((_, result),) = run_cells([cell], [environ or {}])
    return result


def run_cells(
    cells: Sequence[Cell], environs: Sequence[Mapping[str, str]]
) -> Generator[tuple[Cell, Result], None, None]:
    """Run cells, as many at once as there are environments, and keep each result; yields them as they end.

    Left early (an interrupt, or the caller's `close`), it stops the processes that still run; they leave no record.

    Args:
        environs: variables that a process has beside those of this one, such as the GPU it may use.
    """
    waiting, free = list(cells), list(environs)
    running: list[_Child] = []
    try:
        while waiting or running:
            while waiting and free:
                running.append(_Child(waiting.pop(0), free.pop(0)))
            for child in [child for child in running if child.process.poll() is not None]:
                running.remove(child)
                free.append(child.environ)
                result = child.result()
                keep(child.cell, result)
                yield child.cell, result
            time.sleep(POLL_SECONDS)
    finally:
        for child in running:
            child.signal(signal.SIGTERM)
        for child in running:
            child.stop()


def train() -> None:
    """What a cell's process runs: `flash-train`, for as long as the process lives that started it."""
    from flash_train.cli.train import main

    end_with_parent()
    main()


def end_with_parent() -> None:
    """Kill this process and its own when its parent is gone: standard input, which the parent holds, ends then."""

    def wait() -> None:
        os.read(sys.__stdin__.fileno(), 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def _without_one_run(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables that name a run of W&B: each cell is a run."""
    return {name: value for name, value in environ.items() if name not in OF_ONE_WANDB_RUN}


class _Child:
    """A cell's process, in a session of its own: Ctrl-C reaches it through this process only."""

    def __init__(self, cell: Cell, environ: Mapping[str, str]) -> None:
        self.cell, self.environ = cell, environ
        shutil.rmtree(cell.folder, ignore_errors=True)
        cell.folder.mkdir(parents=True)
        self._kills = _kills_for_memory()
        self._start = time.monotonic()
        with open(cell.folder / LOG, "wb") as log:
            self.process = subprocess.Popen(
                [*COMMAND, *cell.overrides, quote("run_dir", str(cell.folder))],
                # a process that is killed has said by then what it had to say
                env={**_without_one_run(os.environ), "PYTHONUNBUFFERED": "1", **environ},
                stdin=subprocess.PIPE,  # never written to; see `end_with_parent`
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # it has ended already
            os.killpg(self.process.pid, number)

    def stop(self) -> None:
        """Wait a while for the end that was asked for, then kill."""
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self.process.wait()
        self.process.stdin.close()

    def result(self) -> Result:
        """Of the process, which has ended."""
        seconds, code = time.monotonic() - self._start, self.process.returncode
        self.process.stdin.close()
        try:
            summary = json.loads((self.cell.folder / "summary.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            summary = {}
        status, reason = self._judge(code, summary.get("status"))
        return Result(status, reason, seconds, summary)

    def _judge(self, code: int, run_status: str | None) -> tuple[Status, str | None]:
        if code == 0:
            return ("ok", None) if run_status == "finished" else ("failed", f"the run was {run_status}")
        if run_status == "interrupted":  # by a signal, which the exit status names
            return "failed", "the run was interrupted"
        log = (self.cell.folder / LOG).read_text(encoding="utf-8", errors="replace")
        reason = last_error(log)
        if code in STATUSES:
            return STATUSES[code], reason or f"exit status {code}"
        # Of several ranks another may have run out of memory: Lightning kills the first one then.
        if memory := [line for line in errors_of(log) if OUT_OF_MEMORY.search(line)]:
            return "oom", memory[-1]
        if code == -signal.SIGKILL and ((kills := _kills_for_memory()) is None or kills != self._kills):
            return "oom", "killed by the system, which ran out of memory"
        if code < 0:
            reason = f"{signal.Signals(-code).name}: {reason}" if reason else signal.Signals(-code).name
        return "failed", reason or f"exit status {code}"


def errors_of(log: str) -> list[str]:
    """The lines of a log that tell of an error."""
    return [line.strip().removeprefix("flash-train: ") for line in log.splitlines() if ERROR_LINE.match(line)]


def last_error(log: str) -> str | None:
    """The last line of a log that tells of an error, else its last line; None for an empty log."""
    lines = errors_of(log) or log.splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), None)


def _kills_for_memory() -> int | None:
    """How many processes the kernel has killed for want of memory; None where it doesn't say."""
    vmstat = Path("/proc/vmstat")
    found = re.search(r"^oom_kill (\d+)$", vmstat.read_text(), re.M) if vmstat.exists() else None
    return int(found[1]) if found else None


def _differing_settings(before: Sequence[str], now: Sequence[str]) -> list[str]:
    """In words, the overrides that differ; the last of a key counts, and W&B's names and groups do not."""
    old, new = (dict(text.partition("=")[::2] for text in texts) for texts in (before, now))
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key) and not key.startswith("logger.")]
    return [f"{key}: {old.get(key, 'not given')}, now {new.get(key, 'not given')}" for key in keys]


def _differing_versions(before: Mapping[str, str | None]) -> list[str]:
    """In words, what differs and is known of both. Changes that have no commit are not known: a sweep goes on."""
    known = [(key, old, new) for key, new in _versions().items() if (old := before.get(key)) and new]
    return [
        f"{key}: {old}, now {new}"
        for key, old, new in known
        if old.removesuffix("-dirty") != new.removesuffix("-dirty")
    ]


@cache
def _versions() -> dict[str, str | None]:
    """What a result depends on beside the command: the device, versions and the commit, as this process began."""
    import torch

    from flash_train.records import device_name, versions

    found = versions()
    return {"device": found["gpu"] or device_name(torch.device("cpu")), **{key: found[key] for key in SAME}}


if __name__ == "__main__":  # by name, as Lightning starts the processes of further ranks in the same way
    train()
