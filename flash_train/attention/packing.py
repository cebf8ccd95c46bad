"""Packed sequences of different length: many documents in one tensor (total, heads, head_dim)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from flash_train.attention.checks import integer_tensor
from flash_train.attention.tracing import unreadable


class Entry(NamedTuple):
    """One sequence of a call: a row of a padded batch, or an entry of a packed one. The same here and in the kernels.

    ``batch`` is the tensors' batch row (0 where packed), ``q_row`` and ``k_row`` the first rows within it (0 where
    padded), ``index`` counts the sequences.
    """

    index: Any
    batch: Any
    q_row: Any
    k_row: Any
    len_q: Any
    len_k: Any

    @classmethod
    def of_lengths(cls, len_q: int, len_k: int) -> Entry:
        """The only sequence of a call."""
        return cls(0, 0, 0, 0, len_q, len_k)


class Span(NamedTuple):
    """The positions from ``start`` to before ``stop``: a range whose bounds a compiler may hold as symbols."""

    start: Any
    stop: Any


@dataclass(frozen=True)
class Packing:
    """Where the entries of a packed tensor begin and end.

    Entry ``e`` holds the rows ``cu_seqlens[e]`` to ``cu_seqlens[e + 1]``. Boundaries may repeat: such entries are
    empty, so that a fixed number of entries serves batches with any number of documents. Rows past the last boundary
    belong to no entry: their output and gradients are exactly 0.

    Attributes:
        cu_seqlens_q: int32 (entries + 1,), on the device of q, from 0, never decreasing; may be a strided view. A list
            of integers becomes a tensor on the CPU.
        cu_seqlens_k: the same for the keys; the same tensor for self-attention.
        max_seqlen_q, max_seqlen_k: length of the longest entry where known; no backend of this package needs it.
        lengths: lengths of the non-empty entries as Python ints where the host knows them, queries and keys share them
            and empty entries come last. The backends in plain PyTorch then need no device synchronisation.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    lengths: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            given = getattr(self, name)
            cu = integer_tensor(name, given)
            if not isinstance(cu, torch.Tensor):
                raise TypeError(f"Packing({name}={cu!r}): must be an int32 tensor")
            if cu is not given:
                object.__setattr__(self, name, cu)

    def validate(self, device: torch.device, rows_q: int | None = None, rows_k: int | None = None) -> None:
        """Check what can be checked without reading device memory: on a CPU, the values too."""
        for name, cu in (("cu_seqlens_q", self.cu_seqlens_q), ("cu_seqlens_k", self.cu_seqlens_k)):
            if cu.dtype != torch.int32 or cu.dim() != 1 or cu.numel() < 2:
                raise ValueError(
                    f"{name} is {cu.dtype} of shape {tuple(cu.shape)}: must be a one-dimensional int32 tensor "
                    "of at least two boundaries"
                )
            if cu.device != device:
                raise ValueError(f"{name} is on {cu.device} and q on {device}: must be the same device")
        if self.cu_seqlens_q.numel() != self.cu_seqlens_k.numel():
            raise ValueError(
                f"cu_seqlens_q has {self.cu_seqlens_q.numel() - 1} entries and cu_seqlens_k "
                f"{self.cu_seqlens_k.numel() - 1}: must be equal"
            )
        if device.type == "cpu" and not unreadable(self.cu_seqlens_q):
            self.check(rows_q, rows_k)

    def check(self, rows_q: int | None = None, rows_k: int | None = None) -> None:
        """Check the values: boundaries start at 0, never decrease, and end within the rows of q and k, where given;
        ``lengths``, where given, are the entries'.

        Reads device memory: for debugging. On a CPU, ``attention`` does it.
        """
        for side, cu, rows in (("q", self.cu_seqlens_q, rows_q), ("k", self.cu_seqlens_k, rows_k)):
            name, bounds = f"cu_seqlens_{side}", cu.tolist()
            if bounds[0] != 0:
                raise ValueError(f"{name} starts at {bounds[0]}: must start at 0")
            for entry, (begin, end) in enumerate(pairwise(bounds)):
                if begin > end:
                    raise ValueError(f"{name} falls from {begin} to {end} at entry {entry}: must never decrease")
            if rows is not None and bounds[-1] > rows:
                raise ValueError(f"{name} ends at {bounds[-1]} and {side} has {rows} rows: must end within them")
            if self.lengths is not None:
                found, told = [end - begin for begin, end in pairwise(bounds)], list(self.lengths)
                if list(filter(None, found)) != list(filter(None, told)):
                    raise ValueError(f"{name} has entries of {found} rows and lengths is {told}: must be equal")

    def entries(self) -> list[Entry]:
        """Every entry, on the host; synchronises unless ``lengths`` is given, which leaves empty entries out."""
        if self.lengths is not None:
            lengths, begin = list(self.lengths), 0
            found = []
            for i, n in enumerate(lengths):
                found.append(Entry(i, 0, begin, begin, n, n))
                begin += n
            return found
        q, k = self.cu_seqlens_q.tolist(), self.cu_seqlens_k.tolist()
        return [Entry(i, 0, q[i], k[i], q[i + 1] - q[i], k[i + 1] - k[i]) for i in range(len(q) - 1)]


def entries(q: torch.Tensor, k: torch.Tensor, packing: Packing | None) -> list[Entry]:
    """The sequences of a call on (batch, seqlen, heads, head_dim) or packed (total, heads, head_dim) tensors."""
    if packing is not None:
        return packing.entries()
    return [Entry(b, b, 0, 0, q.shape[1], k.shape[1]) for b in range(q.shape[0])]
