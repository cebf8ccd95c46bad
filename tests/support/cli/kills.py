"""Runs that are killed at random moments and resumed until they end: `python -m tests.support.cli.kills --kills 60`.

Each run is a tiny one on the CPU, through the console script, with workers that load its data and validations that take
much of its time. Its output goes to a `tee`, a pipe or a terminal. It is killed in a random way, resumed by
`resume=last`, killed again, and so on until it ends. Then metrics.csv must have each step once, with the losses and
validations of an unbroken run, bit for bit, and summary.json must say that the run is finished.
"""

import argparse
import atexit
import csv
import fcntl
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

# Imported here so that forked processes have it already
from flash_train.cli import train

STEPS, VAL_EVERY, CHECKPOINT_EVERY = 60, 4, 3
END_SECONDS = 300.0  # a process that takes longer hangs
COLUMNS = ("train/loss", "train/gradient_norm", "train/learning_rate", "val/loss", "val/bits_per_byte")
OPTIONS = [
    *("data=text", "data.num_workers=2", "data.val_batches=6", "seq_len=64", "batch_size=2", "hardware=cpu"),
    *(f"max_steps={STEPS}", f"val_every={VAL_EVERY}", f"trainer.checkpoint_every={CHECKPOINT_EVERY}"),
    *("model.n_layers=1", "model.width=16", "model.n_heads=2", "model.n_kv_heads=1", "model.head_dim=16"),
    *("model.mlp_width=32", "attention.dropout=0.1", "accumulate=2", "logger=none"),
]


@dataclass(frozen=True)
class Kind:
    """A way to end a run: where its output goes, and which signal is sent to which processes.

    Args:
        output: tee, pipe or terminal; the last two are closed before the signal is sent.
        sends: the signal; None sends none. A terminal that closes sends SIGHUP itself; after a closed pipe the run must
            finish.
        group: whether the whole process group receives it, or the main process alone.
    """

    name: str
    output: str
    sends: signal.Signals | None = None
    group: bool = False

    @property
    def saves(self) -> bool:
        """True if the run is asked to stop, so that its last step must be in a checkpoint."""
        return self.sends != signal.SIGKILL and not (self.output == "pipe" and self.sends is None)


KINDS = (
    Kind("Ctrl-C at a tee", "tee", signal.SIGINT, group=True),
    Kind("SIGINT to the main process", "tee", signal.SIGINT),
    Kind("SIGTERM to the main process", "tee", signal.SIGTERM),
    Kind("SIGTERM to the group", "tee", signal.SIGTERM, group=True),
    Kind("SIGHUP to the group", "tee", signal.SIGHUP, group=True),
    Kind("SIGKILL to the main process", "tee", signal.SIGKILL),
    Kind("SIGKILL to the group", "tee", signal.SIGKILL, group=True),
    Kind("a terminal that closes", "terminal"),
    Kind("a closed pipe", "pipe"),
    Kind("a closed pipe and SIGTERM", "pipe", signal.SIGTERM),
)


class Process:
    """The training command, with an output that can be closed.

    It is forked from this process, which has imported everything already: a run then takes a second instead of ten.
    """

    def __init__(self, arguments: list[str], folder: Path, output: str) -> None:
        ours, theirs = os.openpty() if output == "terminal" else os.pipe()
        self.status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.close(ours)
            _become_command(["flash-train", *arguments], folder, theirs, output)
        with suppress(ProcessLookupError, PermissionError):  # parent and child both do so, as either may be first
            if output != "terminal":
                os.setpgid(self.pid, self.pid)
        os.close(theirs)
        # The reader of a terminal or of a remote pipe is not in the run's process group.
        group = {"process_group": self.pid} if output == "tee" else {}
        with open(folder / "log.txt", "ab") as log:
            self.reader = subprocess.Popen(["cat"], stdin=ours, stdout=log, stderr=subprocess.DEVNULL, **group)
        os.close(ours)
        self.output = output

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        if self.status is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if ended else None
        return self.status

    def kill(self, kind: Kind) -> None:
        if kind.output != "tee":
            self.reader.kill()
            self.reader.wait()
        if kind.sends is not None and self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended by itself
                (os.killpg if kind.group else os.kill)(self.pid, kind.sends)

    def end(self) -> int:
        """Its exit status.

        Raises:
            AssertionError: the process did not end; it is killed.
        """
        end = time.monotonic() + END_SECONDS
        while self.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            raise AssertionError(f"process {self.pid} did not end within {END_SECONDS:.0f} s")
        with suppress(subprocess.TimeoutExpired):  # workers of a killed run keep its output open for a while
            self.reader.wait(10)
        self.reader.kill()
        self.reader.wait()
        return self.status


def _become_command(arguments: list[str], folder: Path, output: int, kind: str) -> NoReturn:
    """In a forked process: do what a shell and the interpreter do for `flash-train`, from start to exit."""
    status = 120  # Python's, where its output cannot be flushed
    try:
        if kind == "terminal":
            os.setsid()
            fcntl.ioctl(output, termios.TIOCSCTTY, 0)
        else:
            os.setpgid(0, 0)
        keyboard = output if kind == "terminal" else os.open(os.devnull, os.O_RDONLY)
        for source, target in ((keyboard, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        os.closerange(3, 256)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stdin, stdout, stderr = (io.FileIO(i, mode, closefd=False) for i, mode in enumerate(("r", "w", "w")))
        sys.stdin = io.TextIOWrapper(io.BufferedReader(stdin), "utf-8")
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(stdout), "utf-8", line_buffering=kind == "terminal")
        sys.stderr = io.TextIOWrapper(io.BufferedWriter(stderr), "utf-8", "backslashreplace", line_buffering=True)
        sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
        os.chdir(folder)
        sys.argv = arguments
        code: object = 0
        try:
            train.main()
        except SystemExit as stop:
            code = stop.code
        except KeyboardInterrupt:
            code = 130
        except BaseException:
            traceback.print_exc()
            code = 1
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        status = code if isinstance(code, int) else 0 if code is None else 1
    finally:
        os._exit(status)


def rows_of(run_dir: Path) -> list[dict[str, str]]:
    """The rows of metrics.csv, without a last line that is incomplete."""
    path = run_dir / "metrics.csv"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return list(csv.DictReader(text[: text.rfind("\n") + 1].splitlines()))


def checkpoints_of(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "checkpoints").glob("step-*.ckpt"))


def last_step(run_dir: Path) -> int:
    rows = rows_of(run_dir)
    return int(rows[-1]["step"]) if rows else 0


def losses_of(run_dir: Path) -> list[tuple[str, ...]]:
    """The columns that must not depend on how often a run was stopped, as the digits in the file."""
    return [(row["step"], *(row.get(name, "") for name in COLUMNS)) for row in rows_of(run_dir)]


def wait_until(process: Process, run_dir: Path, step: int) -> None:
    """Wait until a run has logged a step, or has ended."""
    end = time.monotonic() + END_SECONDS
    while process.poll() is None and last_step(run_dir) < step:
        assert time.monotonic() < end, f"{run_dir} did not get to step {step}"
        time.sleep(0.01)


def corpus(folder: Path) -> list[str]:
    (folder / "corpus").mkdir()
    for i in range(40):
        text = f"document {i}: " + "the quick brown fox " * (i + 1)
        (folder / "corpus" / f"{i:02}.txt").write_text(text, encoding="utf-8")
    return [f"data.path={folder / 'corpus'}", f"data.cache_dir={folder / 'cache'}"]


def unbroken(folder: Path, options: list[str]) -> list[tuple[str, ...]]:
    """The losses of a run that nobody kills."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", "from flash_train.cli.train import main; main()"]
    subprocess.run(
        [*command, *options, f"run_dir={folder / 'whole'}"], cwd=folder, env=environ, check=True, capture_output=True
    )
    return losses_of(folder / "whole")


def check_whole(run_dir: Path, expected: list[tuple[str, ...]]) -> None:
    """Check that nothing is lost and that the run is finished."""
    summary = record_of(run_dir)
    assert (summary["status"], summary["steps"]) == ("finished", STEPS), summary
    found = losses_of(run_dir)
    assert [row[0] for row in found] == [str(step) for step in range(1, STEPS + 1)], [row[0] for row in found]
    assert found == expected, [pair for pair in zip(found, expected, strict=True) if pair[0] != pair[1]]
    assert [row[0] for row in found if row[4]] == [str(s) for s in range(VAL_EVERY, STEPS + 1, VAL_EVERY)]
    assert float(found[-1][4]) == summary["val_loss"] and float(found[-1][1]) == summary["train_loss"]
    assert checkpoints_of(run_dir)[-1].name == f"step-{STEPS:06}.ckpt"
    for name in ("loss.png", "throughput.png", "memory.png"):
        assert (run_dir / name).read_bytes()[:4] == b"\x89PNG", name
    left = [path.name for path in run_dir.rglob(".*")]
    assert not left, left


def kill_and_resume(folder: Path, kinds: list[Kind], draw: random.Random) -> Iterator[str]:
    """Kill and resume a run in each of these ways; a run that finishes is begun again. Yields a line for each kill."""
    folder.mkdir()
    options = [*OPTIONS, *corpus(folder)]
    expected = unbroken(folder, options)
    run_dir = folder / "run"
    for kind in kinds:
        if done(run_dir):
            check_whole(run_dir, expected)
            shutil.rmtree(run_dir)
        before, record_before = last_step(run_dir), record_of(run_dir)
        resume = ["resume=last"] if checkpoints_of(run_dir) else []
        process = Process([*options, f"run_dir={run_dir}", *resume], folder, kind.output)
        # Most kills hit training and validation, some come before them, some at the end.
        step = min(STEPS, before + draw.choice([0, 1, 1, 2, 5, 9, 30, STEPS]))
        delay = draw.choice([0.0, 0.05, 0.3]) * draw.random()
        wait_until(process, run_dir, step)
        time.sleep(delay)
        seen = last_step(run_dir)
        process.kill(kind)
        status = process.end()
        there = checkpoints_of(run_dir)
        at, saved = last_step(run_dir), int(there[-1].stem.removeprefix("step-")) if there else 0
        assert at >= seen, f"{kind.name}: rows up to step {seen} were there, and after it up to {at}"
        recorded = record_of(run_dir).get("status")
        if kind.saves and recorded == "interrupted" and record_of(run_dir) != record_before:  # it had begun
            assert saved == at, f"{kind.name}: the last row is of step {at}, the last checkpoint of step {saved}"
            assert status in (129, 130, 143), f"{kind.name}: exit status {status}"
        if kind.name == "a closed pipe":
            assert status == 0 and done(run_dir), f"{kind.name}: exit status {status}, {recorded}"
        assert recorded != "failed", record_of(run_dir)
        if not there:  # nothing to resume from, and nothing lost
            shutil.rmtree(run_dir, ignore_errors=True)
        yield f"{kind.name}: at step {at}, exit status {status}, {recorded or 'not begun'}, saved up to step {saved}"
    for _ in range(2):
        if not done(run_dir):
            resume = ["resume=last"] if checkpoints_of(run_dir) else []
            Process([*options, f"run_dir={run_dir}", *resume], folder, "tee").end()
    assert done(run_dir), (folder / "log.txt").read_text(errors="replace")[-3000:]
    check_whole(run_dir, expected)


def record_of(run_dir: Path) -> dict[str, Any]:
    """The content of summary.json; empty if there is none."""
    path = run_dir / "summary.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def done(run_dir: Path) -> bool:
    """Return whether the run reports that it is finished."""
    return record_of(run_dir).get("status") == "finished"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    kinds = [kind for _ in range(0, arguments.kills, len(KINDS)) for kind in draw.sample(KINDS, len(KINDS))]
    start = time.monotonic()
    folder = Path(tempfile.mkdtemp())  # each forked process would remove a TemporaryDirectory at its exit
    try:
        for number, line in enumerate(kill_and_resume(folder / "kills", kinds[: arguments.kills], draw), 1):
            print(f"{number:>3}  {line}", flush=True)
    finally:
        shutil.rmtree(folder)
    print(f"{arguments.kills} kills in {time.monotonic() - start:.0f} s: nothing lost, losses bitwise", flush=True)


if __name__ == "__main__":
    main()
