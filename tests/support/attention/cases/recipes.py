"""Recipes for mask terms: plain data that can be printed and pasted. A generator draws the contents of a term."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Generator, Tensor

from flash_train.attention.masks import BlockSparse, Document, Mask, Tree


@dataclass(frozen=True)
class Layout:
    """The sequences of a call: (query, key) lengths of batch rows, which are all equal, or of packed entries."""

    lengths: tuple[tuple[int, int], ...]
    heads: int
    packed: bool = False
    tail: tuple[int, int] = (0, 0)  #: rows of queries and of keys past the last packed entry

    def rows(self, side: int) -> int:
        """Rows of the query tensor (side 0) or the key tensor (side 1); padded, rows per batch row."""
        if self.packed:
            return sum(pair[side] for pair in self.lengths) + self.tail[side]
        return self.lengths[0][side]


class Recipe(Protocol):
    """A mask term without its contents."""

    def build(self, layout: Layout, generator: Generator, device: torch.device | str) -> Mask:
        """The term for these sequences, with random contents."""
        ...

    def on_card(self) -> Recipe:
        """The recipe for sequences that are nine times as long."""
        ...


@dataclass(frozen=True)
class Documents:
    """Document ids that grow by one every ``mean`` positions on average; if not ``ordered``, a few ids at random."""

    mean: int = 13
    shared: bool = False
    ordered: bool = True

    def build(self, layout: Layout, generator: Generator, device: torch.device | str) -> Document:
        batch = 1 if layout.packed or self.shared else len(layout.lengths)
        rows_q, rows_k = layout.rows(0), layout.rows(1)
        longest = max(rows_q, rows_k)
        if self.ordered:
            ids = (torch.rand(batch, longest, generator=generator) < 1 / self.mean).cumsum(1)
        else:
            ids = torch.randint(-2, 3, (batch, longest), generator=generator)
        ids = (ids[0] if layout.packed or self.shared else ids).int().to(device)
        same = rows_q == rows_k  # sequences are aligned at their ends
        return Document(ids[..., longest - rows_q :], None if same else ids[..., longest - rows_k :])

    def on_card(self) -> Documents:
        return replace(self, mean=9 * self.mean)


@dataclass(frozen=True)
class Blocks:
    """A random pattern of ``shape`` blocks; None: as many as the longest sequence needs."""

    size: tuple[int, int] = (32, 32)
    density: float = 0.5
    per_head: bool = False
    shape: tuple[int, int] | None = None

    def build(self, layout: Layout, generator: Generator, device: torch.device | str) -> BlockSparse:
        longest = [max(pair[side] for pair in layout.lengths) for side in (0, 1)]
        shape = self.shape or tuple(-(-n // size) for n, size in zip(longest, self.size, strict=True))
        heads = (layout.heads,) if self.per_head else ()
        pattern = torch.rand(*heads, *shape, generator=generator) < self.density
        return BlockSparse(pattern.to(device), self.size)

    def on_card(self) -> Blocks:
        return replace(self, size=(4 * self.size[0], 4 * self.size[1]))


@dataclass(frozen=True)
class Nodes:
    """A random tree of ``count`` nodes, or one tree per entry. Parents may come after their children."""

    count: int = 9
    per_entry: bool = False

    def build(self, layout: Layout, generator: Generator, device: torch.device | str) -> Tree:
        trees = [self._parents(generator) for _ in range(len(layout.lengths) if self.per_entry else 1)]
        parents = torch.stack(trees) if self.per_entry else trees[0]
        return Tree(parents.to(device))

    def on_card(self) -> Nodes:
        return replace(self, count=5 * self.count)

    def _parents(self, generator: Generator) -> Tensor:
        parents = torch.full((self.count,), -1)
        order = torch.randperm(self.count, generator=generator)
        for place in range(1, self.count):
            above = int(torch.randint(-1, place, (), generator=generator))
            parents[order[place]] = -1 if above < 0 else order[above]
        return parents


@dataclass(frozen=True)
class Rule:
    """A ``MaskFunction``, by its name in ``tests.support.attention.cases.rules``."""

    name: str = "parity"

    def build(self, layout: Layout, generator: Generator, device: torch.device | str) -> Mask:
        from tests.support.attention.cases import rules  # Triton exists for Linux only

        return rules.build(self.name, layout, generator, device)

    def on_card(self) -> Rule:
        return self


def compose(
    band: Mask, recipes: Sequence[Recipe], layout: Layout, generator: Generator, device: torch.device | str
) -> Mask:
    """The band and the terms of all recipes, joined with ``&``."""
    mask = band
    for recipe in recipes:
        mask = mask & recipe.build(layout, generator, device)
    return mask
