"""Which tile of which entry a program works on."""

from typing import NamedTuple

import triton
import triton.language as tl


class Entry(NamedTuple):
    """One sequence of the call: a row of a padded batch, or an entry of a packed one.

    ``q_row`` and ``k_row`` are its first rows in the tensors (int64; within the batch row ``batch`` where padded).
    """

    index: tl.tensor
    batch: tl.tensor
    q_row: tl.tensor
    k_row: tl.tensor
    len_q: tl.tensor
    len_k: tl.tensor


@triton.jit
def find_tile(slot, cu_ptr, n_entries, seqlen, BLOCK: tl.constexpr, PACKED: tl.constexpr):
    """(entry, tile within it) of a program; a tile past the entry's end means that there is nothing to do.

    Packed, entry e owns the slots from ``cu[e] // BLOCK + e``: enough for its n rows, since
    ``(a + n) // B - a // B + 1 >= ceil(n / B)``. So ``total // BLOCK + n_entries + 1`` programs serve every packing
    of that many rows into that many entries, and no schedule has to be computed, or read back, beforehand. The last
    slots belong to the tail: the rows past the last boundary, which form an entry of their own.
    """
    if PACKED:
        entry = -1
        for start in range(0, n_entries + 1, 1024):
            e = start + tl.arange(0, 1024)
            first = tl.load(cu_ptr + e, mask=e <= n_entries, other=0) // BLOCK + e
            entry += tl.sum(((first <= slot) & (e <= n_entries)).to(tl.int32), 0)
        tile = slot - (tl.load(cu_ptr + entry) // BLOCK + entry)
    else:
        tiles = tl.cdiv(seqlen, BLOCK)
        entry = slot // tiles
        tile = slot % tiles
    return entry, tile


@triton.jit
def load_entry(entry, cu_q_ptr, cu_k_ptr, n_entries, seqlen_q, seqlen_k, PACKED: tl.constexpr):
    """The entry's rows. Packed, ``seqlen_q`` and ``seqlen_k`` are the tensors' total rows, which end the tail."""
    if PACKED:
        q_row = tl.load(cu_q_ptr + entry)
        k_row = tl.load(cu_k_ptr + entry)
        len_q = tl.load(cu_q_ptr + entry + 1, mask=entry < n_entries, other=seqlen_q) - q_row
        len_k = tl.load(cu_k_ptr + entry + 1, mask=entry < n_entries, other=seqlen_k) - k_row
        return Entry(entry, entry * 0, q_row.to(tl.int64), k_row.to(tl.int64), len_q, len_k)
    zero = (entry * 0).to(tl.int64)
    return Entry(entry, entry, zero, zero, seqlen_q, seqlen_k)


@triton.jit
def attended_length(entry, length, n_entries, PACKED: tl.constexpr):
    """``length``, but 0 for the tail of a packed tensor, whose rows attend to nothing."""
    if PACKED:
        return tl.where(entry < n_entries, length, 0)
    return length
