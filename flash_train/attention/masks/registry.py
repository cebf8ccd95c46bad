"""The registry of mask terms. Operators take strings but no objects, and find a term's class and kernel by name.

A class registers itself when it sets ``Mask.kind``; a ``MaskFunction`` registers its kernel under the function's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from flash_train.attention.masks.base import Mask

#: ``@triton.jit`` function ``(entry, head, q, k, *arguments) -> bool tile``, and its arguments
DeviceTerm = tuple[Any, tuple[Any, ...]]

#: takes a term's tensors from an iterator over the tensors of all terms
DeviceTermBuilder = Callable[[Iterator[Tensor]], DeviceTerm]

_classes: dict[str, type[Mask]] = {}
_builders: dict[str, DeviceTermBuilder] = {}


def register_class(term: type[Mask]) -> None:
    """Register a term under its ``kind``. A class that is defined again, as in a notebook, replaces the former one.

    Raises:
        ValueError: another class has this kind, or the kind has a comma: names are joined with commas.
    """
    kind, former = term.kind, _classes.get(term.kind)
    if "," in kind:
        raise ValueError(f"{term.__qualname__}.kind={kind!r}: must have no comma")
    if former is not None and _location(former) != _location(term):
        raise ValueError(f"{term.__qualname__}.kind={kind!r}: must differ from the kind of {former.__qualname__}")
    _classes[kind] = term
    _builders[kind] = term.device_term


def register_builder(name: str, builder: DeviceTermBuilder) -> None:
    _builders[name] = builder


def builders() -> dict[str, DeviceTermBuilder]:
    """Builders of device terms by name; not to be changed."""
    return _builders


def term_class(kind: str) -> type[Mask]:
    """The class of this kind. Raises ValueError for an unknown one."""
    if kind not in _classes:
        raise ValueError(f"mask term {kind!r}: must be one of {', '.join(_classes)}; import the module of its class")
    return _classes[kind]


def device_term(name: str, tensors: Iterator[Tensor]) -> DeviceTerm:
    """The term's ``@triton.jit`` function and its arguments.

    Raises:
        ValueError: this process does not know the name, which may come from a saved program.
    """
    if name not in _builders:
        raise ValueError(
            f"mask term {name!r}: must be known in this process before the program runs; import the module of its "
            "class, or make its MaskFunction"
        )
    return _builders[name](tensors)


def _location(term: type[Mask]) -> tuple[str, str]:
    return term.__module__, term.__qualname__
