"""mbarriers: phases, arrivals and bytes."""

from __future__ import annotations

import numpy as np

from tests.support.gluon.schedule import COMPONENTS, current, site
from tests.support.gluon.values import EmulationError, as_int


class BarrierError(EmulationError):
    """An mbarrier is used incorrectly."""


class Barrier:
    """Completes a phase when no arrival and no byte is pending.

    ``arriving`` joins the clocks of all arrivals in the current phase, ``completed`` the clocks of all earlier phases.
    """

    def __init__(self, program, name, count):
        self.name, self.count = name, count
        self.pending, self.bytes, self.phase = count, 0, 0
        self.observed = 0  # the number of phases that any partition has waited for
        self.loads = []  # (phase, site) of each TMA load that signals this barrier
        self.waits = []  # (component, time, site) of each wait for the last completed phase
        self.component = program.new_component()
        self.arriving = np.zeros(COMPONENTS, np.int32)
        self.completed = np.zeros(COMPONENTS, np.int32)

    def arrive(self, task, count, transferred=0):
        if count > self.pending:
            raise BarrierError(
                f"{count} arrivals at {self.name} in phase {self.phase}, which lacks {self.pending} of them"
            )
        task.release(self.arriving)
        self.pending -= count
        self.bytes += transferred
        self._advance()

    def transfer(self, amount):
        """Count the bytes that a copy has written."""
        self.bytes -= amount
        self.arriving[self.component] = self.phase + 1
        self._advance()

    def _advance(self):
        if self.pending == 0 and self.bytes == 0:
            np.maximum(self.completed, self.arriving, out=self.completed)
            for component, time, where in self.waits:
                if self.completed[component] < time:
                    raise BarrierError(
                        f"phase {self.phase} of {self.name} completes, and nothing puts that behind a wait for the "
                        f"phase before ({where}): come later, it would wait for the phase after, or for ever"
                    )
            self.waits = []
            self.phase += 1
            self.pending = self.count

    def waited(self, task, where):
        """Record that a partition has waited for the last completed phase."""
        self.observed = max(self.observed, self.phase)
        self.waits.append((task.component, task.clock[task.component], where))

    def passed(self, parity):
        return self.phase % 2 != parity

    def __str__(self):
        return f"{self.name}, which is in phase {self.phase} and lacks {self.pending} arrivals and {self.bytes} bytes"

    def check_end(self):
        if self.bytes:
            raise BarrierError(f"{self.name} ends with {self.bytes} bytes pending in phase {self.phase}")
        for phase, where in self.loads:
            if phase >= self.observed:
                raise BarrierError(
                    f"nobody waits for phase {phase} of {self.name}, in which a TMA load ({where}) completes"
                )


def find(view):
    barriers = current().program.barriers
    if view.dtype.name != "int64" or view.numel != 1:
        raise BarrierError(f"an mbarrier is one int64, not {view}")
    found = barriers.get(view.address)
    if found is None:
        raise BarrierError(f"{view.name} is no mbarrier: init has not been called, or invalidate has")
    return found


def predicated(pred):
    return pred is True or bool(pred)


def init(mbarrier, count):
    program = current().program
    if mbarrier.dtype.name != "int64" or mbarrier.numel != 1:
        raise BarrierError(f"an mbarrier is one int64, not {mbarrier}")
    if mbarrier.address in program.barriers:
        raise BarrierError(f"init of {mbarrier.name}, which is an mbarrier already")
    if not isinstance(count, int) or count < 1:
        raise BarrierError(f"the count of an mbarrier is a positive constant, not {count}")
    program.barriers[mbarrier.address] = Barrier(program, mbarrier.name, count)


def invalidate(mbarrier):
    barrier = find(mbarrier)
    barrier.check_end()
    del current().program.barriers[mbarrier.address]


def expect(mbarrier, bytes_per_cta=None, pred=True, bytes=None):
    """mbarrier.arrive.expect_tx: one arrival, and the number of bytes to expect."""
    amount = bytes_per_cta if bytes is None else bytes
    if not isinstance(amount, int):
        raise BarrierError(f"the bytes to expect are a constant, not {amount}")
    task = current()
    task.program.point()
    if predicated(pred):
        find(mbarrier).arrive(task, 1, amount)


def arrive(mbarrier, *, count=1, pred=True):
    task = current()
    task.program.point()
    if predicated(pred):
        find(mbarrier).arrive(task, count)


def wait(mbarrier, phase, pred=True, deps=()):
    task = current()
    task.program.point()
    if not predicated(pred):
        return
    parity = as_int(phase)
    if parity not in (0, 1):
        raise BarrierError(f"the phase to wait for is 0 or 1, not {parity}")
    barrier = find(mbarrier)
    if not barrier.passed(parity):
        task.program.wait(lambda: barrier.passed(parity), lambda: f"parity {parity} of {barrier}")
    task.acquire(barrier.completed)
    barrier.waited(task, site())
