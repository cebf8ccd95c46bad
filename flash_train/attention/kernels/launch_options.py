"""Options of launches, which tests change so that small calls run with the grids and tiles of long ones.

Every default suits the device and the call. No Triton here: the options can be changed before it is imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from flash_train.checks import check, check_name, integer_at_least


@dataclasses.dataclass(frozen=True)
class LaunchOptions:
    """How launches are planned. All but ``cached_plans`` apply to kernels that plan their grids by the processors.

    Attributes:
        processors: number of processors that grids are planned for; None: the device's own.
        heads_per_group: key heads in a group, whose rows share the L2 cache. None: as many as give every SM a work
            tile, if the cache holds their rows.
        long_walk: keys from which the forward for 64 columns uses three consumers.
        cached_plans: prepared calls that ``launch_cache`` keeps; 0: none is kept and none is used. The cache is emptied
            when it is full, as happens if lengths change with every call.

    Raises:
        ValueError: a value is no integer or too small.
    """

    processors: int | None = None
    heads_per_group: int | None = None
    long_walk: int = 2048
    cached_plans: int = 4096

    def __post_init__(self) -> None:
        check("processors", self.processors, integer_at_least(1), or_none="or None for the device's own")
        check("heads_per_group", self.heads_per_group, integer_at_least(1), or_none="or None for as many as fit")
        check("long_walk", self.long_walk, integer_at_least(0))
        check("cached_plans", self.cached_plans, integer_at_least(0))

    @functools.cached_property  # every call reads it
    def of_plans(self) -> tuple[int | None, ...]:
        """The options that change a prepared call."""
        return self.processors, self.heads_per_group, self.long_walk


NAMES = [field.name for field in dataclasses.fields(LaunchOptions)]

_present = LaunchOptions()


def present_options() -> LaunchOptions:
    return _present


@contextlib.contextmanager
def launch_options(**changes: Any) -> Iterator[LaunchOptions]:
    """Replace fields of the present ``LaunchOptions``; at the end restore the options from before.

    The whole process has the same options: autograd runs the backward in another thread, which a ``ContextVar`` would
    not reach. So two threads must not change them at the same time.

    Raises:
        ValueError: a name is unknown, or a value is not allowed.
    """
    global _present
    for name in changes:
        check_name("launch_options", name, NAMES)
    before = _present
    _present = dataclasses.replace(before, **changes)
    try:
        yield _present
    finally:
        _present = before
