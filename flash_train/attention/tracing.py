"""Mark functions for ``torch.compile`` without importing the compiler, and detect traced tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def assume_constant_result(function: F) -> F:
    """Make ``torch.compile`` call ``function`` while it traces, and treat the result as a constant.

    This sets the same mark as ``torch.compiler.assume_constant_result``. That function imports the whole compiler,
    which takes more than a second, even in programs that compile nothing.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def has_no_values(x: torch.Tensor) -> bool:
    """Whether a tensor has no values to read: ``torch.compile`` is tracing, or it is a fake or a meta tensor."""
    if torch.compiler.is_compiling():
        return True
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return isinstance(x, (FakeTensor, FunctionalTensor)) or x.is_meta
