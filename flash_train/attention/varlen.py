"""Packed sequences of different length: many documents in one tensor (total, heads, head_dim)."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Packing:
    """Where the entries of a packed tensor begin and end.

    Entry ``e`` holds the rows ``cu_seqlens[e]`` to ``cu_seqlens[e + 1]``. Boundaries may repeat: such entries are
    empty, so that a fixed number of entries serves batches with any number of documents. Rows past the last boundary
    belong to no entry: their output and gradients are exactly 0.

    Attributes:
        cu_seqlens_q: int32 (entries + 1,), on the device of q, from 0, never decreasing.
        cu_seqlens_k: the same for the keys; the same tensor for self-attention.
        max_seqlen_q, max_seqlen_k: length of the longest entry where known; no backend of this package needs it.
        lengths: lengths of the non-empty entries as Python ints where the host knows them and queries and keys share
            them. The ``sdpa`` and ``standard`` backends then need no device synchronisation.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    lengths: tuple[int, ...] | None = None

    def validate(self, device: torch.device) -> None:
        """Check what can be checked without reading device memory."""
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

    def host_spans(self) -> list[tuple[int, int, int, int]]:
        """(q begin, q end, k begin, k end) of every entry, on the host; synchronises unless ``lengths`` is given.

        Entries for which both queries and keys are empty are left out where ``lengths`` is given.
        """
        if self.lengths is not None:
            ends, end = [], 0
            for n in self.lengths:
                ends.append((end, end + n, end, end + n))
                end += n
            return ends
        q, k = self.cu_seqlens_q.tolist(), self.cu_seqlens_k.tolist()
        return [(q[i], q[i + 1], k[i], k[i + 1]) for i in range(len(q) - 1)]
