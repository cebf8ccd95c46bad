"""Masks: which keys each query attends to. The reference, the kernels and the FLOP counts read the same object.

A mask is a rule over (query position, key position) within one sequence. Terms compose with ``&``:
``Causal() & Window(4096) & BlockSparse(pattern)``. Sequences of different lengths are aligned at their ends, as in
flash-attn since 2.1: query ``i`` is at the position of key ``i + len_k - len_q``.

A term gives the same answer in four forms: ``attends`` (the rule for each pair), ``blocks`` (which blocks of keys the
kernels visit for a block of queries), ``lower``, ``device_term`` and ``block_map`` (the kernels' arguments), and
``pairs`` (how many pairs attend). A property test compares them. ``Mask`` says how to write a new term.
"""

from flash_train.attention.masks.base import (
    MAP_BLOCK,
    PARTIAL,
    SKIPPED,
    WHOLE,
    And,
    Band,
    BlockMap,
    Causal,
    Full,
    Lowered,
    Mask,
    TermParts,
    Window,
)
from flash_train.attention.masks.block_sparse import BlockSparse
from flash_train.attention.masks.document import Document
from flash_train.attention.masks.function import MaskFunction
from flash_train.attention.masks.registry import device_term
from flash_train.attention.masks.tree import Tree

__all__ = [
    "MAP_BLOCK",
    "PARTIAL",
    "SKIPPED",
    "WHOLE",
    "And",
    "Band",
    "BlockMap",
    "BlockSparse",
    "Causal",
    "Document",
    "Full",
    "Lowered",
    "Mask",
    "MaskFunction",
    "TermParts",
    "Tree",
    "Window",
    "device_term",
]
