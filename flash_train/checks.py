"""Checks of arguments. Every range error has the same form: `name=value: must be …`.

Standard library only: the command line checks values before it imports torch, and `attention` may import this file.
"""

import math
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral
from typing import Any, overload

LONGEST = 100  # characters of a value in an error


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


def cut(text: str, longest: int = 80) -> str:
    """Return the beginning of a text that an error quotes from a file; a file of another kind may be one long line."""
    return text if len(text) <= longest else f"{text[:longest]}…"


def brief(value: Any) -> str:
    """Return a value as one line for an error: its `repr`, or its type, and its shape if it has one, if that is long.

    Of a class, return its name.
    """
    if isinstance(value, type):
        return value.__name__
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and shape:  # before `repr`, which reads all of a tensor
        return f"{type(value).__name__} of shape {tuple(shape)}"
    text = repr(value)
    return text if isinstance(value, str) or (len(text) <= LONGEST and "\n" not in text) else type(value).__name__


POSITIVE = Allowed(lambda value: 0 < value < math.inf, "positive and finite")


def check(name: str, value: Any, allowed: Allowed, *, or_none: str = "") -> None:
    """Raise ValueError for a value that is not allowed.

    Args:
        name: the caller's name for it: an argument's name, or a key of the configuration.
        or_none: if given, None is allowed, too; the text says what None means, such as "or None for no limit".

    Raises:
        ValueError: `name=value: must be …`.
    """
    with suppress(TypeError):  # a value of another type, such as text for a number, cannot be compared
        if (value is None and or_none) or allowed.contains(value):
            return
    raise ValueError(f"{name}={brief(value)}: must be {allowed.words}{', ' if or_none else ''}{or_none}")


@overload
def as_integer(name: str, value: Any, low: int) -> int: ...


@overload
def as_integer(name: str, value: Any, low: int, *, or_none: str) -> int | None: ...


def as_integer(name: str, value: Any, low: int, *, or_none: str = "") -> int | None:
    """Return an int or a NumPy integer of at least `low` as an int, since a checkpoint holds plain values only.

    `name` and `or_none` have the same meaning as for `check`.

    Raises:
        ValueError: another value, such as a bool, or a float that is a whole number.
    """
    if isinstance(value, Integral) and not isinstance(value, bool):
        value = int(value)
    check(name, value, integer_at_least(low), or_none=or_none)
    return value


def check_attributes(name: str, value: Any, needed: Collection[str], words: str) -> None:
    """Refuse an object without some attributes, or a class in the place of its instance.

    Raises:
        TypeError: `name=value: must be …`, with `words` and the missing attributes.
    """
    missing = [attribute for attribute in needed if not hasattr(value, attribute)]
    if isinstance(value, type) and len(missing) < len(needed):
        raise TypeError(f"{name}={brief(value)}: must be an instance: {value.__name__}(...)")
    if missing:
        raise TypeError(f"{name}={brief(value)}: must be {words}; this has no {', '.join(missing)}")


def check_name(name: str, value: Any, choices: Collection[str]) -> None:
    """Raise ValueError, as `check` does, for a name that is not among `choices`."""
    if value not in choices:
        raise ValueError(f"{name}={value!r}: must be {one_of(*choices).words}")
