"""Long runs of random calls against the contract: ``python -m tests.support.attention.fuzz --draws 2000``.

On a CPU the kernels run in the Triton interpreter, or with ``--backend hopper`` in the Gluon emulator. Draw ``i`` of
seed ``s`` is the same call in every run, for any number of workers; ``--one I`` runs it alone. Consecutive draws share
a variant, and so compiled kernels. With ``--state FILE`` an interrupted run continues where it stopped; ``--start``
begins at another draw. If a worker dies or hangs, its current draw has failed. Failures are printed as cases for
``KEPT`` in ``tests/support/attention/cases/named.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.support.interpreting import interpret

BACKENDS = ("triton", "hopper", "standard", "chunked")
TIMEOUT_S = 600  #: for one draw, including compilation
PER_VARIANT = {"cpu": 1, "cuda": 100}  #: draws per variant; the interpreter compiles nothing


@dataclass(frozen=True)
class Subject:
    """What a run tests: the seed, the device and the backend."""

    seed: int
    device: str
    backend: str = "triton"  #: one of ``BACKENDS``


def draw(subject: Subject, number: int) -> Any:
    """The case of this number, a ``tests.support.attention.contract.Case``."""
    from tests.support.attention.cases import drawn

    group, own = number // PER_VARIANT[subject.device], subject.backend == "hopper"
    if subject.device == "cuda":
        limits = drawn.HOPPER if own else drawn.CARD
    else:
        limits = drawn.HOPPER_SMALL if own else drawn.SMALL
    chosen = drawn.variant(random.Random(f"{subject.seed} variant {group}").choice, limits)
    case = drawn.problem(chosen, random.Random(f"{subject.seed} draw {number}").choice)
    return drawn.for_hopper(case) if own else case


def judge(subject: Subject, number: int) -> str:
    """Run the case of this number and return its errors as text, or "" if there are none."""
    from tests.support.attention.contract import run

    case = draw(subject, number)
    with contextlib.ExitStack() as stack:
        if subject.backend == "hopper":  # run small calls also with the tiles and the head groups of long calls
            from flash_train.attention.kernels.launch_options import LaunchOptions, launch_options

            long = 0 if number // PER_VARIANT[subject.device] % 2 else LaunchOptions.long_walk
            stack.enter_context(launch_options(long_walk=long, heads_per_group=1 + number % 3))
        if subject.backend == "hopper" and subject.device == "cpu":
            from tests.support.attention.emulated import hopper_on_cpu

            stack.enter_context(hopper_on_cpu(seed=number, programs=1 + number % 5))
        try:
            errors = run(case, subject.backend, subject.device)
        except ValueError as error:
            if subject.backend == "hopper" and "there are no keys" in str(error):
                return ""
            raise
    if case.far and subject.device == "cuda":
        import torch

        torch.cuda.empty_cache()  # the other workers share the card's memory
    wrong = [error for error in errors if not error.ok]
    return "; ".join(f"{e.tensor}: error {e.error:.3g}, allowed {e.allowed:.3g}" for e in wrong)


def compiled(subject: Subject) -> int:
    """How many kernel variants this process has compiled or loaded; 0 if kernels are not compiled."""
    if subject.device == "cpu" or subject.backend in ("standard", "chunked"):
        return 0
    if subject.backend == "hopper":
        from flash_train.attention.kernels.hopper import backward, forward
    else:
        from flash_train.attention.kernels.portable import backward, forward

    kernels = {x for module in (forward, backward) for x in vars(module).values() if hasattr(x, "device_caches")}
    return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())


def work(pipe: Connection, subject: Subject) -> None:
    """A worker process: judge groups of draws from the pipe, and report the current draw."""
    import torch

    torch.set_num_threads(1)
    while (numbers := pipe.recv()) is not None:
        for number in numbers:
            pipe.send(("at", number, None))
            try:
                wrong = judge(subject, number)
            except (AssertionError, RuntimeError, ValueError, TypeError):
                wrong = traceback.format_exc()
            if wrong:
                pipe.send(("failure", number, wrong))
                if subject.device == "cuda" and not _alive():
                    os._exit(1)  # the failure is reported, and in a broken context every later draw would fail
        pipe.send(("done", numbers[-1], compiled(subject)))


def _alive() -> bool:
    """Return whether the CUDA context still works."""
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


@dataclass
class Record:
    """The progress of a run, saved to a file if there is one."""

    subject: Subject
    path: Path | None = None
    done: set[int] = field(default_factory=set)  #: draws
    failures: dict[int, str] = field(default_factory=dict)
    kernels: int = 0

    @classmethod
    def resume(cls, subject: Subject, path: Path | None) -> Record:
        record = cls(subject, path)
        if path is not None and path.exists():
            saved = json.loads(path.read_text())
            if saved["subject"] != vars(subject):
                raise SystemExit(f"{path} is of {saved['subject']}: must be of {vars(subject)}, or another file")
            record.done = {n for first, stop in saved["done"] for n in range(first, stop)}
            record.failures = {int(n): wrong for n, wrong in saved["failures"].items()}
            record.kernels = saved["kernels"]
        return record

    def save(self) -> None:
        if self.path is None:
            return
        saved = {"subject": vars(self.subject), "done": _ranges(self.done), "failures": self.failures}
        partial = self.path.with_name(self.path.name + ".partial")
        partial.write_text(json.dumps(saved | {"kernels": self.kernels}))
        partial.replace(self.path)


def _ranges(numbers: set[int]) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for n in sorted(numbers):
        if ranges and ranges[-1][1] == n:
            ranges[-1] = (ranges[-1][0], n + 1)
        else:
            ranges.append((n, n + 1))
    return ranges


class Worker:
    """A worker process, the draws that it was sent, and its current draw."""

    def __init__(self, subject: Subject) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, subject), daemon=True)
        self.process.start()
        theirs.close()
        self.numbers: list[int] = []
        self.current: int | None = None
        self.kernels = 0
        self.since = time.monotonic()

    def give(self, numbers: list[int]) -> None:
        self.numbers, self.current, self.since = numbers, None, time.monotonic()
        self.pipe.send(numbers)

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()

    @property
    def left(self) -> list[int]:
        """The draws after the current one."""
        return [n for n in self.numbers if self.current is None or n > self.current]


class Run:
    """Distributes the draws of a record to workers."""

    def __init__(self, record: Record, numbers: range, workers: int) -> None:
        self.record, self.numbers = record, numbers
        self.groups = self._groups()
        self.workers = [Worker(record.subject) for _ in range(workers)]
        self.began, self.before, self.reported = time.monotonic(), len(record.done), 0.0

    def _groups(self) -> Iterator[list[int]]:
        """The remaining draws, grouped by variant."""
        size = PER_VARIANT[self.record.subject.device]
        for group in range(self.numbers.start // size, -(-self.numbers.stop // size)):
            numbers = range(max(group * size, self.numbers.start), min((group + 1) * size, self.numbers.stop))
            left = [n for n in numbers if n not in self.record.done]
            if left:
                yield left

    def run(self) -> None:
        try:
            for worker in list(self.workers):
                self._next(worker)
            while self.workers:
                ready = wait([worker.pipe for worker in self.workers], timeout=10)
                for worker in [w for w in self.workers if w.pipe in ready]:
                    self._receive(worker)
                for worker in list(self.workers):
                    if time.monotonic() - worker.since > TIMEOUT_S:
                        self._replace(worker, f"no answer for {TIMEOUT_S} seconds")
                self._report()
        finally:
            for worker in self.workers:
                worker.stop()
            self.record.save()

    def _next(self, worker: Worker) -> None:
        group = next(self.groups, None)
        if group is None:
            worker.stop()
            self.workers.remove(worker)
        else:
            worker.give(group)

    def _receive(self, worker: Worker) -> None:
        try:
            kind, number, value = worker.pipe.recv()
        except (EOFError, ConnectionResetError):
            worker.process.join()
            return self._replace(worker, f"the worker died with exit status {worker.process.exitcode}")
        worker.since = time.monotonic()
        if worker.current is not None and kind != "failure":
            self.record.done.add(worker.current)
        worker.current = number
        if kind == "failure":
            self._fail(number, value)
        elif kind == "done":
            self.record.kernels += value - worker.kernels
            worker.kernels = value
            self.record.save()
            self._next(worker)

    def _replace(self, worker: Worker, why: str) -> None:
        """Replace a worker that died or hangs; the new one starts at the next draw."""
        worker.stop()
        self.workers.remove(worker)
        if worker.current is None:
            raise SystemExit(f"a worker did not start: {why}")
        if worker.current not in self.record.failures:
            self._fail(worker.current, why)
        self.record.done.add(worker.current)
        fresh = Worker(self.record.subject)
        self.workers.append(fresh)
        if worker.left:
            fresh.give(worker.left)
        else:
            self._next(fresh)

    def _fail(self, number: int, wrong: str) -> None:
        self.record.failures[number] = wrong
        self.record.save()
        source = draw(self.record.subject, number).source
        print(f"\nFAILED seed {self.record.subject.seed} draw {number}: {wrong}\n    {source},\n", flush=True)

    def _report(self) -> None:
        now, done = time.monotonic(), len(self.record.done)
        if now - self.reported < 10 and self.workers:
            return
        self.reported = now
        rate = (done - self.before) / max(now - self.began, 1e-9)
        left = f", {(len(self.numbers) - done) / rate:.0f} s left" if rate else ""
        print(
            f"{done} of {len(self.numbers)} draws, {len(self.record.failures)} failed, {rate:.1f}/s{left}", flush=True
        )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=2000, help="number of draws (default: 2000)")
    parser.add_argument("--start", type=int, default=0, help="number of the first draw (default: 0)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all draws (default: 0)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cpu: the Triton interpreter")
    parser.add_argument("--backend", choices=BACKENDS, default="triton", help="backend to test (default: triton)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes (default: one per CPU core)")
    parser.add_argument("--state", type=Path, help="file with the progress, to continue an interrupted run")
    parser.add_argument("--one", type=int, metavar="I", help="print and run draw I in this process")
    chosen = parser.parse_args(arguments)
    subject = Subject(chosen.seed, chosen.device, chosen.backend)
    if chosen.device == "cpu" and chosen.backend == "triton":
        interpret()  # before Triton is imported, here and in the workers
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if chosen.one is not None:
        print(draw(subject, chosen.one).source)
        wrong = judge(subject, chosen.one)
        print(wrong or "right")
        return int(bool(wrong))
    record = Record.resume(subject, chosen.state)
    numbers = range(chosen.start, chosen.start + chosen.draws)
    print(f"seed {chosen.seed}, draws {numbers.start} to {numbers.stop - 1}, {chosen.workers} workers", flush=True)
    Run(record, numbers, chosen.workers).run()
    variants = len({n // PER_VARIANT[chosen.device] for n in numbers})
    kernels = f" ({record.kernels} kernels compiled)" if chosen.device == "cuda" else ""
    made = sum(n in record.done for n in numbers)
    failed = sum(n in record.failures for n in numbers)
    print(f"seed {chosen.seed}: {made} draws, {variants} variants{kernels}, {failed} failures", flush=True)
    return int(failed > 0 or made < len(numbers))


if __name__ == "__main__":
    sys.exit(main())
