"""Attention to a cache, as PyTorch operators for traced programs and as direct calls for eager ones.

``append_to_cache`` declares that it writes in place. ``cached_attention_flash`` runs the decode kernel, whose launches
depend on shapes alone, so that a CUDA graph can hold it. ``cached_attention_dense`` runs a backend in plain PyTorch row
by row; it reads the lengths on the host, so a CUDA graph leaves it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_train.attention.decoding.cache_rows import CacheRows, append, capacity_of, check_new, gather
from flash_train.attention.dense.sequences import statistics_dtype
from flash_train.attention.dropout import RngState
from flash_train.attention.functional import attention
from flash_train.attention.kernels.call import Call, call_of, schema_of
from flash_train.attention.masks import Mask
from flash_train.attention.masks.parts import mask_from_parts, mask_to_parts
from flash_train.attention.packing import Entry
from flash_train.attention.spec import AttentionSpec
from flash_train.attention.tracing import has_no_values

# The kernels are imported inside the operators: the package imports, and the other backends run, without Triton.

Origin = tuple[int, int, int, int]


def write(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, rows: CacheRows) -> None:
    """Append new keys and values to the rows of a call."""
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
    """Compute the output and log-sum-exp with the decode kernel."""
    call = call_of(
        spec, q.shape[-1], q.shape[1], capacity_of(k_cache, rows.block_table), (None, None), state, origin,
        alibi_slopes, sinks, packed=True,
    )  # fmt: skip
    if not is_traced(q):
        return _run_flash(q, k_cache, v_cache, rows, call, num_splits)
    return cached_attention_flash(q, k_cache, v_cache, *rows.tensors, *call.arguments[2:], num_splits)


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
    """Compute the output and log-sum-exp with a backend in plain PyTorch."""
    if not has_no_values(q):
        return _by_rows(backend, q, k_cache, v_cache, rows, spec, state, origin, alibi_slopes, sinks)
    parts = mask_to_parts(spec.mask)
    call = _DenseCall(
        state, alibi_slopes, sinks, parts.names, parts.integers, parts.tensors, list(origin),
        float(spec.scale_for(q.shape[-1])), float(spec.softcap), float(spec.dropout), backend,
    )  # fmt: skip
    return cached_attention_dense(q, k_cache, v_cache, *rows.tensors, *call)


def is_traced(x: Tensor) -> bool:
    """Whether a compiler, fake tensors or a dispatch mode observe the operators that are called."""
    return has_no_values(x) or torch._C._len_torch_dispatch_stack() > 0


def _run_flash(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: CacheRows, call: Call, num_splits: int
) -> tuple[Tensor, Tensor]:
    from flash_train.attention.kernels.portable.launch_decode import decode

    return decode(q, k_cache, v_cache, rows, call, num_splits)


def _flash_operator(q: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    rows, call = CacheRows(*rest[:N_ROWS]), Call.from_arguments((None, None, *rest[N_ROWS:-1]))
    return _run_flash(q, k_cache, v_cache, rows, call, rest[-1])


class _DenseCall(NamedTuple):
    """The parameters of ``cached_attention_dense`` after the rows; the mask in the form of ``masks.parts``."""

    rng: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    mask_names: str
    mask_integers: Sequence[int]
    mask_tensors: Sequence[Tensor]
    origin: Sequence[int]
    scale: float
    softcap: float
    dropout: float
    backend: str


def _dense_operator(q: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    rows, call = CacheRows(*rest[:N_ROWS]), _DenseCall(*rest[N_ROWS:])
    mask = mask_from_parts(call.mask_names, call.mask_integers, call.mask_tensors)
    spec = AttentionSpec(mask, call.scale, call.softcap, call.dropout)
    entry, head, query, key = call.origin
    origin = entry, head, query, key
    return _by_rows(
        call.backend, q, k_cache, v_cache, rows, spec, call.rng, origin, call.alibi_slopes, call.sinks
    )  # fmt: skip


N_ROWS = len(fields(CacheRows))
_INPUTS = f"Tensor q, Tensor k_cache, Tensor v_cache, {schema_of(CacheRows)}"

append_to_cache = torch.library.custom_op("flash_train::append_to_cache", append, mutates_args=("k_cache", "v_cache"))
cached_attention_flash = torch.library.custom_op(
    "flash_train::cached_attention_flash",
    _flash_operator,
    mutates_args=(),
    schema=f"({_INPUTS}, {schema_of(Call, 'cu_seqlens_q', 'cu_seqlens_k')}, SymInt num_splits) -> (Tensor, Tensor)",
)
cached_attention_dense = torch.library.custom_op(
    "flash_train::cached_attention_dense",
    _dense_operator,
    mutates_args=(),
    schema=f"({_INPUTS}, {schema_of(_DenseCall)}) -> (Tensor, Tensor)",
    tags=(torch.Tag.cudagraph_unsafe,),
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
    """The mask of one row of a batch, for a call on that row alone."""

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
    """Call ``attention`` for each row; read the lengths on the host."""
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
