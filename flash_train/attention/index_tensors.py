"""Check index tensors, such as lengths, offsets, rows and page tables, and convert them for the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from flash_train.attention.checks import integer_tensor
from flash_train.attention.tracing import has_no_values

IntegerData = Tensor | Sequence[int] | Sequence[Sequence[int]]
MaybeTensor = TypeVar("MaybeTensor", Tensor, None, Tensor | None)
INTEGERS = (torch.int32, torch.int64)


def contiguous_tensor(x: MaybeTensor) -> MaybeTensor:
    """Return the tensor if it is contiguous, as the kernels require, else a contiguous copy; return None for None."""
    return x if x is None or x.is_contiguous() else x.contiguous()


def index_tensor(name: str, x: IntegerData, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Convert the values to a contiguous int32 tensor on the device.

    Args:
        name: name of the argument, for error messages.
        x: an int32 or int64 tensor of any strides on ``device``, or integers in lists or a NumPy array.
        shape: the required shape.

    Raises:
        ValueError: another dtype, shape or device.
        TypeError: a value that is neither a tensor nor a sequence of integers.
    """
    given = integer_tensor(name, x, device)
    if not isinstance(given, Tensor):
        raise TypeError(f"{name}={given!r}: must be int32 {shape} on {device}, or integers in a list")
    if given.dtype not in INTEGERS or tuple(given.shape) != shape or given.device != device:
        found = f"{given.dtype} of shape {tuple(given.shape)} on {given.device}"
        raise ValueError(f"{name} is {found}: must be int32 {shape} on {device}")
    if given.dtype == torch.int64:
        check_range(name, given, 2**31, low=-(2**31))
    return contiguous_tensor(given.to(torch.int32))


def check_range(name: str, x: Tensor, limit: int, where: Tensor | None = None, low: int = 0) -> None:
    """Raise ValueError if a CPU tensor has an element outside [low, limit).

    Tensors on other devices and traced tensors are not read.

    Args:
        where: bool, broadcastable to x, True for the elements to check; None checks all.
    """
    if x.device.type != "cpu" or has_no_values(x):
        return
    if where is not None:
        x = x[where.expand(x.shape)]
    if x.numel():
        least, most = int(x.min()), int(x.max())
        if least < low or most >= limit:
            raise ValueError(f"{name} is {least if least < low else most}: must be between {low} and {limit - 1}")
