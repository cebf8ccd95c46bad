"""The registry of mask terms. Operators take strings but no objects, and find a term's class and kernel by name.

A class registers itself when it sets ``Mask.kind``; a ``MaskFunction`` registers its kernel under the function's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

#: ``@triton.jit`` function ``(entry, head, q, k, *arguments) -> bool tile``, and its arguments
DeviceTerm = tuple[Any, tuple[Any, ...]]

#: takes a term's tensors from an iterator over the tensors of all terms
DeviceTermBuilder = Callable[[Iterator[Tensor]], DeviceTerm]

#: a subclass of ``Mask``, which this module does not import: ``Mask`` registers its subclasses here
TermClass = type[Any]

_classes: dict[str, TermClass] = {}
_builders: dict[str, DeviceTermBuilder] = {}


def register_class(term: TermClass) -> None:
    """Register a term under its ``kind``. If a class is defined again, as in a notebook, it replaces the earlier one.

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
    """Return the builders of device terms by name. Do not change the dictionary."""
    return _builders


def term_class(kind: str) -> TermClass:
    """Return the class of this kind. Raises ValueError if there is none."""
    if kind not in _classes:
        raise ValueError(f"mask term {kind!r}: must be one of {', '.join(_classes)}; import the module of its class")
    return _classes[kind]


def device_term(name: str, tensors: Iterator[Tensor]) -> DeviceTerm:
    """Return the term's ``@triton.jit`` function and its arguments.

    Raises:
        ValueError: this process does not know the name, for example from a saved program.
    """
    if name not in _builders:
        raise ValueError(
            f"mask term {name!r}: must be known in this process before the program runs; import the module of its "
            "class, or make its MaskFunction"
        )
    return _builders[name](tensors)


def _location(term: TermClass) -> tuple[str, str]:
    return term.__module__, term.__qualname__
