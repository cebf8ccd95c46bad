"""An emulator that runs Gluon kernels for Hopper as ordinary Python on CPU tensors and reports every race.

``launch(kernel, grid, *args, seed=0, **constants)`` detects errors that a GPU shows only by chance: accesses to shared
memory that no barrier orders, missing fences, wrong phases, deadlocks, and addresses out of bounds. It models neither
layouts nor time. Programs of the grid run one after another; races in global memory are not detected.
"""

import pytest

pytest.importorskip("triton", reason="Triton exists for Linux only")

from tests.support.gluon.barriers import BarrierError
from tests.support.gluon.language import launch
from tests.support.gluon.memory import MissingFence, Race
from tests.support.gluon.pointers import OutOfBounds
from tests.support.gluon.schedule import Deadlock
from tests.support.gluon.values import EmulationError, Value

__all__ = [
    "BarrierError",
    "Deadlock",
    "EmulationError",
    "MissingFence",
    "OutOfBounds",
    "Race",
    "Value",
    "launch",
]
