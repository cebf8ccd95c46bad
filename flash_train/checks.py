"""Checks of arguments. Every range error has the same form: `name=value: must be …`.

Standard library only: the command line checks values before it imports torch, and `attention` may import this file.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Allowed:
    """The values that an argument may have. `words` completes "must be …"; `choices` lists them if they are names."""

    contains: Callable[[Any], bool]
    words: str
    choices: tuple[str, ...] = ()


def one_of(*choices: str) -> Allowed:
    """Allow one of several names."""
    return Allowed(lambda value: value in choices, f"one of {', '.join(choices)}", choices)


def at_least(low: float) -> Allowed:
    return Allowed(lambda value: value >= low, f"{low} or more")


AUTO_OR_BOOL = Allowed(lambda value: value == "auto" or isinstance(value, bool), "auto, true or false")


def above(low: float) -> Allowed:
    return Allowed(lambda value: value > low, f"more than {low}")


def within(low: float, high: float, ends: str = "[]") -> Allowed:
    """Allow an interval. `ends` are its brackets: "[)" includes `low` and excludes `high`."""

    def contains(value: Any) -> bool:
        above_low = value >= low if ends[0] == "[" else value > low
        return above_low and (value <= high if ends[1] == "]" else value < high)

    return Allowed(contains, f"in {ends[0]}{low}, {high}{ends[1]}")


def integer_at_least(low: int) -> Allowed:
    """Allow an int of at least `low`, but no bool."""
    return Allowed(
        lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= low,
        f"an integer of at least {low}",
    )


POSITIVE = Allowed(lambda value: 0 < value < math.inf, "positive and finite")


def check(name: str, value: Any, allowed: Allowed, *, or_none: str = "") -> None:
    """Raise ValueError for a value that is not allowed.

    Args:
        name: the caller's name for it: an argument's name, or a key of the configuration.
        or_none: if given, None is allowed, too; the text says what None means, such as "or None for no limit".

    Raises:
        ValueError: `name=value: must be …`.
    """
    if (value is None and or_none) or allowed.contains(value):
        return
    raise ValueError(f"{name}={value!r}: must be {allowed.words}{', ' if or_none else ''}{or_none}")


def check_name(name: str, value: Any, choices: Collection[str]) -> None:
    """Raise ValueError, as `check` does, for a name that is not among `choices`."""
    if value not in choices:
        raise ValueError(f"{name}={value!r}: must be {one_of(*choices).words}")
