"""Attention within a tree of tokens, for speculative decoding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flash_train.attention.masks.base import WHOLE, Lowered, Mask, TermParts, check_device
from flash_train.attention.masks.registry import DeviceTerm
from flash_train.attention.packing import Entry
from flash_train.attention.tracing import has_no_values


@dataclass(frozen=True, eq=False, init=False)
class Tree(Mask):
    """A node attends to its ancestors, to itself and to all keys before the tree, as in speculative decoding.

    The last ``n`` positions of queries and keys are the nodes. Every query attends to the keys before them.

    Attributes:
        parents: index of each node's parent, -1 for a root; int32 or int64 (n,), or (batch, n) for a tree per batch row
            or packed entry. May be given as a list. The values of a CPU tensor are checked.
        bits: int32 (batch or 1, n, ceil(n / 32)): bit k % 32 of word k // 32 is set if the node attends to node k.

    Raises:
        ValueError: parents of another dtype or rank; on the CPU, nodes that do not exist, or a cycle.

    Source: tree attention of SpecInfer (Miao et al., 2023, arXiv:2305.09781).
    """

    kind = "tree"
    parents: Tensor
    bits: Tensor

    def __init__(self, parents: Tensor | Sequence[int] | Sequence[Sequence[int]]) -> None:
        parents = torch.as_tensor(parents)
        if parents.dtype not in (torch.int32, torch.int64) or parents.dim() not in (1, 2) or parents.numel() == 0:
            raise ValueError(
                f"Tree parents are {parents.dtype} of shape {tuple(parents.shape)}: must be integers (n,) or "
                "(batch, n), n at least 1"
            )
        ancestors = _ancestors(parents if parents.dim() == 2 else parents[None])
        if parents.device.type == "cpu" and not has_no_values(parents):
            _check_parents(parents, ancestors)
        object.__setattr__(self, "parents", parents)
        object.__setattr__(self, "bits", _pack_bits(ancestors))

    @property
    def n_nodes(self) -> int:
        return self.parents.shape[-1]

    @property
    def tensors(self) -> tuple[Tensor, ...]:  # type: ignore[override]
        return (self.bits,)

    @property
    def per_entry(self) -> bool:
        return self.bits.shape[0] > 1

    def attends(self, entry: Entry, q: Tensor, k: Tensor, n_heads: int) -> Tensor:
        words = self.bits[entry.index if self.bits.shape[0] > 1 else 0]
        node_q, node_k = q + self.n_nodes - entry.len_q, k + self.n_nodes - entry.len_k
        word = words[node_q.clamp(min=0), node_k.clamp(min=0) // 32]
        ancestor = (word >> (node_k.clamp(min=0) % 32)) & 1 == 1
        return ((node_k < 0) | (ancestor & (node_q >= 0)))[None]

    def blocks(self, entry: Entry, block_q: int, block_k: int, n_heads: int = 1) -> Tensor:
        states = super().blocks(entry, block_q, block_k, n_heads)
        before_tree = torch.arange(1, states.shape[2] + 1) * block_k <= entry.len_k - self.n_nodes
        return torch.where(before_tree, WHOLE, states).to(torch.int8)

    def lower(self) -> Lowered:
        return Lowered(-1, -1, self.kind, [self.bits], self.n_nodes)

    @classmethod
    def device_term(cls, tensors: Iterator[Tensor]) -> DeviceTerm:
        from flash_train.attention.kernels.device.mask import tree

        bits = next(tensors)
        return tree, (bits, bits.stride(0) if bits.shape[0] > 1 else 0, bits.shape[1], bits.shape[2])

    def to_parts(self) -> TermParts:
        return TermParts((), (self.parents,))

    @classmethod
    def from_parts(cls, integers: Iterator[int], tensors: Iterator[Tensor]) -> Tree:
        return cls(next(tensors))

    def validate(self, batch: int, len_q: int, len_k: int, n_heads: int, device: torch.device, packed: bool) -> None:
        check_device("Tree parents", self.bits, device)
        if self.bits.shape[0] not in (1, batch):
            raise ValueError(f"Tree has {self.bits.shape[0]} trees for {batch} sequences: must be 1 or as many")


def _ancestors(parents: Tensor) -> Tensor:
    """Convert parents (batch, n) to bool (batch, n, n), True if the key node is the query node or its ancestor."""
    n = parents.shape[-1]
    node = torch.arange(n, device=parents.device)
    reached = ((parents[..., None] == node) | (node[:, None] == node)).float()
    for _ in range(max(n - 1, 1).bit_length()):  # each squaring doubles the number of generations
        reached = (reached @ reached > 0).float()
    return reached > 0


def _check_parents(parents: Tensor, ancestors: Tensor) -> None:
    """Raise ValueError for parents that do not exist, and for cycles."""
    n = parents.shape[-1]
    low, high = int(parents.min()), int(parents.max())
    if low < -1 or high >= n:
        wrong = low if low < -1 else high
        raise ValueError(f"Tree parents name node {wrong} of {n}: must be 0 to {n - 1}, or -1 for a root")
    own = (parents == torch.arange(n)).any(-1)
    mutual = (ancestors & ancestors.mT).sum((1, 2)) > n  # each node counts as its own ancestor
    circular = own | mutual
    if bool(circular.any()):
        raise ValueError(f"Tree parents {parents.tolist()} form a cycle: must lead to a root, whose parent is -1")


def _pack_bits(visible: Tensor) -> Tensor:
    """Pack bool (..., n) into int32 words (..., ceil(n / 32)): key k is bit k % 32 of word k // 32."""
    missing = -visible.shape[-1] % 32
    bits = torch.cat([visible, visible.new_zeros(*visible.shape[:-1], missing)], -1)
    weights = 2 ** torch.arange(32, device=bits.device)
    words = (bits.view(*bits.shape[:-1], -1, 32) * weights).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).contiguous()
