"""Bytes that attention reads from and writes to device memory, counted from the algorithms and the masks.

The count assumes no cache. A device's own counter can be lower, because its cache serves repeated reads. Sources:
FlashAttention (Dao et al., 2022, arXiv:2205.14135), section 3.2, and algorithms 0 and 3 for standard attention;
FlashAttention-2 (arXiv:2307.08691) for the loops of this project's portable kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

from flash_train.attention.masks import SKIPPED, Causal, Mask
from flash_train.attention.packing import Entry

STATISTIC_BYTES = 4  #: bytes of one fp32 number per row, such as the log-sum-exp or delta


@dataclass(frozen=True)
class Traffic:
    """Bytes of one forward and of one backward."""

    forward: int
    backward: int


def standard_traffic(entry: Entry | int, n_heads: int, n_kv_heads: int, head_dim: int, itemsize: int) -> Traffic:
    """Count the traffic of algorithms 0 and 3, which hold S and P of all pairs in memory, whatever the mask.

    Forward: S written and read, P written and read. Backward: P read for dV and again for dS, dP written and read, dS
    written, and read for dQ and for dK.
    """
    entry = _entry(entry)
    pairs = itemsize * n_heads * entry.len_q * entry.len_k
    queries, keys = _tensor_bytes(entry, n_heads, n_kv_heads, head_dim, itemsize)
    forward = 4 * pairs + 2 * queries + 2 * keys
    backward = 7 * pairs + 4 * queries + 4 * keys  # dO twice, Q, dQ; K, V, dK, dV
    return Traffic(forward, backward)


def flash_traffic(
    entry: Entry | int,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    itemsize: int,
    mask: Mask | None = None,
    *,
    density: float = 1.0,
    forward_tile: tuple[int, int] = (128, 128),
    dkdv_tile: tuple[int, int] = (64, 128),
    dq_tile: tuple[int, int] = (128, 64),
) -> Traffic:
    """Count the traffic of the portable kernels, which compute dQ separately from dK and dV.

    A program with a tile of queries reads each block of keys and values that any of its queries attends to. A program
    with a tile of keys reads Q, dO and two numbers per row of each such block of queries, for each head of its group.
    So the traffic is proportional to the number of visited blocks, and for a block-sparse mask to its density.

    Args:
        entry: lengths of queries and keys; an int gives both.
        n_heads, n_kv_heads: heads of q, and of k and v.
        itemsize: bytes per element of q, k and v.
        mask: None means ``Causal()``.
        density: fraction of the mask's blocks that an additional block map keeps.
        forward_tile, dkdv_tile, dq_tile: (queries, keys) per tile of each kernel.
    """
    entry, mask = _entry(entry), Causal() if mask is None else mask
    queries, keys = _tensor_bytes(entry, n_heads, n_kv_heads, head_dim, itemsize)
    row = itemsize * head_dim
    statistics = STATISTIC_BYTES * n_heads * entry.len_q

    def visits(tile: tuple[int, int]) -> int:
        """Count the blocks with at least one pair that attends, summed over all query heads."""
        states = mask.blocks(entry, *tile, n_heads) != SKIPPED
        return round(density * int(states.sum())) * (n_heads // states.shape[0])

    forward = 2 * queries + statistics + visits(forward_tile) * forward_tile[1] * 2 * row
    delta = 2 * queries + 3 * statistics  # the kernel that computes delta from out and dout
    dq = 3 * queries + 2 * statistics + visits(dq_tile) * dq_tile[1] * 2 * row
    dkdv = 4 * keys + visits(dkdv_tile) * dkdv_tile[0] * (2 * row + 2 * STATISTIC_BYTES)
    return Traffic(forward, delta + dq + dkdv)


def _entry(entry: Entry | int) -> Entry:
    return Entry.of_lengths(entry, entry) if isinstance(entry, int) else entry


def _tensor_bytes(entry: Entry, n_heads: int, n_kv_heads: int, head_dim: int, itemsize: int) -> tuple[int, int]:
    """Return the bytes of q and the bytes of k."""
    return itemsize * head_dim * n_heads * entry.len_q, itemsize * head_dim * n_kv_heads * entry.len_k
