"""Incorrect use of barriers, and waits that come too late or never end."""

import pytest

pytest.importorskip("triton", reason="Triton exists for Linux only")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tests.support.gluon import BarrierError, Deadlock, launch

BARRIER = gl.constexpr(mbarrier.MBarrierLayout())


@gluon.jit
def misuse(CASE: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    mbarrier.init(bars.index(1), count=2)
    mbarrier.arrive(bars.index(1))
    if CASE == "count":
        mbarrier.arrive(bars.index(1), count=2)
    if CASE == "no init":
        mbarrier.arrive(bars.index(0))
    if CASE == "init":
        mbarrier.init(bars.index(1), count=1)
    mbarrier.arrive(bars.index(1))
    mbarrier.wait(bars.index(1), 0)
    mbarrier.wait(bars.index(1), 1, pred=CASE == "phase")
    mbarrier.invalidate(bars.index(1))
    if CASE == "invalid":
        mbarrier.wait(bars.index(1), 0)


@pytest.mark.parametrize(
    ("case", "message"),
    (
        ("count", r"2 arrivals at bars\[1\] in phase 0, which lacks 1 of them"),
        ("no init", r"bars\[0\] is no mbarrier"),
        ("init", r"bars\[1\], which is an mbarrier already"),
        ("invalid", r"bars\[1\] is no mbarrier"),
    ),
)
def test_misuse_of_barriers(case, message):
    with pytest.raises(BarrierError, match=message):
        launch(misuse, 1, case)


@gluon.jit
def fill_twice(full, empty):
    mbarrier.arrive(full)
    mbarrier.wait(empty, 0)
    mbarrier.arrive(full)


@gluon.jit
def wait_again(full, empty, AGAIN: gl.constexpr):
    mbarrier.wait(full, 0)
    if AGAIN == "before":
        mbarrier.wait(full, 0)
    mbarrier.arrive(empty)
    if AGAIN == "behind":
        mbarrier.wait(full, 0)
    mbarrier.wait(full, 1)


@gluon.jit
def overtake(AGAIN: gl.constexpr):
    full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    mbarrier.init(full, count=1)
    mbarrier.init(empty, count=1)
    gl.warp_specialize([(wait_again, (full, empty, AGAIN)), (fill_twice, (full, empty))], [4], [24])


def test_a_wait_that_can_be_overtaken():
    """A wait for a phase of a stage that was already released: it is correct only if the stage is refilled late."""
    found = []
    for seed in range(20):
        launch(overtake, 1, "before", seed=seed)
        with pytest.raises((BarrierError, Deadlock)) as caught:
            launch(overtake, 1, "behind", seed=seed)
        found.append(str(caught.value))
    assert any("phase 1 of full completes, and nothing puts that behind a wait" in text for text in found)


def test_a_phase_that_never_completes():
    with pytest.raises(Deadlock, match=r"waits for parity 1 of bars\[1\], which is in phase 1 .*misuse"):
        launch(misuse, 1, "phase")
