"""A kernel launch, which can be run or only compiled."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flash_train.attention.kernels.compiler_options import FUSED


@dataclass(frozen=True)
class Launch:
    """A kernel, its grid and its arguments. It can be run or only compiled.

    The launches ``first`` must run before this one. ``made`` are the arguments that were allocated with this launch and
    that it fills.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    first: tuple[Launch, ...] = ()
    made: tuple[Tensor, ...] = ()

    @property
    def options(self) -> dict[str, Any]:
        """The constants and the compiler's options."""
        return FUSED | self.constants

    def run(self) -> None:
        for launch in self.first:
            launch.start()
        self.start()

    def start(self) -> Any:
        """Run this launch without ``first``, and return the kernel that Triton compiled.

        Raises:
            RuntimeError: ``torch.compile`` is tracing. Its tensors and numbers are fake, so that only a registered
                operator may launch.
        """
        if torch.compiler.is_dynamo_compiling():
            raise RuntimeError(f"{self.kernel.__name__} was launched while torch.compile traces: call its operator")
        return self.kernel[self.grid](*self.arguments, **self.options)


def on_device(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Make x's device the current one, because Triton launches on the current device."""
    if not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)
