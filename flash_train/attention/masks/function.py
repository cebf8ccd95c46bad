"""A mask that the user writes as a function."""

from __future__ import annotations

import copy
import importlib
import pickle
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flash_train.attention.masks.base import Lowered, Mask, check_device
from flash_train.attention.masks.registry import DeviceTerm, builders, register_builder
from flash_train.attention.packing import Entry
from flash_train.checks import brief


@dataclass(frozen=True, eq=False)
class MaskFunction(Mask):
    """A rule that the user writes as two functions: ``@triton.jit`` for the kernels, and its twin in PyTorch.

    Attributes:
        kernel: ``@triton.jit`` function ``(entry, head, q, k, *pointers) -> bool tile``. ``q`` is int32 [M, 1] and
            ``k`` int32 [1, N]: positions within the sequence, which always exist, so that loads need no mask. ``entry``
            has ``index, batch, q_row, k_row, len_q, len_k``.
        twin: the same rule in PyTorch, ``(entry, head, q, k, *tensors) -> bool tensor``.
        tensors: the tensors that both functions read, contiguous, on the device of q.

    A copy shares both functions; a deep copy has its own tensors. Pickling stores the names of the functions, so both
    must be at the top level of an importable module.

    Raises:
        TypeError: a twin that is not callable, or tensors that are no tuple of tensors.
    """

    kernel: Any
    twin: Callable[..., Tensor]
    tensors: tuple[Tensor, ...] = ()
    name: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not callable(self.twin):
            raise TypeError(f"MaskFunction(twin={self.twin!r}): must be a function, the kernel's rule in PyTorch")
        if not isinstance(self.tensors, tuple | list) or not all(isinstance(x, Tensor) for x in self.tensors):
            raise TypeError(f"MaskFunction(tensors={brief(self.tensors)}): must be a tuple of tensors")
        object.__setattr__(self, "tensors", tuple(self.tensors))
        object.__setattr__(self, "name", _register(self.kernel, len(self.tensors)))

    def __copy__(self) -> MaskFunction:
        return MaskFunction(self.kernel, self.twin, self.tensors)

    def __deepcopy__(self, memo: dict[int, Any]) -> MaskFunction:
        return MaskFunction(self.kernel, self.twin, copy.deepcopy(self.tensors, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        if isinstance(self.twin, types.FunctionType):
            _importable_name("twin", self.twin)
        return _unpickle, (*_importable_name("kernel", self.kernel), self.twin, self.tensors)

    def attends(self, entry: Entry, q: Tensor, k: Tensor, n_heads: int) -> Tensor:
        shape = torch.broadcast_shapes(q.shape, k.shape)
        heads = [self.twin(entry, head, q, k, *self.tensors) for head in range(n_heads)]
        for visible in heads:
            if not isinstance(visible, Tensor) or visible.dtype != torch.bool:
                given = visible.dtype if isinstance(visible, Tensor) else repr(visible)
                raise TypeError(f"MaskFunction's twin returned {given}: must return a bool tensor")
        return torch.stack([visible.expand(shape) for visible in heads])

    def lower(self) -> Lowered:
        return Lowered(-1, -1, self.name, list(self.tensors), -1)

    def validate(self, batch: int, len_q: int, len_k: int, n_heads: int, device: torch.device, packed: bool) -> None:
        for tensor in self.tensors:
            check_device("MaskFunction tensor", tensor, device)
            if not tensor.is_contiguous():
                raise ValueError(
                    f"MaskFunction tensor of shape {tuple(tensor.shape)} has strides {tensor.stride()}: must be "
                    "contiguous, since kernels get no strides"
                )


@dataclass(frozen=True)
class FunctionBuilder:
    """Builds the device term of every ``MaskFunction`` with this kernel and number of tensors."""

    kernel: Any
    n_tensors: int

    def __call__(self, tensors: Iterator[Tensor]) -> DeviceTerm:
        return self.kernel, tuple(next(tensors) for _ in range(self.n_tensors))


def _register(kernel: Any, n_tensors: int) -> str:
    """Register a kernel and return its name.

    All masks with the same kernel share a name, so that ``torch.compile`` does not recompile for a mask that is made
    for every batch. The name is the function's, as in pickle, so that a saved program finds the same kernel or none.
    """
    for name, known in builders().items():
        if isinstance(known, FunctionBuilder) and known.kernel is kernel and known.n_tensors == n_tensors:
            return name
    python = getattr(kernel, "fn", kernel)
    name = base = f"{getattr(python, '__module__', '')}.{getattr(python, '__qualname__', 'function')}"
    while name in builders():  # another function, such as a closure, has the name
        name = f"{base}.{len(builders())}"
    register_builder(name, FunctionBuilder(kernel, n_tensors))
    return name


def _importable_name(role: str, function: Any) -> tuple[str, str]:
    """Return the module and qualified name of a kernel or twin.

    Raises:
        PicklingError: importing that name gives another object.
    """
    python = getattr(function, "fn", function)  # Triton's kernels hold their Python function
    # any object, such as a callable without a name: the import below raises then
    module: Any = getattr(python, "__module__", None)
    name: Any = getattr(python, "__qualname__", None)
    try:
        found = _imported(module, name)
    except (AttributeError, ImportError, TypeError):
        found = None
    if found is not function:
        raise pickle.PicklingError(
            f"MaskFunction({role}={module}.{name}): must be a function at the top level of a module to be pickled, "
            "neither a lambda nor a closure; pass the tensors that it reads as tensors=(...)"
        )
    return module, name


def _imported(module: str, name: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _unpickle(module: str, name: str, twin: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> MaskFunction:
    return MaskFunction(_imported(module, name), twin, tensors)
