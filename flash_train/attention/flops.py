"""FLOPs of attention, counted from the same masks that the kernels run.

For each pair that attends there are two products in the forward and five in the backward, which include the recomputed
scores. PyTorch counts its own attention the same way, except that it counts all pairs of a causal mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from flash_train.attention.kernels.call import Bounds, Call
from flash_train.attention.masks import SKIPPED, Causal, Full, Mask, Window
from flash_train.attention.packing import Entry
from flash_train.attention.tracing import has_no_values


def attended_pairs(
    sequences: Iterable[int | Entry], mask: Mask | None = None, *, causal: bool = True, n_heads: int = 1
) -> int:
    """Count the (query, key) pairs that attend, summed over sequences and heads.

    Args:
        sequences: lengths for self-attention. Give entries (``Packing.entries()``) if the numbers of queries and keys
            differ, or if the mask depends on the sequence.
        mask: which pairs attend; None is ``Causal()``, or ``Full()`` with ``causal=False``.
        n_heads: number of query heads. A mask that differs between heads needs the true number; for other masks the
            result is proportional to it.
    """
    if mask is None:
        mask = Causal() if causal else Full()
    return sum(
        mask.pairs(Entry(i, i, 0, 0, sequence, sequence) if isinstance(sequence, int) else sequence, n_heads)
        for i, sequence in enumerate(sequences)
    )


def attention_flops(pairs: int, n_heads: int, head_dim: int, v_head_dim: int | None = None) -> int:
    """Return the FLOPs of one forward.

    Each pair and head needs 2 * head_dim for the score and 2 * v_head_dim for the value. The backward does 2.5
    times as many (``attention_backward_flops``). Model FLOPs exclude recomputation and therefore count the backward as
    twice the forward.

    Args:
        pairs: (query, key) pairs that attend, for one head.
        v_head_dim: head_dim of v; None: the same as q's.
    """
    return 2 * pairs * n_heads * (head_dim + (head_dim if v_head_dim is None else v_head_dim))


def attention_backward_flops(pairs: int, n_heads: int, head_dim: int, v_head_dim: int | None = None) -> int:
    """Return the FLOPs of one backward: recomputed scores, dP, dV, dQ and dK.

    These are FlashAttention's five products. An implementation may do more: kernels that compute dQ separately from dK
    and dV compute the scores and dP twice.

    Args:
        pairs: (query, key) pairs that attend, for one head.
        v_head_dim: head_dim of v; None: the same as q's.
    """
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    return 2 * pairs * n_heads * (3 * head_dim + 2 * v_head_dim)


def call_pairs(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    block_map: Tensor | None,
    bounds: Sequence[int],
) -> int:
    """Count the pairs that attend in one call of the operator, summed over all heads, from the operator's arguments.

    Exact for bands, for block maps, and for both together. Element-wise terms (documents, trees, functions) are not
    evaluated: the count is then an upper bound, all pairs of the band within the map's blocks. Reads ``cu_seqlens`` and
    the map. If they are fake tensors, a packed call counts as one sequence and a map as full.

    Args:
        q, k: (batch, seqlen, heads, head_dim), packed (total, heads, head_dim).
        cu_seqlens_q, cu_seqlens_k: int32 (entries + 1,) if packed, else None.
        block_map: int8 (entries or 1, heads or 1, query blocks, key blocks), ``SKIPPED`` if no pair in it attends.
        bounds: the fields of ``kernels.call.Bounds``.
    """
    left, right, _, block_q, block_k = Bounds(*bounds)
    mask = Window(None if left < 0 else left, None if right < 0 else right)
    n_heads = q.shape[-2]
    if cu_seqlens_q is None:
        entries = [Entry(i, i, 0, 0, q.shape[1], k.shape[1]) for i in range(q.shape[0])]
    elif cu_seqlens_k is None or has_no_values(cu_seqlens_q) or has_no_values(cu_seqlens_k):
        entries = [Entry.of_lengths(q.shape[0], k.shape[0])]
    else:
        lengths = zip(cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist(), strict=True)
        entries = [Entry(i, 0, 0, 0, len_q, len_k) for i, (len_q, len_k) in enumerate(lengths)]
    if block_map is None or has_no_values(block_map):
        return sum(mask.pairs(entry, n_heads) for entry in entries)
    visited = block_map.cpu() != SKIPPED
    pairs = 0
    for entry in entries:
        entry_map = visited[entry.index if visited.shape[0] > 1 else 0]  # (heads or 1, query blocks, key blocks)
        inside = _count_pairs_by_block(mask, entry, block_q, block_k)
        rows, columns = (min(a, b) for a, b in zip(entry_map.shape[1:], inside.shape, strict=True))
        counted = (entry_map[:, :rows, :columns] * inside[:rows, :columns]).sum()
        pairs += int(counted) * (n_heads // entry_map.shape[0])
    return pairs


def register() -> None:
    """Register the operators with ``torch.utils.flop_counter``; call it once, after the operators are defined."""
    from torch.utils.flop_counter import register_flop_formula

    register_flop_formula(torch.ops.flash_train.attention_forward, get_raw=True)(_forward_flops)
    register_flop_formula(torch.ops.flash_train.attention_backward, get_raw=True)(_backward_flops)


def _forward_flops(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **_: Any) -> int:
    return attention_flops(_count_operator_pairs(q, k, rest), 1, q.shape[-1], v.shape[-1])


def _backward_flops(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, **_: Any
) -> int:
    return attention_backward_flops(_count_operator_pairs(q, k, rest), 1, q.shape[-1], v.shape[-1])


def _count_operator_pairs(q: Tensor, k: Tensor, rest: Sequence[Any]) -> int:
    """Count the pairs of an operator's call; ``rest`` begins with the fields of a ``Call``."""
    call = Call.from_arguments(rest[: len(Call._fields)])
    return call_pairs(q, k, call.cu_seqlens_q, call.cu_seqlens_k, call.block_map, call.bounds)


def _count_pairs_by_block(mask: Window, entry: Entry, block_q: int, block_k: int) -> Tensor:
    """Count the pairs of a band in each block, int64 (query blocks, key blocks)."""
    aligned = torch.arange(entry.len_q) + (entry.len_k - entry.len_q)
    first = torch.zeros_like(aligned) if mask.left is None else aligned - mask.left
    stop = torch.full_like(aligned, entry.len_k) if mask.right is None else aligned + mask.right + 1
    begin = torch.arange(0, entry.len_k, block_k)
    end = (begin + block_k).clamp(max=entry.len_k)
    rows = (torch.minimum(stop[:, None], end) - torch.maximum(first[:, None], begin)).clamp(min=0)
    blocks = -(-entry.len_q // block_q)
    inside = torch.zeros(blocks, begin.numel(), dtype=torch.int64)
    return inside.index_add_(0, torch.arange(entry.len_q) // block_q, rows)
