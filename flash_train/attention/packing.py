"""Packed sequences: documents of different lengths one after the other in one tensor (total, heads, head_dim)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from flash_train.attention.checks import integer, integer_tensor, integers
from flash_train.attention.tracing import has_no_values
from flash_train.checks import brief


class Entry(NamedTuple):
    """The location of one sequence of a call: a row of a padded batch, or an entry of a packed tensor.

    The kernels use the same names. Fields are Python ints, or symbols inside kernels and compiled programs.

    Attributes:
        index: number of the sequence in the call.
        batch: batch row of the tensors; 0 if packed.
        q_row: first row of the queries within that batch row; 0 if padded.
        k_row: first row of the keys, likewise.
        len_q: number of queries.
        len_k: number of keys.
    """

    index: Any
    batch: Any
    q_row: Any
    k_row: Any
    len_q: Any
    len_k: Any

    @classmethod
    def of_lengths(cls, len_q: int, len_k: int) -> Entry:
        """Return the entry of a call with a single sequence."""
        return cls(0, 0, 0, 0, len_q, len_k)


class Span(NamedTuple):
    """The positions from ``start`` up to, not including, ``stop``: a ``range`` that may have symbolic bounds.

    ``range`` itself accepts only integers, and ``torch.compile`` may trace lengths as symbols.
    """

    start: Any
    stop: Any


@dataclass(frozen=True)
class Packing:
    """The boundaries between the entries of a packed tensor.

    Entry ``e`` holds rows ``cu_seqlens[e]`` to ``cu_seqlens[e + 1]``. Equal boundaries make an empty entry, so that a
    fixed number of entries serves batches with any number of documents. Rows past the last boundary belong to no entry:
    their output and gradients are exactly 0. An entry, even an empty one, takes some memory in the backward: up to 128
    rows of dQ in fp32 on some GPUs.

    Attributes:
        cu_seqlens_q: boundaries of the queries, int32 (entries + 1,) on the device of q; they start at 0 and never
            decrease. They may be a strided view. A list of integers becomes a tensor on the CPU.
        cu_seqlens_k: boundaries of the keys, likewise; for self-attention the same tensor.
        max_seqlen_q: queries of the longest entry, if known. No backend of this package requires it. ``sdpa`` uses
            PyTorch's kernel for packed sequences only if it gets both ``max_seqlen`` values or ``lengths``.
        max_seqlen_k: keys of the longest entry, likewise.
        lengths: lengths of the entries as Python ints; empty ones at the end may be left out. Give them if the host
            knows them, and queries and keys have the same lengths: the dense backends then do not synchronise with
            the device.

    Raises:
        TypeError: boundaries that are not integers.
        ValueError: boundaries that do not fit int32.
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
        if self.lengths is not None and not all(type(length) is int and length >= 0 for length in self.lengths):
            given = integers(self.lengths)
            if given is None or any(length < 0 for length in given):
                raise TypeError(f"Packing(lengths={brief(self.lengths)}): must be a tuple of lengths, Python ints")
            object.__setattr__(self, "lengths", tuple(given))
        for name in ("max_seqlen_q", "max_seqlen_k"):
            most = getattr(self, name)
            if most is None or isinstance(most, torch.Tensor | torch.SymInt):  # reading these would wait, or specialise
                continue
            number = integer(most)
            if number is None or number < 0:
                raise TypeError(f"Packing({name}={most!r}): must be an integer that is not negative, or None")

    def validate(self, device: torch.device, rows_q: int | None = None, rows_k: int | None = None) -> None:
        """Check dtypes, shapes and devices; on a CPU also the values. Never reads device memory.

        Args:
            device: device of q.
            rows_q, rows_k: rows of q and of k; None leaves the last boundary unchecked.

        Raises:
            ValueError: boundaries that do not fit each other or the tensors.
        """
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
        if device.type == "cpu" and not has_no_values(self.cu_seqlens_q):
            self.check(rows_q, rows_k)

    def check(self, rows_q: int | None = None, rows_k: int | None = None) -> None:
        """Raise ValueError unless boundaries start at 0, never decrease, end within the rows, and fit ``lengths``.

        It reads device memory, so use it only for debugging. ``attention`` calls it for CPU tensors.
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
                found, given = [end - begin for begin, end in pairwise(bounds)], list(self.lengths)
                if found != given + [0] * (len(found) - len(given)):
                    raise ValueError(
                        f"{name} has entries of {found} rows and lengths is {given}: must be equal, except that "
                        "lengths may leave out empty entries at the end"
                    )

    def entries(self) -> list[Entry]:
        """Return the entries as Python ints.

        With ``lengths``, only its entries are returned. Without it, this synchronises with the device.
        """
        if self.lengths is not None:
            found, begin = [], 0
            for index, length in enumerate(self.lengths):
                found.append(Entry(index, 0, begin, begin, length, length))
                begin += length
            return found
        q, k = self.cu_seqlens_q.tolist(), self.cu_seqlens_k.tolist()
        return [Entry(i, 0, q[i], k[i], q[i + 1] - q[i], k[i + 1] - k[i]) for i in range(len(q) - 1)]


def entries(q: torch.Tensor, k: torch.Tensor, packing: Packing | None) -> list[Entry]:
    """Return a call's sequences, from q and k (batch, seqlen, heads, head_dim), or packed (total, heads, head_dim)."""
    if packing is not None:
        return packing.entries()
    return [Entry(b, b, 0, 0, q.shape[1], k.shape[1]) for b in range(q.shape[0])]
