"""Integer arguments of attention: numbers, sequences and index tensors. `flash_train.checks` has ranges and choices."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from flash_train.attention.tracing import has_no_values


def integer(value: Any) -> int | None:
    """Convert an int, a NumPy integer or an integer tensor with one element to a Python int.

    Return None for anything else, including bools and floats with integer values. Reading a tensor on a GPU
    synchronises with the device.
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
    """Convert a sequence, NumPy array or tensor with one dimension to Python ints; return None for anything else."""
    if isinstance(values, (str, bytes)) or not hasattr(values, "__len__") or getattr(values, "ndim", 1) != 1:
        return None
    found = []
    for value in values:
        number = integer(value)
        if number is None:
            return None
        found.append(number)
    return found


def integer_tensor(name: str, values: Any, device: torch.device | None = None) -> Any:
    """Convert a list, tuple or NumPy array of integers to an int32 tensor on the device; return a tensor unchanged.

    Raises:
        TypeError: elements that are not integers.
        ValueError: integers that do not fit int32.
    """
    if not isinstance(values, (list, tuple)) and not hasattr(values, "__array_interface__"):
        return values
    try:
        index = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        index = torch.empty(1)  # a float tensor, which the next line rejects
    if index.numel() and (index.is_floating_point() or index.is_complex() or index.dtype == torch.bool):
        raise TypeError(f"{name}={values!r}: must be integers, or an int32 tensor")
    known = index.numel() > 0 and not has_no_values(index)
    if known and not -(2**31) <= int(index.min()) <= int(index.max()) < 2**31:
        raise ValueError(f"{name}={values!r}: must be integers between -2**31 and 2**31 - 1")
    return index.to(device=device, dtype=torch.int32)
