"""Convert masks to plain values and tensors, which PyTorch operators accept, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from flash_train.attention.masks.base import And, Full, Mask
from flash_train.attention.masks.registry import term_class


class MaskParts(NamedTuple):
    """The terms of a mask, in order.

    Attributes:
        names: ``Mask.kind`` of each term, joined by commas.
        integers: the integers of each term's ``to_parts``, and finally the number of terms: PyTorch takes an empty list
            for a list of tensors.
        tensors: the tensors of each term's ``to_parts``.
    """

    names: str
    integers: list[int]
    tensors: list[Tensor]


def mask_to_parts(mask: Mask) -> MaskParts:
    """Return the parts of a mask.

    Raises:
        ValueError: a term that only Python can evaluate, such as ``MaskFunction``.
    """
    names: list[str] = []
    integers: list[int] = []
    tensors: list[Tensor] = []
    for term in mask.terms if isinstance(mask, And) else (mask,):
        parts = term.to_parts()
        names.append(term.kind)
        integers += parts.integers
        tensors += parts.tensors
    return MaskParts(",".join(names), [*integers, len(names)], tensors)


def mask_from_parts(names: str, integers: Sequence[int], tensors: Sequence[Tensor]) -> Mask:
    """Make the mask from its parts. Raises ValueError if this process does not know a name."""
    remaining_integers, remaining_tensors = iter(integers), iter(tensors)
    mask: Mask = Full()
    for name in names.split(","):
        mask = mask & term_class(name).from_parts(remaining_integers, remaining_tensors)
    return mask
