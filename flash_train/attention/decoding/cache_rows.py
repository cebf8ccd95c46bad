"""Find the rows of a cache of keys and values, detect padding, and write and read the cache.

A cache is (batch_size_cache, capacity, kv_heads, head_dim), or paged (num_blocks, page_size, kv_heads, head_dim). A
paged cache comes with a ``block_table``, int32 (batch, blocks per sequence): column ``c`` of a row is the page of its
positions from ``c * page_size`` on. Code in plain PyTorch finds positions with ``CacheRows.slots``.

Nothing here synchronises with a GPU. Values of CPU tensors are checked. On a GPU, an index outside the cache raises a
device-side assertion or is not detected.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Integral

import torch
from torch import Tensor

from flash_train.attention.checks import integer_tensor
from flash_train.attention.index_tensors import IntegerData, check_range, contiguous_tensor, index_tensor


@dataclass(frozen=True)
class CacheRows:
    """The locations of a batch's rows in a cache. All tensors are int32, contiguous, and on the device of the cache.

    A row is padding if its length is negative or the page of its last key is negative. Padding has no keys, and nothing
    is written for it.

    Attributes:
        lengths: (batch,), end of the keys of each row.
        batch_idx: (batch,), cache row of each batch row; None: row ``i`` of the batch is row ``i`` of the cache.
        leftpad: (batch,), start of the keys of each row; None: 0.
        block_table: (batch, blocks per sequence), the pages of each row in order; None: the cache has no pages.
    """

    lengths: Tensor
    batch_idx: Tensor | None = None
    leftpad: Tensor | None = None
    block_table: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.lengths, self.batch_idx, self.leftpad, self.block_table

    @classmethod
    def of_call(
        cls,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        cache_seqlens: IntegerData | Integral | int | None = None,
        cache_batch_idx: IntegerData | None = None,
        cache_leftpad: IntegerData | None = None,
        block_table: IntegerData | None = None,
    ) -> CacheRows:
        """Make the rows from the arguments of ``cached_attention``.

        Dtypes, shapes and devices are checked, and on the CPU also values. Device memory is never read.

        Raises:
            ValueError, TypeError: tensors that do not fit together.
        """
        _check_tensors(q, k_cache, v_cache, block_table is not None)
        batch, device = q.shape[0], q.device
        if block_table is not None:
            if cache_batch_idx is not None:
                raise ValueError("cache_batch_idx was given with block_table: reorder the rows of block_table instead")
            table = integer_tensor("block_table", block_table, device)
            if not isinstance(table, Tensor):
                raise TypeError(f"block_table={table!r}: must be int32 (batch, blocks per sequence)")
            if table.dim() != 2:
                raise ValueError(f"block_table has shape {tuple(table.shape)}: must be (batch, blocks per sequence)")
            block_table = index_tensor("block_table", table, (batch, table.shape[1]), device)
        elif cache_batch_idx is None and k_cache.shape[0] < batch:
            raise ValueError(
                f"k_cache has {k_cache.shape[0]} rows and q {batch}: must be as many without cache_batch_idx"
            )
        capacity = capacity_of(k_cache, block_table)
        if cache_seqlens is None or isinstance(cache_seqlens, (int, Integral)):
            length = capacity if cache_seqlens is None else int(cache_seqlens)
            if not 0 <= length <= capacity:
                raise ValueError(f"cache_seqlens={length}: must be between 0 and the cache's capacity, {capacity}")
            lengths = torch.full((batch,), length, dtype=torch.int32, device=device)
        else:
            lengths = index_tensor("cache_seqlens", cache_seqlens, (batch,), device)
        rows = cls(lengths, block_table=block_table)
        used = lengths >= 0
        check_range("cache_seqlens", lengths, capacity + 1, used)
        if cache_batch_idx is not None:
            batch_idx = index_tensor("cache_batch_idx", cache_batch_idx, (batch,), device)
            check_range("cache_batch_idx", batch_idx, k_cache.shape[0], used)
            rows = replace(rows, batch_idx=batch_idx)
        if cache_leftpad is not None:
            leftpad = index_tensor("cache_leftpad", cache_leftpad, (batch,), device)
            check_range("cache_leftpad", leftpad, 2**31, used)
            rows = replace(rows, leftpad=leftpad)
        return rows

    def padding(self, cache: Tensor, new: int = 0) -> Tensor:
        """Return the rows that are padding after ``new`` keys were added, bool (batch,)."""
        padding = self.lengths < 0
        if self.block_table is None or capacity_of(cache, self.block_table) == 0:
            return padding
        last = (self.lengths.long() + (new - 1)).clamp(min=0)
        column = (last // cache.shape[1]).clamp(max=self.block_table.shape[1] - 1)
        page = self.block_table.gather(1, column[:, None])[:, 0]
        return padding | ((page < 0) & (self.lengths + new > 0))

    def slots(self, cache: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return indices into the cache's first two dimensions, two int64 (batch, n), for positions (batch, n)."""
        if self.block_table is None:
            rows = torch.arange(len(positions), device=positions.device) if self.batch_idx is None else self.batch_idx
            check_range("position in the cache", positions, cache.shape[1])
            return rows.long()[:, None].expand(positions.shape), positions.long()
        page_size = cache.shape[1]
        check_range("position in the cache", positions, self.block_table.shape[1] * page_size)
        pages = self.block_table.long().gather(1, positions.long() // page_size)
        check_range("block_table", pages, cache.shape[0])
        return pages, positions.long() % page_size

    def clear_padding(self, padding: Tensor) -> CacheRows:
        """Return the same rows with every index of padding set to 0, which is a valid index.

        Args:
            padding: bool (batch,).
        """

        def zero_padding(x: Tensor) -> Tensor:
            return torch.where(padding.view(-1, *[1] * (x.dim() - 1)), 0, x)

        given = (self.batch_idx, self.leftpad, self.block_table)
        return CacheRows(zero_padding(self.lengths), *[None if x is None else zero_padding(x) for x in given])

    def extended(self, new: int) -> CacheRows:
        """Return the rows with ``new`` more keys; rows of negative length stay padding."""
        return replace(self, lengths=torch.where(self.lengths < 0, self.lengths, self.lengths + new))


def capacity_of(k_cache: Tensor, block_table: Tensor | None) -> int:
    """Return the largest number of positions per row."""
    return k_cache.shape[1] if block_table is None else block_table.shape[1] * k_cache.shape[1]


def _check_tensors(q: Tensor, k_cache: Tensor, v_cache: Tensor, paged: bool) -> None:
    """Raise ValueError or TypeError if shapes, dtypes or devices do not fit together."""
    layout = "(num_blocks, page_size" if paged else "(batch_size_cache, capacity"
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if x.is_nested:
            raise TypeError(
                f"{name} is nested: must be padded; cache_seqlens and cache_leftpad give the start and end of rows"
            )
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


def append(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cache_seqlens: Tensor,
    cache_batch_idx: Tensor | None = None,
    block_table: Tensor | None = None,
) -> None:
    """Write new keys and values at the end of each row of the cache, in place; nothing is written for padding.

    Args:
        k_cache, v_cache: (batch_size_cache, capacity, kv_heads, head_dim), paged (num_blocks, page_size, kv_heads,
            head_dim).
        k, v: (batch, seqlen_new, kv_heads, head_dim).
        cache_seqlens: int32 (batch,): position of the first new key in each row.
        cache_batch_idx: int32 (batch,): cache row of each batch row. If two batch rows share a cache row, either of
            them may be written last.
        block_table: int32 (batch, blocks per sequence).

    Raises:
        ValueError, TypeError: tensors that do not fit together; on the CPU, a cache without room for the new keys.
    """
    check_new(k_cache, v_cache, k, v, len(cache_seqlens))
    if k.shape[0] == 0 or k.shape[1] == 0:
        return
    rows = CacheRows(cache_seqlens, cache_batch_idx, None, block_table)
    padding = rows.padding(k_cache, k.shape[1])
    steps = torch.arange(k.shape[1], device=k.device)
    positions = torch.where(padding[:, None], 0, rows.lengths[:, None] + steps)
    where = rows.clear_padding(padding).slots(k_cache, positions)
    if k_cache.shape[0] == 0 or k_cache.shape[1] == 0:  # the cache is empty, so all rows are padding
        return
    # shapes must not depend on values: padding repeats the write of another row; if all rows are padding, the cache's
    # own content is written back
    used = ~padding
    source = torch.where(used, torch.arange(len(used), device=used.device), used.to(torch.int8).argmax())
    where = (where[0][source], where[1][source])
    for cache, new in ((k_cache, k), (v_cache, v)):
        cache[where] = torch.where(used.any(), new[source], cache[where])


def check_new(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, batch: int) -> None:
    """Raise ValueError or TypeError if new keys and values do not fit the cache."""
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if x.dim() != 4 or x.shape != (batch, k.shape[1], *cache.shape[2:]):
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}: must be (batch, seqlen_new, kv_heads, head_dim) with batch "
                f"{batch}, the seqlen_new of k, and the heads and head_dim of {name}_cache, {tuple(cache.shape[2:])}"
            )
        if x.dtype != cache.dtype or x.device != cache.device:
            raise TypeError(
                f"{name} is {x.dtype} on {x.device} and {name}_cache is {cache.dtype} on {cache.device}: must be equal"
            )


def gather(
    cache: Tensor,
    cache_seqlens: Tensor,
    longest: int,
    cache_batch_idx: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Tensor:
    """Copy the first ``longest`` positions of every row, (batch, longest, kv_heads, head_dim).

    Positions at and after ``cache_seqlens``, int32 (batch,), have arbitrary values, and their pages need not exist.
    """
    rows = CacheRows(cache_seqlens, cache_batch_idx, None, block_table)
    rows = rows.clear_padding((rows.lengths <= 0) | rows.padding(cache))  # pages of rows without keys need not exist
    positions = torch.arange(longest, device=cache.device).expand(len(cache_seqlens), longest)
    if block_table is not None:
        positions = torch.where(positions < rows.lengths[:, None], positions, 0)
    return cache[rows.slots(cache, positions)]


def gather_packed(pages: Tensor, cu_seqlens: Tensor, longest: int | None, block_table: Tensor) -> Tensor:
    """Copy sequences out of pages into one packed tensor. Differentiable; does not synchronise with the device.

    Args:
        pages: (num_blocks, page_size, kv_heads, head_dim).
        cu_seqlens: int32 (batch + 1,).
        longest: length of the longest sequence or more; None: the capacity of ``block_table``.
        block_table: int32 (batch, blocks per sequence).

    Returns:
        (batch * min(longest, capacity), kv_heads, head_dim), in the dtype of pages, with the capacity per row of
        ``block_table``. Rows from ``cu_seqlens[-1]`` on belong to no sequence and have arbitrary values.
    """
    batch, page_size, cu_seqlens = block_table.shape[0], pages.shape[1], contiguous_tensor(cu_seqlens)
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
