"""Marks for ``torch.compile`` that cost no import of the compiler, and whether a tensor is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def assume_constant_result(function: F) -> F:
    """Have ``torch.compile`` call ``function`` while it traces, and take the result as a constant.

    The same mark as ``torch.compiler.assume_constant_result`` sets, which imports the whole compiler to set it: more
    than a second, for every program that imports this package and compiles nothing.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def unreadable(x: torch.Tensor) -> bool:
    """Whether a tensor holds no values: while ``torch.compile`` traces, a fake one, or one on the meta device."""
    if torch.compiler.is_compiling():
        return True
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return isinstance(x, (FakeTensor, FunctionalTensor)) or x.is_meta
