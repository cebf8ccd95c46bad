"""Examples of ``MaskFunction``: Triton functions for the kernels, and their twins in PyTorch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Generator, Tensor

from flash_train.attention.masks import MaskFunction
from flash_train.attention.packing import Entry
from tests.support.attention.cases.recipes import Layout


@triton.jit
def parity(entry, head, q, k):
    """A checkerboard that differs between heads and entries."""
    return ((q + k + head + entry.index) % 2 == 0) | (q == k)


def parity_twin(entry: Entry, head: int, q: Tensor, k: Tensor) -> Tensor:
    return ((q + k + head + entry.index) % 2 == 0) | (q == k)


@triton.jit
def budget(entry, head, q, k, reach, shift):
    """A window with one length per query row, read from a tensor, and one shift for all rows."""
    length = tl.load(reach + entry.batch * tl.load(shift + 1) + entry.q_row + q)
    distance = q - k + entry.len_k - entry.len_q
    return (distance <= length) & (distance + tl.load(shift) >= 0)


def budget_twin(entry: Entry, head: int, q: Tensor, k: Tensor, reach: Tensor, shift: Tensor) -> Tensor:
    length = reach[entry.batch * shift[1] + entry.q_row + q]
    distance = q - k + entry.len_k - entry.len_q
    return (distance <= length) & (distance + shift[0] >= 0)


def build(name: str, layout: Layout, generator: Generator, device: torch.device | str) -> MaskFunction:
    """The mask function of this name, with random tensors if it reads any."""
    if name == "parity":
        return MaskFunction(parity, parity_twin)
    if name == "budget":
        rows = layout.rows(0)
        batch = 1 if layout.packed else len(layout.lengths)
        reach = torch.randint(0, 40, (max(batch * rows, 1),), generator=generator)
        shift = torch.tensor([int(torch.randint(0, 9, (), generator=generator)), rows])
        return MaskFunction(budget, budget_twin, (reach.to(device), shift.to(device)))
    raise ValueError(f"name={name!r}: must be parity or budget")
