"""Which cases of a test run with `pytest`, and which only with `pytest --all`."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_after(count: int, values: Iterable[Any], *, unpack: bool = False) -> list[Any]:
    """Mark all but the first values of `parametrize` as slow.

    Args:
        count: how many are not slow.
        unpack: each value is a tuple of several arguments.
    """
    return [
        value if i < count else pytest.param(*(value if unpack else (value,)), marks=pytest.mark.slow)
        for i, value in enumerate(values)
    ]
