"""Launch the decode kernels."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from flash_train.attention.decoding.cache_rows import CacheRows, capacity_of
from flash_train.attention.index_tensors import contiguous_tensor
from flash_train.attention.kernels.arguments import (
    contiguous_columns,
    dropout_arguments,
    mask_rule,
    score_arguments,
    strided,
)
from flash_train.attention.kernels.call import Call
from flash_train.attention.kernels.gpu import processors
from flash_train.attention.kernels.launch import Launch, on_device
from flash_train.attention.kernels.portable.decode import Cache, attention_decode, attention_decode_merge
from flash_train.attention.kernels.portable.tiles import constants, decode_tile
from flash_train.attention.kernels.tile_sizes import Tile, block_d, cdiv


def decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: CacheRows, call: Call, num_splits: int = 0
) -> tuple[Tensor, Tensor]:
    """Compute the attention of q to a cache of keys and values.

    Args:
        q: (batch, len_q, heads, head_dim).
        k_cache, v_cache: (rows, capacity, kv_heads, head_dim), or with a block table (pages, page_size, kv_heads,
            head_dim).
        rows: which rows or pages of the cache each sequence uses, and its lengths; tensors on the device.
        num_splits: number of parts into which the keys are split; 0: as many as keep the processors busy.

    Returns:
        out like q with v's head_dim; lse fp32 (batch, heads, len_q).
    """
    batch, len_q, n_heads, _ = q.shape
    out = torch.empty((batch, len_q, n_heads, v_cache.shape[-1]), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, n_heads, len_q), dtype=torch.float32, device=q.device)
    if out.shape[:3].numel() == 0:
        return out, lse
    q, k_cache, v_cache = map(contiguous_columns, (q, k_cache, v_cache))
    call = call.contiguous()
    n_rows = len_q * n_heads // k_cache.shape[2]
    tile = decode_tile(q.device, q.dtype, max(q.shape[-1], v_cache.shape[-1]), n_rows)
    programs = batch * k_cache.shape[2] * cdiv(n_rows, tile.block_m)
    splits = num_splits or _splits(q.device, programs, capacity_of(k_cache, rows.block_table), tile)
    part = torch.empty((splits, batch, len_q, n_heads, v_cache.shape[-1]), dtype=torch.float32, device=q.device)
    part_lse = torch.empty(part.shape[:-1], dtype=torch.float32, device=q.device)
    keys, values = (cache_argument(x, rows) for x in (k_cache, v_cache))
    sizes = (v_cache.shape[-1], k_cache.shape[2])
    with on_device(q):
        decode_launch(q, keys, values, *sizes, part, part_lse, rows.lengths, call, tile).run()
        merge_launch(part, part_lse, out, lse, call.sinks).run()
    return out, lse


def decode_launch(
    q: Tensor,
    k: Cache,
    v: Cache,
    head_dim_v: int,
    n_kv_heads: int,
    part: Tensor,
    part_lse: Tensor,
    seqlens: Tensor,
    call: Call,
    tile: Tile,
) -> Launch:
    batch, len_q, n_heads, head_dim = q.shape
    group = n_heads // n_kv_heads
    grid = (part.shape[0] * cdiv(len_q * group, tile.block_m) * batch, n_kv_heads)
    arguments = (
        strided(q), k, v, part, part_lse, contiguous_tensor(seqlens), mask_rule(call), score_arguments(call),
        dropout_arguments(call), len_q, part.shape[0],
    )  # fmt: skip
    fixed = constants(q, head_dim_v, group, tile)
    return Launch(attention_decode, grid, arguments, fixed)


def merge_launch(part: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> Launch:
    splits, batch, len_q, n_heads, head_dim_v = part.shape
    n_rows = batch * len_q * n_heads
    fixed = {
        "HEAD_DIM_V": head_dim_v,
        "BLOCK_DV": block_d(head_dim_v),
        "BLOCK_S": triton.next_power_of_2(splits),
        "num_warps": 1,
    }
    arguments = (part, part_lse, sinks, out, lse, n_rows, splits, n_heads, len_q)
    return Launch(attention_decode_merge, (n_rows,), arguments, fixed)


def cache_argument(x: Tensor, rows: CacheRows) -> Cache:
    """Return a cache and its rows for the kernel, with contiguous index tensors."""
    batch, row, head = x.stride()[:3]
    batch_idx, leftpad, pages = (
        contiguous_tensor(rows.batch_idx),
        contiguous_tensor(rows.leftpad),
        contiguous_tensor(rows.block_table),
    )
    if pages is None:
        return Cache(x, batch, row, head, batch_idx, leftpad, None, None, None)
    return Cache(x, batch, row, head, batch_idx, leftpad, pages, pages.stride(0), x.shape[1])


def _splits(device: torch.device, programs: int, capacity: int, tile: Tile) -> int:
    """Return the number of splits: up to two programs for each processor, with at least four blocks of keys each."""
    return max(1, min(2 * processors(device) // programs, cdiv(capacity, 4 * tile.block_n)))
