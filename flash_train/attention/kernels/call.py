"""The parameters of the attention operators: ``Call`` holds them, and the operators' schemas are made from its fields.

This module needs no Triton, because the operators are registered on every machine.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, get_type_hints

from torch import Tensor

from flash_train.attention.dropout import EntryOrigins
from flash_train.attention.index_tensors import contiguous_tensor
from flash_train.attention.spec import AttentionSpec

UNUSED = -1  #: the mask does not have this bound


class Bounds(NamedTuple):
    """The integers of a mask; a bound that the mask does not have is ``UNUSED``.

    ``left`` and ``right`` bound the band. The element-wise terms apply to the last ``tail`` keys only. A block of
    ``Call.block_map`` has ``block_q`` queries and ``block_k`` keys.
    """

    left: int
    right: int
    tail: int
    block_q: int
    block_k: int

    @property
    def block(self) -> tuple[int, int]:
        return self.block_q, self.block_k


class Call(NamedTuple):
    """The parameters of one call, apart from q, k and v.

    The tensors come first and end with the tensors of the mask's terms. The settings follow; they are plain values.
    ``terms`` names the element-wise terms of the mask, comma-separated, and ``term_tensors`` holds their tensors in
    order. ``origin`` is ``RngState.origin``; ``origins`` and ``aligned`` (0 or 1) are its ``EntryOrigins``.
    ``keep_threshold`` is ``AttentionSpec.keep_threshold``.
    """

    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    rng: Tensor | None
    origins: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    block_map: Tensor | None
    term_tensors: Sequence[Tensor]
    terms: str
    bounds: Bounds
    origin: tuple[int, int, int, int]
    aligned: int
    scale: float
    softcap: float
    keep_threshold: int

    @classmethod
    def of(cls, tensors: Sequence[Any], settings: Sequence[Any]) -> Call:
        """Make a call from ``tensors`` and ``settings``, in the order of the properties with these names."""
        return cls._make((*tensors[:N_TENSORS], tensors[N_TENSORS:], *settings))

    @classmethod
    def from_arguments(cls, arguments: Sequence[Any]) -> Call:
        """Make a call from an operator's arguments, which hold lists instead of tuples of integers."""
        parameters = [*arguments]
        parameters[_BOUNDS], parameters[_ORIGIN] = Bounds._make(parameters[_BOUNDS]), tuple(parameters[_ORIGIN])
        return cls._make(parameters)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of an operator: the fields, with lists instead of tuples."""
        return tuple([list(x) if isinstance(x, tuple) else x for x in self])

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        own: Any = self[:N_TENSORS]
        return (*own, *self.term_tensors)

    @property
    def settings(self) -> tuple[Any, ...]:
        return self[N_TENSORS + 1 :]

    @property
    def has_lists(self) -> bool:
        """Whether the kernels visit only the tiles that a block map lists.

        The sizes of its blocks must be powers of two from 16 up; any other map becomes an element-wise term.
        """
        return self.block_map is not None and all(size >= 16 and size & (size - 1) == 0 for size in self.bounds.block)

    @property
    def has_terms(self) -> bool:
        return bool(self.terms) or (self.block_map is not None and not self.has_lists)

    @property
    def draws_aligned(self) -> bool:
        """Whether the first query and key of the dropout mask, and of each entry's part, are multiples of 16."""
        return bool(self.aligned) if self.origins is not None else self.origin[2] % 16 == self.origin[3] % 16 == 0

    @property
    def keep_rate(self) -> float:
        return self.keep_threshold / 256

    def contiguous(self) -> Call:
        """Return the call with contiguous tensors; strided views are copied.

        A block map keeps its strides, because the kernels take them as arguments.
        """
        for x in self.tensors:  # runs in every call; `any` with a generator is slower
            if x is not None and not x.is_contiguous():
                tensors = [x if x is self.block_map else contiguous_tensor(x) for x in self.tensors]
                return Call.of(tensors, self.settings)
        return self


N_TENSORS = Call._fields.index("term_tensors")  #: number of parameters that are one tensor each
_BOUNDS, _ORIGIN = (Call._fields.index(name) for name in ("bounds", "origin"))

_SCHEMA_TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    Sequence[Tensor]: "Tensor[]",
    Sequence[int]: "SymInt[]",
    tuple[int, int, int, int]: "SymInt[]",
    Bounds: "SymInt[]",
    int: "SymInt",
    float: "float",
    str: "str",
}


@functools.cache
def schema_of(fields: type, *left_out: str) -> str:
    """Return the annotated fields of a class, except ``left_out``, as the parameters of a ``torch.library`` schema."""
    hints = get_type_hints(fields)
    return ", ".join(f"{_SCHEMA_TYPES[hint]} {name}" for name, hint in hints.items() if name not in left_out)


def call_of(
    spec: AttentionSpec,
    head_dim: int,
    len_q: int,
    len_k: int,
    cu_seqlens: tuple[Tensor | None, Tensor | None],
    state: Tensor | None,
    origin: tuple[int, int, int, int],
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    entries: EntryOrigins | None = None,
    *,
    packed: bool,
) -> Call:
    """Return the call that computes ``spec``.

    Args:
        len_q, len_k: number of queries and keys; in packed calls, the rows of the whole tensors.
        state: dropout's seed and offset, int64 (2,); None without dropout.
        entries: the entries' places in a larger dropout mask.
        packed: whether sequences may differ in length, because they are packed or in a cache.
    """
    lowered = spec.mask.lower()
    blocks = spec.mask.block_map(len_q, len_k, packed)
    states, sizes = (None, (UNUSED, UNUSED)) if blocks is None else (blocks.states, blocks[1:])
    return Call(
        *cu_seqlens, state, None if entries is None else entries.first, alibi_slopes, sinks, states, lowered.tensors,
        lowered.terms, Bounds(lowered.left, lowered.right, lowered.tail, *sizes), origin,
        int(entries is not None and entries.aligned),
        float(spec.scale_for(head_dim)), float(spec.softcap), spec.keep_threshold,
    )  # fmt: skip
