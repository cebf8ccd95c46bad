"""Attention within documents, which are distinguished by ids."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flash_train.attention.checks import integer_tensor
from flash_train.attention.masks.base import MAP_BLOCK, BlockMap, Mask, TermParts, check_device
from flash_train.attention.masks.registry import DeviceTerm
from flash_train.attention.packing import Entry


@dataclass(frozen=True, eq=False)
class Document(Mask):
    """A query attends to keys that have the same document id.

    If documents are contiguous, ``Packing`` is faster: its kernels never visit blocks of another document.

    Attributes:
        q_ids: int32 (batch, seqlen_q), or (seqlen_q,) for all batch rows; packed (total_q,).
        k_ids: the ids of the keys, int32 (batch, seqlen_k), (seqlen_k,) or (total_k,); None: ``q_ids`` serves both.

    Lists of integers become tensors on the CPU.

    Raises:
        TypeError: ids that are no integers.
        ValueError: ids of another dtype or rank.
    """

    kind = "document"
    q_ids: Tensor
    k_ids: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("q_ids", "k_ids"):
            given = getattr(self, name)
            if given is None and name == "k_ids":
                continue
            ids = integer_tensor(f"Document {name}", given)
            if not isinstance(ids, Tensor):
                raise TypeError(f"Document {name} is a {type(given).__name__}: must be an int32 tensor")
            if ids is not given:
                object.__setattr__(self, name, ids)
            if ids.dtype != torch.int32 or ids.dim() not in (1, 2):
                raise ValueError(
                    f"Document {name} is {ids.dtype} of shape {tuple(ids.shape)}: must be int32 (batch, seqlen), "
                    "(seqlen,) or packed (total,)"
                )

    @property
    def _key_ids(self) -> Tensor:
        return self.q_ids if self.k_ids is None else self.k_ids

    @property
    def tensors(self) -> tuple[Tensor, ...]:  # type: ignore[override]
        return (self.q_ids, self._key_ids)

    @property
    def per_entry(self) -> bool:
        return self.q_ids.dim() == 2 or self._key_ids.dim() == 2

    def attends(self, entry: Entry, q: Tensor, k: Tensor, n_heads: int) -> Tensor:
        q_ids, k_ids = _row(self.q_ids, entry.batch), _row(self._key_ids, entry.batch)
        return (q_ids[entry.q_row + q] == k_ids[entry.k_row + k])[None]

    @classmethod
    def device_term(cls, tensors: Iterator[Tensor]) -> DeviceTerm:
        from flash_train.attention.kernels.device.mask import document

        q_ids, k_ids = next(tensors), next(tensors)
        return document, (q_ids, _batch_stride(q_ids), k_ids, _batch_stride(k_ids))

    def to_parts(self) -> TermParts:
        # a copy, so that the operator does not get the same tensor twice
        return TermParts((), (self.q_ids, self.q_ids.clone() if self.k_ids is None else self.k_ids))

    @classmethod
    def from_parts(cls, integers: Iterator[int], tensors: Iterator[Tensor]) -> Document:
        return cls(next(tensors), next(tensors))

    def block_map(self, len_q: int, len_k: int, packed: bool, block: tuple[int, int] | None = None) -> BlockMap | None:
        if packed:  # entries do not begin at multiples of the block size
            return None
        sizes = block or (MAP_BLOCK, MAP_BLOCK)
        q_range = _block_range(self.q_ids, sizes[0])
        k_range = q_range if self.k_ids is None and sizes[0] == sizes[1] else _block_range(self._key_ids, sizes[1])
        q_low, q_high, k_low, k_high = (*(x[:, :, None] for x in q_range), *(x[:, None, :] for x in k_range))
        visited = (q_low <= k_high) & (k_low <= q_high)
        whole = (q_low == k_high) & (k_low == q_high)  # then all four are equal
        return BlockMap((visited.to(torch.int8) + whole)[:, None], *sizes)

    def validate(self, batch: int, len_q: int, len_k: int, n_heads: int, device: torch.device, packed: bool) -> None:
        for name, ids, length in (("q_ids", self.q_ids, len_q), ("k_ids", self._key_ids, len_k)):
            check_device(f"Document {name}", ids, device)
            allowed = [(length,)] if packed else [(length,), (batch, length)]
            if tuple(ids.shape) not in allowed:
                raise ValueError(
                    f"Document {name} has shape {tuple(ids.shape)}: must be {' or '.join(map(str, allowed))}"
                )


def _block_range(ids: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest id of each block, both (batch or 1, blocks)."""
    ids = ids if ids.dim() == 2 else ids[None]
    missing = -ids.shape[1] % block
    if missing:
        ids = torch.cat([ids, ids[:, -1:].expand(-1, missing)], 1)
    blocks = ids.reshape(ids.shape[0], ids.shape[1] // block, block)
    return torch.aminmax(blocks, dim=-1)


def _row(ids: Tensor, batch: int) -> Tensor:
    return ids[batch] if ids.dim() == 2 else ids


def _batch_stride(ids: Tensor) -> int:
    return ids.stride(0) if ids.dim() == 2 else 0
