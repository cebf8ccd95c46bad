"""One program of the grid: its partitions take turns at random, and asynchronous operations complete at random times.

Partitions are threads; only the one that holds the baton runs, until it accesses shared state and passes the baton on.
The order comes from the seed. In addition, every partition has a vector clock, which only barriers synchronise, so that
an unordered access is detected even if the random order of this run does no harm.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from pathlib import Path

import numpy as np

from tests.support.gluon.values import EmulationError

_FILES = {path.stem for path in Path(__file__).parent.glob("*.py") if not path.name.startswith("test_")}
EMULATOR = {f"{__package__}.{name}" for name in _FILES}
COMPONENTS = 512  # components of a vector clock: partitions and barriers


class Deadlock(EmulationError):
    """Every partition waits, and no operation is in flight that could wake one."""


class _Aborted(BaseException):
    """Ends a partition after another one has failed."""


_local = threading.local()


def current():
    """The running partition."""
    task = getattr(_local, "task", None)
    if task is None:
        raise EmulationError("this works inside a launch only")
    return task


def kernel_frames():
    """The kernel's frames on the stack, innermost first."""
    frame = sys._getframe(1)
    while frame.f_code not in (Program.run.__code__, Program._work.__code__):
        if frame.f_globals.get("__name__") not in EMULATOR:
            yield frame
        frame = frame.f_back


def kernel_frame():
    return next(kernel_frames())


def site(frame=None):
    frame = frame or kernel_frame()
    return f"{frame.f_code.co_name}, {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


class Task:
    """A partition: a thread that holds the baton or waits for it."""

    def __init__(self, program, name, num_warps, clock=None):
        self.program, self.name, self.num_warps = program, name, num_warps
        self.index = len(program.tasks)
        self.component = program.new_component()
        self.clock = np.zeros(COMPONENTS, np.int32) if clock is None else clock.copy()
        self.clock[self.component] = 1
        self.baton = threading.Semaphore(0)
        self.condition = self.waits_for = self.thread = None
        self.finished = False
        self.matmuls = []  # warpgroup_mma in flight, in order of issue
        self.stores = []  # TMA stores that may still read shared memory, in order of issue
        self.speed = 1.0
        program.tasks.append(self)

    def runnable(self):
        return not self.finished and (self.condition is None or self.condition())

    def release(self, clock):
        """Everything that this partition did so far happens before any later ``acquire`` of ``clock``."""
        np.maximum(clock, self.clock, out=clock)
        self.clock[self.component] += 1

    def acquire(self, clock):
        np.maximum(self.clock, clock, out=self.clock)


class Program:
    def __init__(self, launch, ids, rng):
        self.launch, self.ids, self.rng = launch, ids, rng
        self.tasks, self.pending, self.barriers = [], [], {}
        self.components, self.failure, self.shared = 0, None, None
        self.patience = 1.0
        self._draw_speeds()

    def new_component(self):
        self.components += 1
        if self.components > COMPONENTS:
            raise NotImplementedError(f"the emulator has room for {COMPONENTS} partitions and barriers")
        return self.components - 1

    def run(self, function, num_warps):
        """Run the program; the calling thread is partition 0."""
        task = Task(self, "default partition", num_warps)
        _local.task = task
        try:
            with np.errstate(all="ignore"):
                function()
                self._finish()
        except BaseException as error:
            self._abort(error)
            raise
        finally:
            _local.task = None

    def specialize(self, functions, names, num_warps):
        """Run the first function in this thread and the others in new threads, until all have ended."""
        main = current()
        if main.index or any(not task.finished for task in self.tasks[1:]):
            raise EmulationError("warp_specialize inside a partition")
        clock = np.zeros(COMPONENTS, np.int32)
        main.release(clock)
        workers = [Task(self, *args, clock) for args in zip(names[1:], num_warps, strict=True)]
        main.name = names[0]
        for worker, function in zip(workers, functions[1:], strict=True):
            worker.thread = threading.Thread(target=self._work, args=(worker, function), daemon=True)
            worker.thread.start()
        self._draw_speeds()
        result = functions[0]()
        self.wait(lambda: all(worker.finished for worker in workers), lambda: "the end of the other partitions")
        for worker in workers:
            worker.thread.join()
            main.acquire(worker.clock)
        main.name = "default partition"
        return result

    def _work(self, task, function):
        _local.task = task
        task.baton.acquire()
        try:
            self._check_failure()
            with np.errstate(all="ignore"):
                function()
            task.finished = True
            self._next(task)
        except _Aborted:
            task.finished = True
        except BaseException as error:
            task.finished = True
            self.failure = self.failure or error
            self.tasks[0].baton.release()

    def point(self):
        """Let other partitions and operations run."""
        task = current()
        self._next(task)

    def wait(self, condition, what):
        """Let others run until the condition holds."""
        task = current()
        task.condition, task.waits_for = condition, (what, kernel_frame())
        self._next(task)
        task.condition = task.waits_for = None

    def _next(self, task):
        """Complete random operations, then pass the baton to a random partition that can run, perhaps this one."""
        while True:
            if self.rng.random() < 0.02:
                self._draw_speeds()
            ready = [other for other in self.tasks if other.runnable()]
            choices = ready + self.pending
            if not choices:
                return self._stuck(task)
            weights = [other.speed for other in ready] + [self.patience * copy.speed for copy in self.pending]
            chosen = self.rng.choices(choices, weights)[0]
            if isinstance(chosen, Task):
                break
            self.complete(chosen)
        if chosen is not task:
            chosen.baton.release()
            if not task.finished:
                task.baton.acquire()
                self._check_failure()

    def start(self, copy):
        """Start an asynchronous operation. Some take much longer than others."""
        copy.speed = math.exp(-(self.rng.expovariate(1.0) ** 2))
        self.pending.append(copy)

    def complete(self, operation):
        self.pending.remove(operation)
        operation.complete()

    def _draw_speeds(self):
        """Draw new speeds, which differ by orders of magnitude: equal speeds would find few races."""
        for task in self.tasks:
            task.speed = math.exp(self.rng.uniform(-4, 2))
        self.patience = math.exp(self.rng.uniform(-5, 2))

    def _stuck(self, task):
        if all(other.finished for other in self.tasks):
            return
        lines = [
            f"  {other.name} waits for {other.waits_for[0]()} ({site(other.waits_for[1])})"
            for other in self.tasks
            if not other.finished
        ]
        error = Deadlock("\n".join([f"program {self.ids}: every partition waits, and no copy is under way", *lines]))
        if task.finished:
            raise error  # _work passes it to partition 0
        task.condition = None
        raise error

    def _check_failure(self):
        if self.failure is not None:
            if current().index == 0:
                raise self.failure
            raise _Aborted

    def _abort(self, error):
        self.failure = self.failure or error
        for task in self.tasks[1:]:
            if not task.finished:
                task.baton.release()
                task.thread.join()

    def _finish(self):
        while self.pending:
            self.complete(self.rng.choice(self.pending))
        for task in self.tasks:
            if task.stores:
                raise EmulationError(
                    f"program {self.ids} ends while a TMA store may still read shared memory: "
                    f"no tma.store_wait in its partition after {task.stores[-1].site}"
                )
        for barrier in self.barriers.values():
            barrier.check_end()
