"""A mask as plain values and tensors, which can cross ``torch.library``, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from flash_train.attention.masks.base import And, Band, Full, Mask, Window
from flash_train.attention.masks.terms import BlockSparse, Document, Tree

NO_BOUND = -1


class MaskParts(NamedTuple):
    """The terms of a mask, in order: comma-separated names, integers and tensors.

    ``band`` takes two integers, its left and right bound (-1: none); ``blocks`` two, its block's sizes, and the
    pattern; ``document`` the ids of queries and keys; ``tree`` the parents. The last integer counts the terms: PyTorch
    takes an empty list for a list of tensors.
    """

    names: str
    integers: list[int]
    tensors: list[Tensor]


def take_apart(mask: Mask) -> MaskParts:
    """The parts of a mask.

    Raises:
        ValueError: a term that only Python can evaluate, such as ``MaskFunction``.
    """
    names: list[str] = []
    integers: list[int] = []
    tensors: list[Tensor] = []
    for term in mask.terms if isinstance(mask, And) else (mask,):
        if isinstance(term, Band):
            names.append("band")
            integers += [NO_BOUND if bound is None else bound for bound in (term.left, term.right)]
        elif isinstance(term, BlockSparse):
            names.append("blocks")
            integers += term.sizes
            tensors.append(term.pattern)
        elif isinstance(term, Document):
            names.append("document")
            tensors += [term.q_ids, term.q_ids.clone() if term.k_ids is None else term.k_ids]
        elif isinstance(term, Tree):
            names.append("tree")
            tensors.append(term.parents)
        else:
            raise ValueError(
                f"a mask with {type(term).__name__} was given to a backend in plain PyTorch in a traced program: must "
                "be Full, Causal, Window, BlockSparse, Document, Tree, or these joined by &; or use backend=flash"
            )
    return MaskParts(",".join(names), [*integers, len(names)], tensors)


def put_together(names: str, integers: Sequence[int], tensors: Sequence[Tensor]) -> Mask:
    """The mask that has these parts."""
    plain, held = list(integers), list(tensors)
    mask: Mask = Full()
    for name in names.split(","):
        if name == "band":
            left, right = plain.pop(0), plain.pop(0)
            mask = mask & Window(*(None if bound == NO_BOUND else bound for bound in (left, right)))
        elif name == "blocks":
            mask = mask & BlockSparse(held.pop(0), (plain.pop(0), plain.pop(0)))
        elif name == "document":
            mask = mask & Document(held.pop(0), held.pop(0))
        else:
            mask = mask & Tree(held.pop(0))
    return mask
