"""Gluon kernels for Hopper, run as ordinary Python on CPU tensors, with every race reported.

``launch(kernel, grid, *args, seed=0, **constants)`` checks what a GPU would show by bad luck only: accesses to shared
memory that no barrier orders, missing fences, wrong phases, deadlocks, and addresses out of bounds. It knows neither
layouts nor time. Programs of the grid run one after another; global memory is not checked for races.
"""

import pytest

pytest.importorskip("triton", reason="Triton exists for Linux only")

from tests.support.gluon.barriers import BarrierError
from tests.support.gluon.hopper import tma_reduce_add
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
    "tma_reduce_add",
]
