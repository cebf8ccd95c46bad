"""The kernels' arguments, made from a call."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flash_train.attention.index_tensors import contiguous_tensor
from flash_train.attention.kernels.call import UNUSED, Call
from flash_train.attention.kernels.device import mask as device_mask
from flash_train.attention.kernels.device.mask import MaskRule
from flash_train.attention.kernels.device.philox import Dropout
from flash_train.attention.kernels.device.score import Score
from flash_train.attention.kernels.device.tile import Rows, Strided
from flash_train.attention.kernels.tile_sizes import Tile, cdiv
from flash_train.attention.masks import device_term

LOG2_E = math.log2(math.e)


def contiguous_columns(x: Tensor) -> Tensor:
    """Return x, copied if its last stride is not 1. The kernels take any other strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


def addressable(x: Tensor) -> Tensor:
    """Return x with contiguous columns and a row stride below 2**23 elements; copy it if needed.

    ``row_pointers`` computes offsets inside a tile, of up to 256 rows, in 32 bits.
    """
    return contiguous_columns(x if x.stride(-3) < 2**23 else x.contiguous())


def strided(x: Tensor | None) -> Strided:
    if x is None:
        return Strided(None, None, None, None)
    return Strided(x, *x.stride()[:3]) if x.dim() == 4 else Strided(x, 0, *x.stride()[:2])


def stats(x: Tensor) -> Rows:
    return Rows(x, *x.stride()[:2]) if x.dim() == 3 else Rows(x, 0, x.stride(0))


def mask_rule(call: Call, tile: Tile | None = None, walks_keys: bool = True) -> MaskRule:
    """Return the mask for a kernel. Without ``tile`` the kernel cannot follow lists, and a block map becomes a term."""
    left, right, tail, *_ = (None if bound == UNUSED else bound for bound in call.bounds)
    tensors = iter(call.term_tensors)
    terms = [device_term(name, tensors) for name in call.terms.split(",") if name]
    if call.has_lists and tile is not None:
        return MaskRule(left, right, tuple(terms), tail, *_lists(call, tile, walks_keys))
    if call.block_map is not None:
        blocks = call.block_map.contiguous()
        strides = [blocks.stride(i) if blocks.shape[i] > 1 else 0 for i in (0, 1)]
        sizes = (*blocks.shape[2:], *call.bounds.block)
        terms.append((device_mask.block_sparse, (blocks, *strides, *sizes)))
        tail = None
    return MaskRule(left, right, tuple(terms), tail)


def _lists(call: Call, tile: Tile, walks_keys: bool) -> tuple[Any, ...]:
    """Return the fields of ``MaskRule`` from ``tiles`` on, with empty lists that ``tile_lists.lists_launch`` fills.

    There is one list for each row of blocks or, if the kernel loops over queries, for each column.
    """
    block_q, block_k = call.bounds.block
    block_map = call.block_map
    assert block_map is not None  # `Call.has_lists`
    entries, heads, rows, columns = block_map.shape
    if walks_keys:
        row_size, capacity = block_q, columns * (block_k // tile.block_n)
    else:
        row_size, rows, capacity = block_k, columns, rows * (block_q // tile.block_m)
    tiles = block_map.new_empty((entries, heads, rows, capacity), dtype=torch.int32)
    counts = block_map.new_empty((entries, heads, rows), dtype=torch.int32)
    strides = (heads * rows if entries > 1 else 0, rows if heads > 1 else 0)
    return tiles, counts, *strides, rows, row_size, capacity


def score_arguments(call: Call) -> Score:
    slopes = contiguous_tensor(call.alibi_slopes)
    stride = slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0
    plain = not call.softcap and slopes is None
    return Score(call.scale, LOG2_E * (call.scale if plain else 1), call.softcap or None, slopes, stride)


def dropout_arguments(call: Call, walked: int | None = None) -> Dropout:
    """Return dropout for a kernel whose steps have ``walked`` keys (or queries, if it loops over queries).

    A tile draws whole Philox calls if it is aligned with them, except if steps have 16 keys and the mask has terms.
    There Triton has a bug: if a term loads bytes, it chooses the wrong layout for the weights as an operand of the
    product, and counts some of them twice and others not at all. So such a tile draws each element by itself.
    """
    if call.rng is None:
        return Dropout(None, None, None, None, None, None, None)
    entry, head, query, key = call.origin
    whole = call.draws_aligned and not (call.has_terms and walked == 16)
    return Dropout(call.rng, call.keep_threshold, entry, head, query, key, None if whole else 1, call.origins)


def slots_of(x: Tensor, cu_seqlens: Tensor | None, block: int) -> int:
    """Return the number of programs along the rows of x: see ``device.schedule.find_tile``."""
    if cu_seqlens is None:
        return x.shape[0] * cdiv(x.shape[1], block)
    return x.shape[0] // block + cu_seqlens.numel()


def lengths_of(q: Tensor, k: Tensor, call: Call) -> tuple[int, int, int]:
    """Return (entries, query rows, key rows); in packed calls, the rows of the whole tensors."""
    if call.cu_seqlens_q is None:
        return q.shape[0], q.shape[1], k.shape[1]
    return call.cu_seqlens_q.numel() - 1, q.shape[0], k.shape[0]
