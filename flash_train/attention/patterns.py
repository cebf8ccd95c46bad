"""Patterns of blocks for ``BlockSparse``: bool (query blocks, key blocks), True where a block is attended.

Every builder counts in blocks that are square in positions. Query block ``i`` stands at key block ``i + n_k - n_q``:
patterns, like masks, are aligned at their ends. None of them is causal; ``Causal() & BlockSparse(pattern)`` is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_train.attention.checks import integer


def local_global(n_q: int, n_k: int, window: int, n_global: int, device: torch.device | str | None = None) -> Tensor:
    """A band, and global blocks that see and are seen by all: Longformer (Beltagy et al., 2020, arXiv:2004.05150).

    Args:
        n_q, n_k: blocks of queries and of keys.
        window: blocks on either side of a query's own; 0 leaves the diagonal.
        n_global: the first so many blocks of keys, which every query sees, and of queries, which see every key.

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
    """A band and every ``stride``-th block from the query's own: sparse transformers (Child et al., 2019,
    arXiv:1904.10509).

    Args:
        n_q, n_k: blocks of queries and of keys.
        stride: blocks from one attended block to the next.
        window: blocks on either side of a query's own; 0 leaves the diagonal.

    Raises:
        ValueError: a stride below 1, a negative window, or no blocks.
    """
    _at_least(1, n_q=n_q, n_k=n_k, stride=stride)
    _at_least(0, window=window)
    q, k = _positions(n_q, n_k, device)
    return ((q - k).abs() <= window) | ((q - k) % stride == 0)


def butterfly(n_q: int, n_k: int, device: torch.device | str | None = None) -> Tensor:
    """The flat block butterfly: the diagonal, and the blocks whose number differs from the query's in one bit.

    It is the sum of the factors of a butterfly matrix in place of their product, with 1 + log2(n) blocks per row where
    n is a power of two; other shapes are cut from the end of the next one. Source: Pixelated Butterfly (Dao et al.,
    2021, arXiv:2112.00029), the pattern of block-sparse FlashAttention.

    Args:
        n_q, n_k: blocks of queries and of keys.

    Raises:
        ValueError: no blocks.
    """
    _at_least(1, n_q=n_q, n_k=n_k)
    q, k = _positions(n_q, n_k, device)
    # counted from the end of the power of two, so that ends stay aligned; the pattern is symmetric under the reversal
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
    """``per_row`` different blocks of keys for each block of queries, drawn evenly.

    Args:
        n_q, n_k: blocks of queries and of keys.
        per_row: 0 to n_k.
        generator: PyTorch's generator of the device where not given.

    Raises:
        ValueError: more per row than there are, or no blocks.
    """
    _at_least(1, n_q=n_q, n_k=n_k)
    _at_least(0, per_row=per_row)
    if per_row > n_k:
        raise ValueError(f"per_row={per_row}: there are {n_k} blocks of keys")
    chosen = torch.rand(n_q, n_k, generator=generator, device=device).topk(per_row, -1).indices
    return torch.zeros(n_q, n_k, dtype=torch.bool, device=device).scatter_(-1, chosen, True)


def _positions(n_q: int, n_k: int, device: torch.device | str | None) -> tuple[Tensor, Tensor]:
    """Places of the blocks on one line with a common end, int64 (n_q, 1) and (1, n_k), from 0."""
    n = max(n_q, n_k)
    q, k = torch.arange(n - n_q, n, device=device), torch.arange(n - n_k, n, device=device)
    return q[:, None], k[None, :]


def _at_least(smallest: int, **values: int) -> None:
    for name, value in values.items():
        number = integer(value)
        if number is None or number < smallest:
            raise ValueError(f"{name}={value!r}: must be an integer of at least {smallest}")
