"""Bytes that attention moves between a device's memory and its processors: what the algorithms ask for, by their masks.

A cache may serve part of what is asked for twice, so that a device's own count of its memory's traffic can be lower.
Sources: FlashAttention (Dao et al., 2022, arXiv:2205.14135), section 3.2 and algorithms 0 and 3 for the standard way;
FlashAttention-2 (arXiv:2307.08691) for the loops that this project's kernels follow.
"""

from __future__ import annotations

from dataclasses import dataclass

from flash_train.attention.masks import Causal, Mask
from flash_train.attention.masks.base import SKIPPED
from flash_train.attention.packing import Entry

STATISTIC = 4  # bytes of a number per row: log-sum-exp, delta


@dataclass(frozen=True)
class Traffic:
    """Bytes of one forward and of one backward."""

    forward: int
    backward: int


def standard_traffic(entry: Entry | int, n_heads: int, n_kv_heads: int, head_dim: int, itemsize: int) -> Traffic:
    """Algorithms 0 and 3, which keep S and P in memory: all pairs, whatever the mask.

    Forward: S written and read, P written and read. Backward: P read for dV and again for dS, dP written and read, dS
    written, and read for dQ and for dK.
    """
    entry = _entry(entry)
    pairs = itemsize * n_heads * entry.len_q * entry.len_k
    queries, keys = _rows(entry, n_heads, n_kv_heads, head_dim, itemsize)
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
    """The kernels of ``flash_train.attention.kernels``.

    A program that holds a tile of queries reads every block of keys and values that any of its queries sees; one that
    holds a tile of keys reads Q, dO and two numbers per row likewise, for each head of its group. So the traffic is in
    proportion to the blocks visited: of a block-sparse mask, to its density.

    Args:
        entry: lengths of queries and keys (an int: of both).
        mask: None is ``Causal()``.
        density: part of the mask's blocks that a block map beside it leaves.
        forward_tile, dkdv_tile, dq_tile: (queries, keys) of the tiles.
    """
    entry, mask = _entry(entry), Causal() if mask is None else mask
    queries, keys = _rows(entry, n_heads, n_kv_heads, head_dim, itemsize)
    row = itemsize * head_dim
    statistics = STATISTIC * n_heads * entry.len_q

    def visits(tile: tuple[int, int]) -> int:
        """Blocks that hold a pair, over all query heads."""
        states = mask.blocks(entry, *tile, n_heads) != SKIPPED
        return round(density * int(states.sum())) * (n_heads // states.shape[0])

    forward = 2 * queries + statistics + visits(forward_tile) * forward_tile[1] * 2 * row
    rows = 2 * queries + 3 * statistics  # out and dout to delta
    dq = 3 * queries + 2 * statistics + visits(dq_tile) * dq_tile[1] * 2 * row
    dkdv = 4 * keys + visits(dkdv_tile) * dkdv_tile[0] * (2 * row + 2 * STATISTIC)
    return Traffic(forward, rows + dq + dkdv)


def _entry(entry: Entry | int) -> Entry:
    return Entry.of_lengths(entry, entry) if isinstance(entry, int) else entry


def _rows(entry: Entry, n_heads: int, n_kv_heads: int, head_dim: int, itemsize: int) -> tuple[int, int]:
    """Bytes of a tensor like q, and of one like k."""
    return itemsize * head_dim * n_heads * entry.len_q, itemsize * head_dim * n_kv_heads * entry.len_k
