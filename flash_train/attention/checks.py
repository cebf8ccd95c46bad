"""What arguments may be: one home for rules that several calls share."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from flash_train.attention.tracing import unreadable


def integer(value: Any) -> int | None:
    """The value as a Python int: of an int, a NumPy integer, or an integer tensor with one element; else None.

    A bool is none, nor is a float that happens to be whole. A tensor on a GPU is read, which waits for the device.
    """
    if type(value) is int:
        return value
    if isinstance(value, bool) or (isinstance(value, Tensor) and (value.dtype == torch.bool or value.numel() != 1)):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def integers(values: Any) -> list[int] | None:
    """The values as Python ints: of a sequence, a NumPy array or a tensor with one dimension; else None."""
    if isinstance(values, (str, bytes)) or not hasattr(values, "__len__") or getattr(values, "ndim", 1) != 1:
        return None
    found = [integer(value) for value in values]
    return None if None in found else found


def integer_tensor(name: str, values: Any, device: torch.device | None = None) -> Any:
    """An index as int32 on the device, where it is a list, a tuple or a NumPy array of integers; a tensor as it is.

    Raises:
        TypeError: sequences of anything else.
        ValueError: integers that do not fit int32.
    """
    if not isinstance(values, (list, tuple)) and not hasattr(values, "__array_interface__"):
        return values
    try:
        index = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        index = torch.empty(1)  # a float, which is refused below
    if index.numel() and (index.is_floating_point() or index.is_complex() or index.dtype == torch.bool):
        raise TypeError(f"{name}={values!r}: must be integers, or an int32 tensor")
    known = index.numel() > 0 and not unreadable(index)
    if known and not -(2**31) <= int(index.min()) <= int(index.max()) < 2**31:
        raise ValueError(f"{name}={values!r}: must be integers between -2**31 and 2**31 - 1")
    return index.to(device=device, dtype=torch.int32)
