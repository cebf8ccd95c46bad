"""A trial: one training command, run in its own process and directory, with its result in `cell.json`.

The directory holds the files of any run, `log.txt` with the output of the process, and `cell.json` once it has ended.
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
from typing import Any

from flash_train.cli.config.environment import WANDB_RUN_VARIABLES
from flash_train.cli.config.errors import OUT_OF_MEMORY, UsageError
from flash_train.cli.config.overrides import quote
from flash_train.cli.launch.outcome import STATUS_OF_EXIT, Status
from flash_train.cli.run.command import train_command
from flash_train.files import write_json
from flash_train.output import PREFIX

RECORD, LOG = "cell.json", "log.txt"
COMMAND = (sys.executable, "-m", "flash_train.cli.sweep.trial")
COMPARED_VERSIONS = ("flash-train", "torch", "triton", "commit")  # a known result must have the same ones
STOP_SECONDS = 10.0  # how long a child may take to stop before it is killed
POLL_SECONDS = 0.05
ERROR_LINE = re.compile(
    rf"(\[rank\d+\]: )?({PREFIX}|([\w.]+\.)?\w*(Error|Exception|Interrupt)\b|terminate called|\s+what\(\): )"
)


@dataclass(frozen=True)
class Trial:
    """A training command.

    Args:
        folder: the run's directory. What an unfinished run left there is removed when the trial starts.
        overrides: all overrides of `flash-train` except `run_dir`.
    """

    folder: Path
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.folder.name


@dataclass(frozen=True)
class Result:
    """How a trial ended: `summary` is the run's summary.json, if it got that far; `reason` says why it isn't ok."""

    status: Status
    reason: str | None = None
    seconds: float = 0.0
    summary: dict[str, Any] = field(default_factory=dict)


def known_result(trial: Trial) -> Result | None:
    """The result of an earlier run of this trial; None if it must run.

    It must run if it has no result or failed, or if it was unavailable with other settings or versions.

    Raises:
        UsageError: another command, other versions or another device made what the folder holds.
    """
    try:
        record = json.loads((trial.folder / RECORD).read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    result = Result(**record["result"])
    if result.status == "failed":  # its cause may be gone
        return None
    differing = _differing_settings(record["overrides"], trial.overrides) + _differing_versions(record["versions"])
    if not differing:
        return result
    if result.status == "unavailable":  # nothing measured can be lost
        return None
    raise UsageError(
        f"{trial.folder}: another command, machine or version made what is there ({'; '.join(differing)}); "
        "allowed: the one that made it, or another run_dir"
    )


def keep(trial: Trial, result: Result) -> None:
    """Write `cell.json`."""
    record = {"overrides": trial.overrides, "versions": _versions(), "result": dataclasses.asdict(result)}
    write_json(trial.folder / RECORD, record)


def run_trial(trial: Trial, environ: Mapping[str, str] | None = None) -> Result:
    """Run one trial to its end, and write its result."""
    ((_, result),) = run_trials([trial], [environ or {}])
    return result


def run_trials(
    trials: Sequence[Trial], environs: Sequence[Mapping[str, str]]
) -> Generator[tuple[Trial, Result], None, None]:
    """Run trials, as many at once as there are environments. Write and yield each result as its trial ends.

    If the generator is closed or interrupted, it stops the processes that still run; they leave no record.

    Args:
        environs: variables added to this process's environment, such as the GPU that the trial may use.
    """
    waiting, free = list(trials), list(environs)
    running: list[_Child] = []
    try:
        while waiting or running:
            while waiting and free:
                running.append(_Child(waiting.pop(0), free.pop(0)))
            for child in [child for child in running if child.process.poll() is not None]:
                running.remove(child)
                free.append(child.environ)
                result = child.result()
                keep(child.trial, result)
                yield child.trial, result
            time.sleep(POLL_SECONDS)
    finally:
        for child in running:
            child.signal(signal.SIGTERM)
        for child in running:
            child.stop()


def train() -> None:
    """Run `flash-train` in a trial's process, until it ends or the parent process does."""
    end_with_parent()
    train_command()


def end_with_parent() -> None:
    """Kill this process and its children once the parent is gone.

    The parent holds the other end of this process's standard input, so standard input then ends.
    """
    stdin = sys.__stdin__
    assert stdin is not None  # that is the pipe from the parent

    def wait() -> None:
        os.read(stdin.fileno(), 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def without_wandb_run(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables that name a W&B run: each trial has its own."""
    return {name: value for name, value in environ.items() if name not in WANDB_RUN_VARIABLES}


class _Child:
    """The process of a trial. It has its own session, so Ctrl-C reaches it through this process only."""

    def __init__(self, trial: Trial, environ: Mapping[str, str]) -> None:
        self.trial, self.environ = trial, environ
        shutil.rmtree(trial.folder, ignore_errors=True)
        trial.folder.mkdir(parents=True)
        self._kills = _kills_for_memory()
        self._start = time.monotonic()
        with open(trial.folder / LOG, "wb") as log:
            self.process = subprocess.Popen(
                [*COMMAND, *trial.overrides, quote("run_dir", str(trial.folder))],
                # unbuffered, so that the log of a killed process is complete
                env={**without_wandb_run(os.environ), "PYTHONUNBUFFERED": "1", **environ},
                stdin=subprocess.PIPE,  # never written to; see `end_with_parent`
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        assert self.process.stdin is not None  # it is a pipe
        self._stdin = self.process.stdin

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # it has ended
            os.killpg(self.process.pid, number)

    def stop(self) -> None:
        """Wait for the process to end after a signal; kill it if that takes too long."""
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self.process.wait()
        self._stdin.close()

    def result(self) -> Result:
        """The result of the process, which has ended."""
        seconds, code = time.monotonic() - self._start, self.process.returncode
        self._stdin.close()
        try:
            summary = json.loads((self.trial.folder / "summary.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            summary = {}
        status, reason = self._judge(code, summary.get("status"))
        return Result(status, reason, seconds, summary)

    def _judge(self, code: int, run_status: str | None) -> tuple[Status, str | None]:
        if code == 0:
            return ("ok", None) if run_status == "finished" else ("failed", f"the run was {run_status}")
        if run_status == "interrupted":  # by a signal, which the exit status names
            return "failed", "the run was interrupted"
        log = (self.trial.folder / LOG).read_text(encoding="utf-8", errors="replace")
        reason = last_error(log)
        if code in STATUS_OF_EXIT:
            return STATUS_OF_EXIT[code], reason or f"exit status {code}"
        # With several ranks, another one may have run out of memory; then Lightning kills the first.
        if memory := [line for line in errors_of(log) if OUT_OF_MEMORY.search(line)]:
            return "oom", memory[-1]
        if code == -signal.SIGKILL and ((kills := _kills_for_memory()) is None or kills != self._kills):
            return "oom", "killed by the system, which ran out of memory"
        if code < 0:
            reason = f"{signal.Signals(-code).name}: {reason}" if reason else signal.Signals(-code).name
        return "failed", reason or f"exit status {code}"


def errors_of(log: str) -> list[str]:
    """The lines of a log that report an error."""
    return [line.strip().removeprefix(PREFIX) for line in log.splitlines() if ERROR_LINE.match(line)]


def last_error(log: str) -> str | None:
    """The last line of a log that reports an error, or else its last line; None for an empty log."""
    lines = errors_of(log) or log.splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), None)


def _kills_for_memory() -> int | None:
    """How many processes the kernel has killed for lack of memory; None if it doesn't say."""
    vmstat = Path("/proc/vmstat")
    found = re.search(r"^oom_kill (\d+)$", vmstat.read_text(), re.M) if vmstat.exists() else None
    return int(found[1]) if found else None


def _differing_settings(before: Sequence[str], now: Sequence[str]) -> list[str]:
    """The overrides that differ, as text. The last value of a key counts; the logger's keys do not."""
    old, new = (dict(text.partition("=")[::2] for text in texts) for texts in (before, now))
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key) and not key.startswith("logger.")]
    return [f"{key}: {old.get(key, 'not given')}, now {new.get(key, 'not given')}" for key in keys]


def _differing_versions(before: Mapping[str, str | None]) -> list[str]:
    """The versions that are known on both sides and differ, as text. Uncommitted changes count as no difference."""
    known = [(key, old, new) for key, new in _versions().items() if (old := before.get(key)) and new]
    return [
        f"{key}: {old}, now {new}"
        for key, old, new in known
        if old.removesuffix("-dirty") != new.removesuffix("-dirty")
    ]


@cache
def _versions() -> dict[str, str | None]:
    """The device, versions and commit, as they were when this process began: a result depends on them."""
    import torch

    from flash_train.records import device_name, versions

    found = versions()
    return {
        "device": found["gpu"] or device_name(torch.device("cpu")),
        **{key: found[key] for key in COMPARED_VERSIONS},
    }


if __name__ == "__main__":  # `-m` and a module name, because Lightning starts further ranks in the same way
    train()
