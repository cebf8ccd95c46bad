"""Grids: the work tiles of a launch, and how many heads run together so that the cache holds their rows."""

from __future__ import annotations

from torch import Tensor

from flash_train.attention.kernels.call import Call
from flash_train.attention.kernels.hopper.tiles import backward_tile
from flash_train.attention.kernels.portable.launch import slots_of
from flash_train.attention.kernels.portable.tiles import block_d, cdiv, processors

CACHE_BYTES = 24 << 20  #: of the rows that all programs read at a time: half of the second-level cache


def head_groups(q: Tensor, k: Tensor, call: Call) -> tuple[int, int]:
    """Return how many key heads the backward takes at once, and the number of their last group.

    The same numbers as in ``scheduler.shifted_work_tile``.
    """
    at_once = kv_heads_at_once(q, k, call, backward_tile(block_d(q.shape[-1]), call).block_n)
    return at_once, max(all_kv_heads(k, call) // at_once - 2, 0)


def all_kv_heads(k: Tensor, call: Call) -> int:
    """Return the number of key heads of all entries."""
    return k.shape[-2] * (k.shape[0] if call.cu_seqlens_k is None else 1)


def heads_at_once(q: Tensor, k: Tensor, call: Call, block: int) -> int:
    """Return how many query heads run together, so that their keys and values fit in the cache."""
    group = q.shape[-2] // k.shape[-2]
    work_tiles = group * _work_tiles_of_head(q, call.cu_seqlens_q, block)
    row = 2 * k.shape[-1] * k.dtype.itemsize
    return group * _at_once(k, call.cu_seqlens_k, work_tiles, row * mean_rows(k, call.cu_seqlens_k))


def kv_heads_at_once(q: Tensor, k: Tensor, call: Call, block: int) -> int:
    """Return how many key heads run together, so that queries, dO and dQ accumulators fit in the cache."""
    work_tiles = _work_tiles_of_head(k, call.cu_seqlens_k, block)
    row = q.shape[-1] * (2 * q.dtype.itemsize + 4)
    return _at_once(k, call.cu_seqlens_k, work_tiles, row * mean_rows(q, call.cu_seqlens_q))


def _at_once(k: Tensor, cu_seqlens: Tensor | None, work_tiles: int, size: int) -> int:
    """Return how many key heads give each SM a work tile and fit in the cache.

    A head has ``work_tiles`` work tiles and ``size`` bytes.
    """
    heads = k.shape[-2] * (k.shape[0] if cu_seqlens is None else 1)
    return max(1, min(heads, round(processors(k.device) / work_tiles), CACHE_BYTES // size))


def _work_tiles_of_head(x: Tensor, cu_seqlens: Tensor | None, block: int) -> int:
    """Return the work tiles of a head in one entry; packed, in all entries."""
    return cdiv(x.shape[1], block) if cu_seqlens is None else slots_of(x, cu_seqlens, block)


def mean_rows(x: Tensor, cu_seqlens: Tensor | None) -> int:
    """Return the rows of an entry; packed, their mean, because only the device knows the lengths."""
    return x.shape[1] if cu_seqlens is None else cdiv(x.shape[0], cu_seqlens.numel() - 1)


def count_work_tiles(x: Tensor, cu_seqlens: Tensor | None, block: int) -> int:
    """Return the number of work tiles, as ``scheduler.count_work_tiles`` does."""
    return x.shape[-2] * slots_of(x, cu_seqlens, block)
