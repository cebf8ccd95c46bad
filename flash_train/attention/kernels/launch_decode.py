"""Launching the decode kernels."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from flash_train.attention.dropout import RngState, draw_state
from flash_train.attention.kernels.arguments import (
    UNUSED,
    Call,
    Launch,
    constants,
    contiguous_columns,
    dropout_arguments,
    mask_rule,
    on_device,
    score_arguments,
    strided,
)
from flash_train.attention.kernels.decode import Cache, attention_decode, attention_decode_merge
from flash_train.attention.kernels.tiles import Tile, block_d, cdiv, decode_tile, processors
from flash_train.attention.spec import AttentionSpec


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    spec: AttentionSpec,
    *,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    num_splits: int = 0,
    rng: RngState | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of q over the first ``cache_seqlens`` positions of the caches.

    Args:
        q: (batch, len_q, heads, head_dim).
        k_cache, v_cache: (rows, capacity, kv_heads, head_dim), or with ``block_table`` (pages, page_size, kv_heads,
            head_dim).
        cache_seqlens: int32 (batch,), on the device.
        num_splits: parts of the keys; 0 fills the processors.

    Returns:
        out like q with v's head_dim; lse fp32 (batch, heads, len_q).
    """
    batch, len_q, n_heads, _ = q.shape
    out = torch.empty((batch, len_q, n_heads, v_cache.shape[-1]), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, n_heads, len_q), dtype=torch.float32, device=q.device)
    if out.shape[:3].numel() == 0:
        return out, lse
    q, k_cache, v_cache = map(contiguous_columns, (q, k_cache, v_cache))
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    state, origin = None, (0, 0, 0, 0)
    if spec.dropout > 0:
        state = draw_state(q.device) if rng is None else rng.as_tensor(q.device)
        origin = origin if rng is None else rng.origin
    sinks = None if sinks is None else sinks.contiguous()
    lowered = spec.mask.lower()
    blocks = spec.mask.block_map(len_q, capacity, True)
    bounds = [lowered.left, lowered.right, lowered.tail, *((UNUSED, UNUSED) if blocks is None else blocks[1:])]
    call = Call(
        None, None, state, alibi_slopes, sinks, None if blocks is None else blocks.states, lowered.tensors,
        lowered.terms, bounds, origin, spec.scale_for(q.shape[-1]), spec.softcap, spec.keep_threshold,
    )  # fmt: skip
    rows = len_q * n_heads // k_cache.shape[2]
    tile = decode_tile(q.device, q.dtype, max(q.shape[-1], v_cache.shape[-1]), rows)
    splits = num_splits or _splits(q.device, batch * k_cache.shape[2] * cdiv(rows, tile.block_m), capacity, tile)
    part = torch.empty((splits, batch, len_q, n_heads, v_cache.shape[-1]), dtype=torch.float32, device=q.device)
    part_lse = torch.empty(part.shape[:-1], dtype=torch.float32, device=q.device)
    keys, values = (_cache(x, cache_batch_idx, cache_leftpad, block_table) for x in (k_cache, v_cache))
    sizes = (v_cache.shape[-1], k_cache.shape[2])
    with on_device(q):
        decode_launch(q, keys, values, *sizes, part, part_lse, cache_seqlens, call, tile).run()
        merge_launch(part, part_lse, out, lse, sinks).run()
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
        strided(q), k, v, part, part_lse, seqlens, mask_rule(call), score_arguments(call), dropout_arguments(call),
        len_q, part.shape[0],
    )  # fmt: skip
    fixed = constants(head_dim, head_dim_v, group, tile, q.device)
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


def _cache(x: Tensor, batch_idx: Tensor | None, leftpad: Tensor | None, block_table: Tensor | None) -> Cache:
    batch, row, head = x.stride()[:3]
    if block_table is None:
        return Cache(x, batch, row, head, batch_idx, leftpad, None, None, None)
    return Cache(x, batch, row, head, batch_idx, leftpad, block_table, block_table.stride(0), x.shape[1])


def _splits(device: torch.device, programs: int, capacity: int, tile: Tile) -> int:
    """Parts that give each processor two programs, and each program four blocks of keys or more."""
    return max(1, min(2 * processors(device) // programs, cdiv(capacity, 4 * tile.block_n)))
