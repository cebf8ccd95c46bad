"""The entry and the tile of a program."""

import triton
import triton.language as tl

from flash_train.attention.packing import Entry


@triton.jit
def find_tile(slot, cu_ptr, n_entries, seqlen, BLOCK: tl.constexpr):
    """(entry, tile of the entry) of a slot, the index of a program. A tile past the entry's end is empty.

    In packed calls (``cu_ptr`` is not None), entry e owns the slots from ``cu[e] // BLOCK + e``. They are enough for
    its n rows, since ``(a + n) // B - a // B + 1 >= ceil(n / B)``. So ``total // BLOCK + n_entries + 1`` programs serve
    every packing of that many rows into that many entries, without a schedule on the host and without a
    synchronisation. The last slots belong to the tail: the rows past the last boundary form an entry of their own.
    """
    if cu_ptr is None:
        tiles = tl.cdiv(seqlen, BLOCK)
        entry = slot // tiles
        tile = slot % tiles
    else:
        entry = -1
        for start in range(0, n_entries + 1, 1024):
            e = start + tl.arange(0, 1024)
            first = tl.load(cu_ptr + e, mask=e <= n_entries, other=0) // BLOCK + e
            entry += tl.sum(((first <= slot) & (e <= n_entries)).to(tl.int32), 0)
        tile = slot - (tl.load(cu_ptr + entry) // BLOCK + entry)
    return entry, tile


@triton.jit
def load_entry(entry, cu_q_ptr, cu_k_ptr, n_entries, seqlen_q, seqlen_k, WALKS_KEYS: tl.constexpr):
    """The rows and lengths of an entry, for a program that loops over its keys or, without WALKS_KEYS, its queries.

    In packed calls ``seqlen_q`` and ``seqlen_k`` are the rows of the whole tensors, where the tail ends. The tail has
    no keys (or no queries) to loop over.
    """
    if cu_q_ptr is None:
        zero = (entry * 0).to(tl.int64)
        seq = Entry(entry, entry.to(tl.int64), zero, zero, seqlen_q, seqlen_k)
    else:
        q_row = tl.load(cu_q_ptr + entry)
        k_row = tl.load(cu_k_ptr + entry)
        len_q = tl.load(cu_q_ptr + entry + 1, mask=entry < n_entries, other=seqlen_q) - q_row
        len_k = tl.load(cu_k_ptr + entry + 1, mask=entry < n_entries, other=seqlen_k) - k_row
        if WALKS_KEYS:
            len_k = tl.where(entry < n_entries, len_k, 0)
        else:
            len_q = tl.where(entry < n_entries, len_q, 0)
        seq = Entry(entry, (entry * 0).to(tl.int64), q_row.to(tl.int64), k_row.to(tl.int64), len_q, len_k)
    return seq
