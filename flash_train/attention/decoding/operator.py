"""Attention to a cache as PyTorch operators: what a traced program calls, and the same run eagerly.

``append_to_cache`` writes in place and says so. ``cached_attention_flash`` runs the decode kernel, whose launches
depend on shapes alone, so that a CUDA graph can hold it. ``cached_attention_dense`` runs a backend in plain PyTorch row
by row; it reads the lengths on the host, so a CUDA graph leaves it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flash_train.attention.decoding.cache_rows import CacheRows, append, capacity_of, check_new, gather
from flash_train.attention.dense.sequences import statistics_dtype
from flash_train.attention.dropout import RngState
from flash_train.attention.functional import attention
from flash_train.attention.masks import Mask
from flash_train.attention.masks.parts import put_together, take_apart
from flash_train.attention.packing import Entry
from flash_train.attention.spec import AttentionSpec
from flash_train.attention.tracing import unreadable

# The kernels are imported inside the operators: the package imports, and the other backends run, without Triton.

Origin = tuple[int, int, int, int]


def write(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, rows: CacheRows) -> None:
    """``append`` for the rows of a call."""
    check_new(k_cache, v_cache, k, v, rows.lengths.shape[0])
    run: Any = append_to_cache if is_traced(k) else append
    run(k_cache, v_cache, k, v, rows.lengths, rows.batch_idx, rows.block_table)


def attend_by_kernel(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    rows: CacheRows,
    spec: AttentionSpec,
    state: Tensor | None,
    origin: Origin,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    num_splits: int,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp by the decode kernel."""
    lowered = spec.mask.lower()
    blocks = spec.mask.block_map(q.shape[1], capacity_of(k_cache, rows.block_table), True)
    states, sizes = (None, (-1, -1)) if blocks is None else (blocks.states, blocks[1:])
    run: Any = cached_attention_flash if is_traced(q) else _run_flash
    return run(
        q, k_cache, v_cache, rows.lengths, rows.batch_idx, rows.leftpad, rows.block_table, state, alibi_slopes, sinks,
        states, lowered.tensors, lowered.terms, [lowered.left, lowered.right, lowered.tail, *sizes], list(origin),
        float(spec.scale_for(q.shape[-1])), float(spec.softcap), spec.keep_threshold, num_splits,
    )  # fmt: skip


def attend_by_rows(
    backend: str,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    rows: CacheRows,
    spec: AttentionSpec,
    state: Tensor | None,
    origin: Origin,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp by a backend in plain PyTorch."""
    if not unreadable(q):
        return _by_rows(backend, q, k_cache, v_cache, rows, spec, state, origin, alibi_slopes, sinks)
    mask = take_apart(spec.mask)
    return cached_attention_dense(
        q, k_cache, v_cache, rows.lengths, rows.batch_idx, rows.leftpad, rows.block_table, state, alibi_slopes, sinks,
        mask.names, mask.integers, mask.tensors, list(origin), float(spec.scale_for(q.shape[-1])), float(spec.softcap),
        float(spec.dropout), backend,
    )  # fmt: skip


def is_traced(x: Tensor) -> bool:
    """Whether operators are looked at as they are called: by a compiler, by fake tensors or by a dispatch mode."""
    return unreadable(x) or torch._C._len_torch_dispatch_stack() > 0


def _run_flash(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    batch_idx: Tensor | None,
    leftpad: Tensor | None,
    block_table: Tensor | None,
    rng: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    block_map: Tensor | None,
    term_tensors: Sequence[Tensor],
    terms: str,
    bounds: Sequence[int],
    origin: Sequence[int],
    scale: float,
    softcap: float,
    keep_threshold: int,
    num_splits: int,
) -> tuple[Tensor, Tensor]:
    """Output and natural log-sum-exp; ``CacheRows`` names the integers of the rows, ``arguments.Call`` the rest."""
    from flash_train.attention.kernels.call import Call
    from flash_train.attention.kernels.portable.launch_decode import decode

    call = Call(
        None, None, rng, alibi_slopes, sinks, block_map, term_tensors, terms, bounds, origin, scale, softcap,
        keep_threshold,
    )  # fmt: skip
    return decode(q, k_cache, v_cache, CacheRows(lengths, batch_idx, leftpad, block_table), call, num_splits)


def _run_dense(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    batch_idx: Tensor | None,
    leftpad: Tensor | None,
    block_table: Tensor | None,
    rng: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    mask_names: str,
    mask_integers: Sequence[int],
    mask_tensors: Sequence[Tensor],
    origin: Sequence[int],
    scale: float,
    softcap: float,
    dropout: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Output and natural log-sum-exp; ``masks.parts`` names the parts of the mask."""
    spec = AttentionSpec(put_together(mask_names, mask_integers, mask_tensors), scale, softcap, dropout)
    rows = CacheRows(lengths, batch_idx, leftpad, block_table)
    entry, head, query, key = origin
    return _by_rows(
        backend, q, k_cache, v_cache, rows, spec, rng, (entry, head, query, key), alibi_slopes, sinks
    )  # fmt: skip


append_to_cache = torch.library.custom_op("flash_train::append_to_cache", append, mutates_args=("k_cache", "v_cache"))
cached_attention_flash = torch.library.custom_op("flash_train::cached_attention_flash", _run_flash, mutates_args=())
cached_attention_dense = torch.library.custom_op(
    "flash_train::cached_attention_dense", _run_dense, mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)


@append_to_cache.register_fake
def _append_shapes(*_: Any) -> None:
    pass


@cached_attention_flash.register_fake
def _flash_shapes(q: Tensor, k_cache: Tensor, v_cache: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    rows = (q.shape[0], q.shape[2], q.shape[1])
    return q.new_empty((*q.shape[:-1], v_cache.shape[-1])), q.new_empty(rows, dtype=torch.float32)


@cached_attention_dense.register_fake
def _dense_shapes(q: Tensor, k_cache: Tensor, v_cache: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    rows = (q.shape[0], q.shape[2], q.shape[1])
    return q.new_empty((*q.shape[:-1], v_cache.shape[-1])), q.new_empty(rows, dtype=statistics_dtype(q))


@dataclass(frozen=True, eq=False)
class _RowMask(Mask):
    """A mask as one row of a batch sees it, for a call on that row alone."""

    mask: Mask
    entry: Entry

    def attends(self, entry: Entry, q: Tensor, k: Tensor, n_heads: int) -> Tensor:
        return self.mask.attends(self.entry, q, k, n_heads)


def _by_rows(
    backend: str,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    rows: CacheRows,
    spec: AttentionSpec,
    state: Tensor | None,
    origin: Origin,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """One call of ``attention`` for each row; reads the lengths on the host."""
    ends = rows.lengths.masked_fill(rows.padding(k_cache), 0).tolist()
    begins = [0] * len(ends) if rows.leftpad is None else rows.leftpad.tolist()
    begins = [min(max(begin, 0), end) for begin, end in zip(begins, ends, strict=True)]
    keys, values = (
        gather(cache, rows.lengths, max(ends, default=0), rows.batch_idx, rows.block_table)
        for cache in (k_cache, v_cache)
    )
    rng = None if state is None else RngState(state[0], state[1], *origin)
    out = q.new_empty((*q.shape[:-1], v_cache.shape[-1]))
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=statistics_dtype(q))
    for row, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        entry = Entry(row, row, 0, begin, q.shape[1], end - begin)
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            out[row, None], lse[row, None] = attention(
                q[row, None],
                keys[row, None, begin:end],
                values[row, None, begin:end],
                replace(spec, mask=_RowMask(spec.mask, entry)),
                rng=None if rng is None else replace(rng, entry=rng.entry + row),
                alibi_slopes=alibi_slopes if alibi_slopes is None or alibi_slopes.dim() == 1 else alibi_slopes[row],
                sinks=sinks,
                backend=backend,
                return_lse=True,
            )
    return out, lse
