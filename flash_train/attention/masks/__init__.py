"""Which keys a query attends to. Every reader of a mask (reference, kernels, FLOP counts) asks the same object.

A mask is a rule over (query position, key position) within one sequence, and terms compose with ``&``:
``Causal() & Window(4096) & BlockSparse(pattern)``. Sequences of different length are aligned at their ends: query ``i``
stands at key ``i + len_k - len_q``, as in flash-attn since 2.1.

Each term answers four readers: ``dense`` (the rule itself), ``blocks`` (which key blocks the kernels visit for a block
of queries, whole or in part), ``lower`` and ``block_map`` (what the kernels are told, with their own few lines in
``kernels.device``), and ``pairs`` (how many pairs attend). A property test holds them to each other.
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
    Window,
)
from flash_train.attention.masks.terms import BlockSparse, Document, MaskFunction, Tree, function_named

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
    "Tree",
    "Window",
    "function_named",
]
