"""Grids: the work tiles of a launch, and how many heads form a group whose rows the cache holds."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_train.attention.kernels import gpu
from flash_train.attention.kernels.arguments import slots_of
from flash_train.attention.kernels.call import Call
from flash_train.attention.kernels.hopper.tiles import backward_tile
from flash_train.attention.kernels.launch_options import present_options
from flash_train.attention.kernels.tile_sizes import block_d, cdiv

CACHE_BYTES = 24 << 20  #: of the L2 cache, for the rows of one group of heads: about half of Hopper's


def head_groups(q: Tensor, k: Tensor, call: Call) -> tuple[int, int]:
    """Return the key heads of a group in the backward, and the index of the last group, as in ``scheduler``."""
    at_once = kv_heads_at_once(q, k, call, backward_tile(block_d(q.shape[-1]), call).block_n)
    return at_once, max(total_kv_heads(k, call) // at_once - 2, 0)


def total_kv_heads(k: Tensor, call: Call) -> int:
    """Return the number of key heads of all entries; entries of a packed call share their heads."""
    return k.shape[-2] * (k.shape[0] if call.cu_seqlens_k is None else 1)


def heads_at_once(q: Tensor, k: Tensor, call: Call, block: int) -> int:
    """Return how many query heads form a group. Its keys and values fit the cache (``scheduler.find_work_tile``)."""
    group = q.shape[-2] // k.shape[-2]
    work_tiles = group * _work_tiles_per_head(q, call.cu_seqlens_q, block)
    row = 2 * k.shape[-1] * k.dtype.itemsize
    return group * _heads_per_group(k, call.cu_seqlens_k, work_tiles, row * mean_seqlen(k, call.cu_seqlens_k))


def kv_heads_at_once(q: Tensor, k: Tensor, call: Call, block: int) -> int:
    """Return how many key heads form a group.

    The cache must hold, for each, the queries, output gradients and dQ accumulator of one of its query heads.
    """
    work_tiles = _work_tiles_per_head(k, call.cu_seqlens_k, block)
    row = q.shape[-1] * (2 * q.dtype.itemsize + 4)
    return _heads_per_group(k, call.cu_seqlens_k, work_tiles, row * mean_seqlen(q, call.cu_seqlens_q))


def _heads_per_group(k: Tensor, cu_seqlens: Tensor | None, work_tiles: int, size: int) -> int:
    """Return how many key heads, of ``work_tiles`` and ``size`` bytes each, give every processor one work tile.

    The cache limits the number. ``LaunchOptions.heads_per_group`` replaces it.
    """
    heads = k.shape[-2] * (k.shape[0] if cu_seqlens is None else 1)
    chosen = present_options().heads_per_group
    fitting = min(round(processors(k.device) / work_tiles), CACHE_BYTES // size) if chosen is None else chosen
    return max(1, min(heads, fitting))


def processors(device: torch.device) -> int:
    """Return the number of processors that grids are planned for."""
    return present_options().processors or gpu.processors(device)


def _work_tiles_per_head(x: Tensor, cu_seqlens: Tensor | None, block: int) -> int:
    """Return the work tiles of a head of one entry; in packed calls, of all entries."""
    return cdiv(x.shape[1], block) if cu_seqlens is None else slots_of(x, cu_seqlens, block)


def mean_seqlen(x: Tensor, cu_seqlens: Tensor | None) -> int:
    """Return the rows of an entry; in packed calls the mean, because only the device knows the lengths."""
    return x.shape[1] if cu_seqlens is None else cdiv(x.shape[0], cu_seqlens.numel() - 1)


def count_work_tiles(x: Tensor, cu_seqlens: Tensor | None, block: int) -> int:
    """Return the work tiles of a launch, as ``scheduler.count_work_tiles`` does."""
    return x.shape[-2] * slots_of(x, cu_seqlens, block)
