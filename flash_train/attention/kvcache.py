"""Attention to a cache of keys and values that grows in place: decoding, chunked prefill, speculative decoding.

A cache is (batch_size_cache, capacity, kv_heads, head_dim), or paged (num_blocks, page_size, kv_heads, head_dim) with a
``block_table`` int32 (batch, blocks per sequence) that names the page of each stretch of ``page_size`` positions.
Position ``p`` of a batch row is found by ``slots``; everything here goes through it. Nothing synchronises with the
device but the backends in plain PyTorch. What a CPU tensor holds is checked, since reading it costs nothing; on a GPU
an index outside the cache is a device-side assertion, or is not seen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flash_train.attention.backends import resolve_backend
from flash_train.attention.dropout import RngState, draw_state
from flash_train.attention.functional import attention, require_values, validate_settings
from flash_train.attention.masks import Mask
from flash_train.attention.spec import AttentionSpec
from flash_train.attention.varlen import Entry

FULL = AttentionSpec()


def cached_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor | int | None = None,
    spec: AttentionSpec = FULL,
    *,
    k: Tensor | None = None,
    v: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
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

    Args:
        q: (batch, seqlen_q, heads, head_dim).
        k_cache: (batch_size_cache, capacity, kv_heads, head_dim), paged (num_blocks, page_size, kv_heads, head_dim).
        v_cache: as k_cache; its head_dim may differ, and is the output's.
        cache_seqlens: where the keys of each row end, before new ones: int32 (batch,), an int for all rows, or None for
            the capacity.
        spec: mask, scale, softcap and dropout. ``Tree(parents)`` takes the last queries and keys as nodes, and what
            comes before as a prefix that they all see.
        k, v: new keys and values, (batch, seqlen_new, kv_heads, head_dim); see ``append``.
        cache_batch_idx: int32 (batch,): the cache row of each batch row; not with ``block_table``.
        cache_leftpad: int32 (batch,): where the keys of each row begin; 0 without it.
        block_table: int32 (batch, blocks per sequence); what it holds past a row's end is not looked at.
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

    Source: flash-decoding (Dao, Haziza, Massa, Sizov, 2023) for the kernel's splits.
    """
    require_values(q)
    validate_cache(q, k_cache, v_cache, cache_batch_idx, cache_leftpad, block_table)
    lengths = cache_lengths(cache_seqlens, q.shape[0], k_cache, block_table)
    validate_settings(q, _capacity(k_cache, block_table), q.shape[0], spec, rng, alibi_slopes, sinks)
    _forbid_gradients(q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, alibi_slopes=alibi_slopes, sinks=sinks)
    if not isinstance(num_splits, int) or num_splits < 0:
        raise ValueError(f"num_splits={num_splits!r}: must be a number of parts, or 0 for as many as suit")
    if (k is None) != (v is None):
        raise ValueError(f"{'v' if k is None else 'k'} was given without the other: new keys and values come together")
    if k is not None and cache_seqlens is None:
        raise ValueError("k and v were given without cache_seqlens, which says where they go: an int or int32 (batch,)")
    name = _resolve(backend, q, v_cache, spec, sinks)
    if k is not None and v is not None:
        append(k_cache, v_cache, k, v, lengths, cache_batch_idx, block_table)
        lengths = lengths + k.shape[1]
    if name in ("flash", "triton"):
        from flash_train.attention.kernels.launch_decode import decode

        return decode(
            q, k_cache, v_cache, lengths, spec, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad,
            block_table=block_table, alibi_slopes=alibi_slopes, sinks=sinks, num_splits=num_splits, rng=rng,
        )  # fmt: skip
    if spec.dropout > 0 and rng is None:  # one for all rows
        state = draw_state(q.device)
        rng = RngState(state[0], state[1])
    ends = lengths.tolist()
    begins = [0] * len(ends) if cache_leftpad is None else cache_leftpad.tolist()
    keys, values = (
        gather(cache, lengths, max(ends, default=0), cache_batch_idx, block_table) for cache in (k_cache, v_cache)
    )
    rows = []
    for row, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        entry = Entry(row, row, 0, begin, q.shape[1], max(end - begin, 0))
        slopes = alibi_slopes if alibi_slopes is None or alibi_slopes.dim() == 1 else alibi_slopes[row]
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            rows.append(
                attention(
                    q[row, None],
                    keys[row, None, begin:end],
                    values[row, None, begin:end],
                    replace(spec, mask=_RowMask(spec.mask, entry)),
                    rng=None if rng is None else replace(rng, entry=rng.entry + row),
                    alibi_slopes=slopes,
                    sinks=sinks,
                    backend=name,
                    return_lse=True,
                )
            )
    if not rows:
        return q.new_zeros(*q.shape[:-1], v_cache.shape[-1]), q.new_zeros(0, q.shape[2], q.shape[1])
    return torch.cat([out for out, _ in rows]), torch.cat([lse for _, lse in rows])


def append(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cache_seqlens: Tensor,
    cache_batch_idx: Tensor | None = None,
    block_table: Tensor | None = None,
) -> None:
    """Write new keys and values behind those of the cache, in place.

    Args:
        k, v: (batch, seqlen_new, kv_heads, head_dim).
        cache_seqlens: int32 (batch,): the position of the first of them in each row.
        cache_batch_idx: int32 (batch,); where two rows share a cache row, either may be the one that stays.
        block_table: int32 (batch, blocks per sequence).

    Raises:
        ValueError, TypeError: tensors that do not fit together; on the CPU, a cache without room for them.
    """
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if x.dim() != 4 or x.shape != (len(cache_seqlens), k.shape[1], *cache.shape[2:]):
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}: must be (batch, seqlen_new, kv_heads, head_dim) with batch "
                f"{len(cache_seqlens)}, the seqlen_new of k, and the heads and head_dim of {name}_cache, "
                f"{tuple(cache.shape[2:])}"
            )
        if x.dtype != cache.dtype or x.device != cache.device:
            raise TypeError(
                f"{name} is {x.dtype} on {x.device} and {name}_cache is {cache.dtype} on {cache.device}: must be equal"
            )
    positions = cache_seqlens[:, None] + torch.arange(k.shape[1], device=k.device)
    where = slots(k_cache, positions, cache_batch_idx, block_table)
    k_cache[where] = k
    v_cache[where] = v


def gather(
    cache: Tensor,
    cache_seqlens: Tensor,
    longest: int,
    cache_batch_idx: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Tensor:
    """The first ``longest`` positions of every row, (batch, longest, kv_heads, head_dim), copied out of the cache.

    Positions from ``cache_seqlens``, int32 (batch,), on hold anything, and their pages need not exist.
    """
    positions = torch.arange(longest, device=cache.device).expand(len(cache_seqlens), longest)
    if block_table is not None:
        positions = torch.where(positions < cache_seqlens[:, None], positions, 0)
        block_table = torch.where(cache_seqlens[:, None] > 0, block_table, 0)  # an empty row has no page at all
    return cache[slots(cache, positions, cache_batch_idx, block_table)]


def gather_packed(pages: Tensor, cu_seqlens: Tensor, longest: int | None, block_table: Tensor) -> Tensor:
    """Sequences in pages as one packed tensor (total, kv_heads, head_dim); differentiable, without a synchronisation.

    Args:
        pages: (num_blocks, page_size, kv_heads, head_dim).
        cu_seqlens: int32 (batch + 1,).
        longest: at least the length of the longest sequence where known.
        block_table: int32 (batch, blocks per sequence).

    Returns:
        ``batch * longest`` rows (without ``longest``: those that the table can name). The rows after ``cu_seqlens[-1]``
        belong to no sequence and hold anything.
    """
    batch, page_size = block_table.shape[0], pages.shape[1]
    capacity = block_table.shape[1] * page_size
    total = batch * (capacity if longest is None else min(capacity, longest))
    check_range("cu_seqlens", cu_seqlens, total + 1)
    rows = torch.arange(total, device=pages.device)
    inside = rows < cu_seqlens[-1]
    sequence = torch.searchsorted(cu_seqlens[1:], rows.int(), right=True).clamp(max=batch - 1)
    position = torch.where(inside, rows - cu_seqlens[sequence], 0)
    check_range("position in the pages", position, capacity)
    page = torch.where(inside, block_table[sequence, position // page_size], 0)
    check_range("block_table", page, pages.shape[0])
    return pages[page, position % page_size]


def slots(
    cache: Tensor, positions: Tensor, cache_batch_idx: Tensor | None = None, block_table: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Indices (batch, n) into the first two dimensions of the cache for integer positions (batch, n) of the rows."""
    if block_table is None:
        rows = torch.arange(len(positions), device=positions.device) if cache_batch_idx is None else cache_batch_idx
        check_range("position in the cache", positions, cache.shape[1])
        return rows.long()[:, None].expand(positions.shape), positions.long()
    page_size = cache.shape[1]
    check_range("position in the cache", positions, block_table.shape[1] * page_size)
    pages = block_table.long().gather(1, positions.long() // page_size)
    check_range("block_table", pages, cache.shape[0])
    return pages, positions.long() % page_size


def cache_lengths(
    cache_seqlens: Tensor | int | None, batch: int, k_cache: Tensor, block_table: Tensor | None
) -> Tensor:
    """``cache_seqlens`` as int32 (batch,) on the device of the cache; None is the capacity."""
    capacity = _capacity(k_cache, block_table)
    if cache_seqlens is None or isinstance(cache_seqlens, int):
        length = capacity if cache_seqlens is None else cache_seqlens
        if not 0 <= length <= capacity:
            raise ValueError(f"cache_seqlens={length}: must be between 0 and the cache's capacity, {capacity}")
        return torch.full((batch,), length, dtype=torch.int32, device=k_cache.device)
    _check_index("cache_seqlens", cache_seqlens, (batch,), k_cache.device, capacity + 1)
    return cache_seqlens


def validate_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    block_table: Tensor | None,
) -> None:
    """Raise ValueError or TypeError where the tensors do not fit together, without reading device memory."""
    layout = "(batch_size_cache, capacity" if block_table is None else "(num_blocks, page_size"
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if x.dim() != 4:
            allowed = "(batch, seqlen" if name == "q" else layout
            raise ValueError(f"{name} has shape {tuple(x.shape)}: must be {allowed}, heads, head_dim)")
        if x.dtype != q.dtype or x.device != q.device:
            raise TypeError(f"{name} is {x.dtype} on {x.device} and q is {q.dtype} on {q.device}: must be equal")
    if not q.dtype.is_floating_point:
        raise TypeError(f"q is {q.dtype}: must be a floating-point dtype")
    if k_cache.shape[:-1] != v_cache.shape[:-1]:
        raise ValueError(
            f"k_cache has shape {tuple(k_cache.shape)} and v_cache {tuple(v_cache.shape)}: must be equal up to head_dim"
        )
    if q.shape[-1] != k_cache.shape[-1]:
        raise ValueError(f"q has head_dim {q.shape[-1]} and k_cache {k_cache.shape[-1]}: must be equal")
    if k_cache.shape[2] == 0 or q.shape[2] % k_cache.shape[2]:
        raise ValueError(f"q has {q.shape[2]} heads and k_cache {k_cache.shape[2]}: q's must be a multiple of it")
    batch = q.shape[0]
    if block_table is not None:
        if cache_batch_idx is not None:
            raise ValueError("cache_batch_idx was given with block_table: reorder the rows of block_table instead")
        if block_table.dim() != 2:
            raise ValueError(f"block_table has shape {tuple(block_table.shape)}: must be (batch, blocks per sequence)")
        _check_index("block_table", block_table, (batch, block_table.shape[1]), q.device)
    elif cache_batch_idx is None and k_cache.shape[0] < batch:
        raise ValueError(f"k_cache has {k_cache.shape[0]} rows and q {batch}: must be as many without cache_batch_idx")
    if cache_batch_idx is not None:
        _check_index("cache_batch_idx", cache_batch_idx, (batch,), q.device, k_cache.shape[0])
    if cache_leftpad is not None:
        _check_index("cache_leftpad", cache_leftpad, (batch,), q.device, 2**31)


def _forbid_gradients(**tensors: Tensor | None) -> None:
    """Raise ValueError where one of the tensors wants a gradient: a cache that is written in place can give none."""
    for name, x in tensors.items():
        if x is not None and x.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name} requires a gradient, and attention to a cache has none: call it under torch.no_grad(), or "
                "use attention(...) on keys and values that are no cache"
            )


def _capacity(k_cache: Tensor, block_table: Tensor | None) -> int:
    """How many positions a row can have."""
    return k_cache.shape[1] if block_table is None else block_table.shape[1] * k_cache.shape[1]


@dataclass(frozen=True, eq=False)
class _RowMask(Mask):
    """A mask as one row of a batch sees it, for a call on that row alone."""

    mask: Mask
    entry: Entry

    def attends(self, entry: Entry, q: Tensor, k: Tensor, n_heads: int) -> Tensor:
        return self.mask.attends(self.entry, q, k, n_heads)


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


def _check_index(name: str, x: Tensor, shape: tuple[int, ...], device: torch.device, limit: int | None = None) -> None:
    if x.dtype != torch.int32 or tuple(x.shape) != shape or x.device != device:
        raise ValueError(
            f"{name} is {x.dtype} of shape {tuple(x.shape)} on {x.device}: must be int32 {shape} on {device}"
        )
    if limit is not None:
        check_range(name, x, limit)


def check_range(name: str, x: Tensor, limit: int) -> None:
    """Raise ValueError where a CPU tensor holds a number outside [0, limit); another device is not read."""
    if x.device.type == "cpu" and x.numel():
        low, high = int(x.min()), int(x.max())
        if low < 0 or high >= limit:
            raise ValueError(f"{name} is {low if low < 0 else high}: must be between 0 and {limit - 1}")
