"""Block-sparse attention: a pattern says which blocks of keys each block of queries attends to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_train.attention.checks import integer, integers
from flash_train.attention.masks.base import (
    WHOLE,
    BlockMap,
    Lowered,
    Mask,
    TermParts,
    check_device,
    clamp_last_block,
)
from flash_train.attention.packing import Entry


@dataclass(frozen=True, eq=False)
class BlockSparse(Mask):
    """Attention between chosen pairs of blocks; the kernels skip all others.

    Attributes:
        pattern: bool (query blocks, key blocks), or (heads, query blocks, key blocks), on the device of q. Blocks past
            its end do not attend. ``flash_train.attention.patterns`` builds the common patterns.
        block: positions per block, one int or (queries, keys). The kernels skip blocks whose sizes are powers of two of
            at least 16; for other sizes they evaluate the pattern for each pair.

    Raises:
        TypeError: a pattern that is no tensor.
        ValueError: a pattern of another dtype or rank, or a block that is not one or two positive integers.
    """

    kind = "blocks"
    pattern: Tensor
    block: int | tuple[int, int] = 128

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, Tensor):
            raise TypeError(f"BlockSparse pattern is a {type(self.pattern).__name__}: must be a bool tensor")
        if self.pattern.dtype != torch.bool or self.pattern.dim() not in (2, 3):
            raise ValueError(
                f"BlockSparse pattern is {self.pattern.dtype} of shape {tuple(self.pattern.shape)}: must be bool "
                "(query blocks, key blocks) or (heads, query blocks, key blocks)"
            )
        one = integer(self.block)
        sizes = integers(self.block) if one is None else [one, one]
        if sizes is None or len(sizes) != 2 or min(sizes) < 1:
            raise ValueError(f"BlockSparse(block={self.block!r}): must be a positive integer or two")
        if one is not self.block:
            object.__setattr__(self, "block", (sizes[0], sizes[1]) if one is None else one)

    @property
    def block_sizes(self) -> tuple[int, int]:  # type: ignore[override]
        return (self.block, self.block) if isinstance(self.block, int) else self.block

    @property
    def per_entry(self) -> bool:
        return False

    @property
    def tensors(self) -> tuple[Tensor, ...]:  # type: ignore[override]
        return (self.pattern,)

    def attends(self, entry: Entry, q: Tensor, k: Tensor, n_heads: int) -> Tensor:
        pattern = self.pattern if self.pattern.dim() == 3 else self.pattern[None]
        pattern = F.pad(pattern, (0, 1, 0, 1))  # False past the end
        block_q, block_k = self.block_sizes
        rows, columns = pattern.shape[1] - 1, pattern.shape[2] - 1
        return pattern[:, (q // block_q).clamp(max=rows), (k // block_k).clamp(max=columns)]

    def blocks(self, entry: Entry, block_q: int, block_k: int, n_heads: int = 1) -> Tensor:
        return clamp_last_block(_block_states(self.dense(entry, n_heads).cpu(), block_q, block_k), entry, block_k)

    def lower(self) -> Lowered:
        return Lowered(-1, -1, "", [], -1)  # the block map contains the whole rule

    def to_parts(self) -> TermParts:
        return TermParts(self.block_sizes, (self.pattern,))

    @classmethod
    def from_parts(cls, integers: Iterator[int], tensors: Iterator[Tensor]) -> BlockSparse:
        return cls(next(tensors), (next(integers), next(integers)))

    def block_map(self, len_q: int, len_k: int, packed: bool, block: tuple[int, int] | None = None) -> BlockMap | None:
        states = self.pattern.to(torch.int8) * WHOLE
        return BlockMap(states[None] if states.dim() == 3 else states[None, None], *self.block_sizes)

    def validate(self, batch: int, len_q: int, len_k: int, n_heads: int, device: torch.device, packed: bool) -> None:
        check_device("BlockSparse pattern", self.pattern, device)
        if self.pattern.dim() == 3 and self.pattern.shape[0] != n_heads:
            raise ValueError(f"BlockSparse pattern has {self.pattern.shape[0]} heads and q {n_heads}: must be equal")
        if not packed:
            need = (-(-len_q // self.block_sizes[0]), -(-len_k // self.block_sizes[1]))
            have = tuple(self.pattern.shape[-2:])
            if have[0] < need[0] or have[1] < need[1]:
                raise ValueError(f"BlockSparse pattern has {have} blocks: must be at least {need} for these lengths")


def _block_states(dense: Tensor, block_q: int, block_k: int) -> Tensor:
    """Compute block states of a rule, from bool (heads, len_q, len_k) to int8 (heads, query blocks, key blocks)."""
    heads, len_q, len_k = dense.shape
    rows, columns = -(-len_q // block_q), -(-len_k // block_k)

    def split_blocks(fill: bool) -> Tensor:
        padded = torch.full((heads, rows * block_q, columns * block_k), fill)
        padded[:, :len_q, :len_k] = dense
        return padded.view(heads, rows, block_q, columns, block_k).transpose(2, 3).flatten(3)

    return split_blocks(False).any(-1).to(torch.int8) + split_blocks(True).all(-1).to(torch.int8)
