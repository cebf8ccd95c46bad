"""Attention to a cache of keys and values that grows in place: decoding, chunked prefill, speculative decoding.

``cache_rows`` finds the keys of each row and the rows that are padding. Only the dense backends synchronise with the
device. A decode loop compiles to one graph (``operator``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_train.attention.backends import resolve_backend
from flash_train.attention.decoding.cache_rows import CacheRows, capacity_of
from flash_train.attention.decoding.operator import attend_by_kernel, attend_by_rows, write
from flash_train.attention.dropout import RngState, draw_state
from flash_train.attention.functional import require_values, validate_settings
from flash_train.attention.index_tensors import IntegerData
from flash_train.attention.kernels.families import FAMILIES, is_own
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
    """Write new keys and values into the cache, in place, and attend to the whole cache under any mask. No gradients.

    The keys of a batch row are the cache's positions from its ``cache_leftpad`` to its ``cache_seqlens``, followed by
    the new keys. The mask, ALiBi and dropout count them from 0 and align the queries with the last of them. If a mask
    has one value per key (``Document``'s ``k_ids``), it needs one per position of the cache.

    Index tensors may be strided views, int64, or integers in lists; they are converted to int32 if needed.

    Under ``torch.compile`` each backend is one operator of the graph. A CUDA graph (``mode="reduce-overhead"``) can
    include the decode kernel if the addresses of the caches do not change: make them buffers of a module, or call
    ``torch._dynamo.mark_static_address``.

    Args:
        q: (batch, seqlen_q, heads, head_dim).
        k_cache: (batch_size_cache, capacity, kv_heads, head_dim), paged (num_blocks, page_size, kv_heads, head_dim).
        v_cache: the same with v_head_dim, which may differ from head_dim.
        cache_seqlens: end of the keys of each row, before new keys are added: int32 (batch,), an int for all rows, or
            None for the capacity. A row with a negative length is padding: its output is 0, nothing is written, and its
            other indices are not read.
        spec: mask, scale, softcap and dropout. With ``Tree(parents)``, the last queries and keys are the nodes, and
            all of them attend to the keys before the tree.
        k, v: new keys and values, (batch, seqlen_new, kv_heads, head_dim); see ``append``.
        cache_batch_idx: int32 (batch,): the cache row of each batch row; not with ``block_table``.
        cache_leftpad: int32 (batch,): start of the keys of each row; None is 0.
        block_table: int32 (batch, blocks per sequence): the pages of each row. Values past the end of a row are not
            read. A row is padding, too, if its last key, including new keys, is in a negative page.
        alibi_slopes: (heads,) or (batch, heads).
        sinks: (heads,): a logit per head without a value.
        num_splits: number of parts into which the decode kernel divides the keys; 0 lets it choose. The result changes
            only by rounding.
        backend: ``flash`` or ``triton`` (the decode kernel), ``reference``, ``standard`` or ``chunked`` (row by row;
            they read ``cache_seqlens`` on the host), or ``auto``: the decode kernel if it can run, else reference.
        rng: dropout state; None draws one from PyTorch's generator of the device.

    Returns:
        out (batch, seqlen_q, heads, v_head_dim), exactly 0 for queries that attend to no key; and the natural
        log-sum-exp (batch, heads, seqlen_q), which is -inf for these queries, or the sink.

    Raises:
        ValueError, TypeError: tensors that do not fit together or require a gradient, or a backend that cannot run. The
            cache is then unchanged.
        RuntimeError: the decode kernel under a transform of ``torch.func`` or forward-mode AD.

    Source: flash-decoding (Dao, Haziza, Massa, Sizov, 2023) for the kernel's splits.
    """
    require_values(q)
    rows = CacheRows.of_call(q, k_cache, v_cache, cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
    validate_settings(q, capacity_of(k_cache, rows.block_table), q.shape[0], spec, rng, alibi_slopes, sinks)
    if rng is not None and rng.entries is not None:
        raise ValueError("RngState(entries=...): must be None for attention to a cache")
    _forbid_gradients(q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, alibi_slopes=alibi_slopes, sinks=sinks)
    if not isinstance(num_splits, int) or num_splits < 0:
        raise ValueError(f"num_splits={num_splits!r}: must be an integer >= 0; 0 lets the kernel choose")
    if (k is None) != (v is None):
        raise ValueError(f"{'v' if k is None else 'k'} was given without the other: new keys and values come together")
    if k is not None and cache_seqlens is None:
        raise ValueError(
            "k and v were given without cache_seqlens: must be an int or int32 (batch,), the position to write to"
        )
    name = _resolve(backend, q, v_cache, spec, sinks)
    if is_own(name) and transforming():
        refuse_decoding()
    if k is not None and v is not None:
        write(k_cache, v_cache, k, v, rows)
        rows = rows.extended(k.shape[1])
    state, origin = None, (0, 0, 0, 0)
    if spec.dropout > 0:
        state = draw_state(q.device) if rng is None else rng.as_tensor(q.device)
        origin = origin if rng is None else rng.origin
    if is_own(name):
        return attend_by_kernel(q, k_cache, v_cache, rows, spec, state, origin, alibi_slopes, sinks, num_splits)
    return attend_by_rows(name, q, k_cache, v_cache, rows, spec, state, origin, alibi_slopes, sinks)


def _forbid_gradients(**tensors: Tensor | None) -> None:
    """Raise ValueError if a tensor requires a gradient, because a cache that is written in place has none."""
    for name, x in tensors.items():
        if x is not None and x.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name} requires a gradient, and attention to a cache has none: call it under torch.no_grad(), or "
                "use attention(...) with keys and values outside a cache"
            )


def _resolve(backend: str, q: Tensor, v_cache: Tensor, spec: AttentionSpec, sinks: Tensor | None) -> str:
    if backend == "sdpa" or (backend in FAMILIES and not FAMILIES[backend].has_decode):
        whose = "PyTorch's fused attention has" if backend == "sdpa" else f"{FAMILIES[backend].title} have"
        able = ", ".join(name for name, family in FAMILIES.items() if family.has_decode)
        raise ValueError(
            f"backend={backend!r}: {whose} no cache; use auto, flash, {able}, reference, standard or chunked"
        )
    head_dim = max(q.shape[-1], v_cache.shape[-1])
    name, _ = resolve_backend(
        backend, device=q.device, dtype=q.dtype, head_dim=head_dim, spec=spec, sinks=sinks is not None, exact=True
    )
    return name
