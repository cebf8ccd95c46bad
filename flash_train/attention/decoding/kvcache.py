"""Attention to a cache of keys and values that grows in place: decoding, chunked prefill, speculative decoding.

Where keys lie and which rows are padding is in ``cache_rows``. Nothing synchronises with the device but the backends in
plain PyTorch, and a decode loop compiles as one graph (``decoding``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_train.attention.backends import OWN, resolve_backend
from flash_train.attention.decoding.cache_rows import CacheRows, capacity_of
from flash_train.attention.decoding.operator import attend_by_kernel, attend_by_rows, write
from flash_train.attention.dropout import RngState, draw_state
from flash_train.attention.functional import require_values, validate_settings
from flash_train.attention.index_tensors import IntegerData
from flash_train.attention.spec import AttentionSpec
from flash_train.attention.transforms import refuse_decoding, transforming

FULL = AttentionSpec()


def cached_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: IntegerData | int | None = None,
    spec: AttentionSpec = FULL,
    *,
    k: Tensor | None = None,
    v: Tensor | None = None,
    cache_batch_idx: IntegerData | None = None,
    cache_leftpad: IntegerData | None = None,
    block_table: IntegerData | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    num_splits: int = 0,
    backend: str = "auto",
    rng: RngState | None = None,
) -> tuple[Tensor, Tensor]:
    """Write new keys and values into the cache, in place, and attend to all of it, for any mask of the spec.

    The keys of a batch row are the cache's positions from its ``cache_leftpad`` to its ``cache_seqlens``, and the new
    ones behind them. The mask, ALiBi and dropout count them from 0 and align queries with the last of them. Tensors of
    a mask that hold a value per key (``Document``'s ``k_ids``) hold one per position of the cache. No gradients.

    Index tensors may be strided views, int64, or integers in lists; kernels get int32 copies where they need them.

    Under ``torch.compile`` each backend is one operator of the graph. A CUDA graph (``mode="reduce-overhead"``) holds
    the decode kernel where the caches have addresses that stay: buffers of a module, or
    ``torch._dynamo.mark_static_address``.

    Args:
        q: (batch, seqlen_q, heads, head_dim).
        k_cache: (batch_size_cache, capacity, kv_heads, head_dim), paged (num_blocks, page_size, kv_heads, head_dim).
        v_cache: as k_cache; its head_dim may differ, and is the output's.
        cache_seqlens: where the keys of each row end, before new ones: int32 (batch,), an int for all rows, or None for
            the capacity. A negative one makes its row padding: output 0, nothing written, its other indices not read.
        spec: mask, scale, softcap and dropout. ``Tree(parents)`` takes the last queries and keys as nodes, and what
            comes before as a prefix that they all see.
        k, v: new keys and values, (batch, seqlen_new, kv_heads, head_dim); see ``append``.
        cache_batch_idx: int32 (batch,): the cache row of each batch row; not with ``block_table``.
        cache_leftpad: int32 (batch,): where the keys of each row begin; 0 without it.
        block_table: int32 (batch, blocks per sequence); what it holds past a row's end is not looked at. A row whose
            last key, new ones counted, lies in a negative page is padding, too.
        alibi_slopes: (heads,) or (batch, heads).
        sinks: (heads,): a logit per head without a value.
        num_splits: into how many parts the decode kernel divides the keys; 0 lets it choose. The result does not
            depend on it but for rounding.
        backend: ``flash`` or ``triton`` (the decode kernel), ``reference``, ``standard`` or ``chunked`` (row by row,
            reads ``cache_seqlens`` on the host), or ``auto``: the decode kernel where it runs, else reference.
        rng: dropout state; without it, one is drawn from PyTorch's generator of the device.

    Returns:
        out (batch, seqlen_q, heads, v's head_dim), exactly 0 for queries that see no key, and the natural log-sum-exp
        (batch, heads, seqlen_q), there -inf, or the sink.

    Raises:
        ValueError, TypeError: tensors that do not fit together, or require a gradient; a backend that cannot run. The
            cache is then as it was.
        RuntimeError: the decode kernel under a transform of ``torch.func`` or forward-mode AD.

    Source: flash-decoding (Dao, Haziza, Massa, Sizov, 2023) for the kernel's splits.
    """
    require_values(q)
    rows = CacheRows.of_call(q, k_cache, v_cache, cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
    validate_settings(q, capacity_of(k_cache, rows.block_table), q.shape[0], spec, rng, alibi_slopes, sinks)
    _forbid_gradients(q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, alibi_slopes=alibi_slopes, sinks=sinks)
    if not isinstance(num_splits, int) or num_splits < 0:
        raise ValueError(f"num_splits={num_splits!r}: must be a number of parts, or 0 for as many as suit")
    if (k is None) != (v is None):
        raise ValueError(f"{'v' if k is None else 'k'} was given without the other: new keys and values come together")
    if k is not None and cache_seqlens is None:
        raise ValueError("k and v were given without cache_seqlens, which says where they go: an int or int32 (batch,)")
    name = _resolve(backend, q, v_cache, spec, sinks)
    if name in OWN and transforming():
        refuse_decoding()
    if k is not None and v is not None:
        write(k_cache, v_cache, k, v, rows)
        rows = rows.grown(k.shape[1])
    state, origin = None, (0, 0, 0, 0)
    if spec.dropout > 0:
        state = draw_state(q.device) if rng is None else rng.as_tensor(q.device)
        origin = origin if rng is None else rng.origin
    if name in OWN:
        return attend_by_kernel(q, k_cache, v_cache, rows, spec, state, origin, alibi_slopes, sinks, num_splits)
    return attend_by_rows(name, q, k_cache, v_cache, rows, spec, state, origin, alibi_slopes, sinks)


def _forbid_gradients(**tensors: Tensor | None) -> None:
    """Raise ValueError where one of the tensors wants a gradient: a cache that is written in place can give none."""
    for name, x in tensors.items():
        if x is not None and x.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name} requires a gradient, and attention to a cache has none: call it under torch.no_grad(), or "
                "use attention(...) on keys and values that are no cache"
            )


def _resolve(backend: str, q: Tensor, v_cache: Tensor, spec: AttentionSpec, sinks: Tensor | None) -> str:
    if backend in ("sdpa", "hopper"):
        whose = "PyTorch's fused attention has" if backend == "sdpa" else "Hopper's kernels have"
        raise ValueError(
            f"backend={backend!r}: {whose} no cache; use auto, flash, triton, reference, standard or chunked"
        )
    head_dim = max(q.shape[-1], v_cache.shape[-1])
    name, _ = resolve_backend(
        backend, device=q.device, dtype=q.dtype, head_dim=head_dim, spec=spec, sinks=sinks is not None, exact=True
    )
    return name
