"""Patterns for ``BlockSparse``: bool (query blocks, key blocks), True if the query block attends to the key block.

The builders assume that a block has as many queries as keys. Patterns are aligned at their ends, like masks: query
block ``i`` is at the position of key block ``i + n_k - n_q``. No pattern is causal; use
``Causal() & BlockSparse(pattern)``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_train.attention.checks import integer
from flash_train.checks import check, within


def local_global(n_q: int, n_k: int, window: int, n_global: int, device: torch.device | str | None = None) -> Tensor:
    """Build a band and global blocks, as in Longformer (Beltagy et al., 2020, arXiv:2004.05150), section 3.1.

    Args:
        n_q, n_k: number of query blocks and of key blocks.
        window: blocks before and after a query's own block; 0 keeps the diagonal only.
        n_global: number of global blocks at the beginning: every query attends to the first ``n_global`` key blocks,
            and the first ``n_global`` query blocks attend to every key.

    Raises:
        ValueError: negative counts, or no blocks.
    """
    _at_least(1, n_q=n_q, n_k=n_k)
    _at_least(0, window=window, n_global=n_global)
    q, k = _positions(n_q, n_k, device)
    own_k = torch.arange(n_k, device=device)
    first_q = torch.arange(n_q, device=device)
    return ((q - k).abs() <= window) | (own_k[None, :] < n_global) | (first_q[:, None] < n_global)


def strided(n_q: int, n_k: int, stride: int, window: int, device: torch.device | str | None = None) -> Tensor:
    """Build a band and every ``stride``-th block, counted from the query's own block.

    Source: sparse transformers (Child et al., 2019, arXiv:1904.10509), section 4.3.

    Args:
        n_q, n_k: number of query blocks and of key blocks.
        stride: distance between attended blocks, in blocks.
        window: blocks before and after a query's own block; 0 keeps the diagonal only.

    Raises:
        ValueError: a stride below 1, a negative window, or no blocks.
    """
    _at_least(1, n_q=n_q, n_k=n_k, stride=stride)
    _at_least(0, window=window)
    q, k = _positions(n_q, n_k, device)
    return ((q - k).abs() <= window) | ((q - k) % stride == 0)


def butterfly(n_q: int, n_k: int, device: torch.device | str | None = None) -> Tensor:
    """Build the flat block butterfly: the diagonal, and the blocks whose number differs from the query's in one bit.

    It is the sum of the factors of a butterfly matrix, instead of their product. If n is a power of two, each row has
    1 + log2(n) blocks; other shapes take the last rows and columns of the pattern for the next power of two.
    Source: Pixelated Butterfly (Dao et al., 2021, arXiv:2112.00029), the pattern of block-sparse FlashAttention.

    Args:
        n_q, n_k: number of query blocks and of key blocks.

    Raises:
        ValueError: no blocks.
    """
    _at_least(1, n_q=n_q, n_k=n_k)
    q, k = _positions(n_q, n_k, device)
    # counting from the end keeps the ends aligned; the pattern is the same in reverse
    last = max(n_q, n_k) - 1
    bits = (last - q) ^ (last - k)
    return bits & (bits - 1) == 0


def random(
    n_q: int,
    n_k: int,
    per_row: int,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Draw ``per_row`` different blocks of keys for each block of queries, uniformly.

    Args:
        n_q, n_k: number of query blocks and of key blocks.
        per_row: number of key blocks per query block, 0 to n_k.
        generator: None uses PyTorch's generator of the device.

    Raises:
        ValueError: ``per_row`` above n_k, or no blocks.
    """
    _at_least(1, n_q=n_q, n_k=n_k)
    _at_least(0, per_row=per_row)
    check("per_row", per_row, within(0, n_k))
    chosen = torch.rand(n_q, n_k, generator=generator, device=device).topk(per_row, -1).indices
    return torch.zeros(n_q, n_k, dtype=torch.bool, device=device).scatter_(-1, chosen, True)


def _positions(n_q: int, n_k: int, device: torch.device | str | None) -> tuple[Tensor, Tensor]:
    """Return the positions of the blocks from 0, aligned at their ends: int64 (n_q, 1) and (1, n_k)."""
    n = max(n_q, n_k)
    q, k = torch.arange(n - n_q, n, device=device), torch.arange(n - n_k, n, device=device)
    return q[:, None], k[None, :]


def _at_least(smallest: int, **values: int) -> None:
    for name, value in values.items():
        number = integer(value)
        if number is None or number < smallest:
            raise ValueError(f"{name}={value!r}: must be an integer of at least {smallest}")
