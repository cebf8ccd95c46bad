"""Attention of some heads over the whole row: the ranks exchange tokens for heads, and the output back.

The rank's heads form groups. The next group's tensors, and the results of the one before, travel while a group is
computed. The backward exchanges q, k and v again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flash_train.attention.parallel.exchange import Route, Transfer, one_ahead
from flash_train.attention.parallel.group_attention import Entries, Gradients, GroupAttention
from flash_train.attention.parallel.head_groups import HeadGroup, head_groups, sinks_of
from flash_train.attention.parallel.row_sums import Part, sum_rows
from flash_train.attention.parallel.shared_row import SharedRow


@dataclass(frozen=True)
class SharedHeads:
    """How tokens and heads are exchanged.

    A tensor has two layouts. By tokens: a rank has its tokens of all heads, (tokens, heads, head_dim), viewed as
    (tokens * ranks, heads / ranks, head_dim). By heads: it has its heads of all tokens, in the order of the row,
    (seq_len, heads / ranks, head_dim).

    Attributes:
        to_heads: the route from the layout by tokens to the ranks that compute the heads.
        to_tokens: the route from the layout by heads to the ranks that hold the tokens.
        row_order: list of ``sum_rows`` that sorts rows received over ``to_heads`` into the layout by heads.
        token_order: the same for ``to_tokens`` and the layout by tokens.
    """

    to_heads: Route
    to_tokens: Route
    row_order: Tensor
    token_order: Tensor

    @classmethod
    def of(cls, row: SharedRow) -> SharedHeads:
        ranks = row.plan.ranks
        tokens = row.plan.seq_len // ranks
        positions = np.concatenate([row.plan.positions(rank) for rank in range(ranks)])  # rank after rank
        by_token = np.arange(row.plan.seq_len).reshape(tokens, ranks)
        sizes = (tokens,) * ranks
        return cls(
            to_heads=Route(row.int32_tensor(by_token.T.reshape(1, -1)), sizes, sizes, row.group),
            to_tokens=Route(row.int32_tensor(positions[None]), sizes, sizes, row.group),
            row_order=row.int32_tensor(np.argsort(positions)[None]),
            token_order=row.int32_tensor(by_token.reshape(ranks, tokens).T.reshape(1, -1)),
        )


def forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, attend: GroupAttention, row: SharedRow
) -> tuple[Tensor, Tensor]:
    """Compute out (tokens, heads, head_dim), and the log-sum-exp of the rank's heads, without gradients."""
    shared, ranks, entries = row.cached(SharedHeads.of), row.plan.ranks, Entries(row.row_packing)
    out = q.new_empty((*q.shape[:2], v.shape[2]))
    lses = []

    def computed() -> Iterator[tuple[HeadGroup, Transfer]]:
        for group, (q_own, k_own, v_own) in _exchanged((q,), (k, v), row):
            mine = sinks_of(_own(sinks, row), group.heads)
            found, lse = attend.forward(entries, q_own, k_own, v_own, mine, group.heads.start)
            lses.append(lse)
            yield group, shared.to_tokens.start(found)

    for group, transfer in one_ahead(computed()):
        _arrange(transfer, shared.token_order, [_by_rank(out, ranks)[:, group.heads]])
    return out, torch.cat(lses)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    attend: GroupAttention,
    row: SharedRow,
) -> Gradients:
    """Compute the gradients; the sinks of other ranks' heads get 0."""
    shared, ranks, entries = row.cached(SharedHeads.of), row.plan.ranks, Entries(row.row_packing)
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    dsinks = None if sinks is None else torch.zeros_like(sinks)
    own_dsinks = _own(dsinks, row)  # a view

    def computed() -> Iterator[tuple[HeadGroup, Transfer]]:
        for group, (q_own, out_own, dout_own, k_own, v_own) in _exchanged((q, out, dout), (k, v), row):
            heads, mine = group.heads, sinks_of(_own(sinks, row), group.heads)
            dq_own, dk_own, dv_own, found = attend.backward(
                entries, dout_own, q_own, k_own, v_own, out_own, lse[heads], mine, heads.start
            )
            if own_dsinks is not None:
                assert found is not None  # the sinks are given
                own_dsinks[heads] = found
            yield group, shared.to_tokens.start(dq_own, dk_own, dv_own)

    for group, transfer in one_ahead(computed()):
        slices = (group.heads, group.kv_heads, group.kv_heads)
        outs = [_by_rank(x, ranks)[:, heads] for x, heads in zip((dq, dk, dv), slices, strict=True)]
        _arrange(transfer, shared.token_order, outs)
    return dq, dk, dv, dsinks


def first_head(heads: int, row: SharedRow) -> int:
    """Return the first of the heads that the rank computes."""
    return row.rank * (heads // row.plan.ranks)


def _exchanged(
    queries: Sequence[Tensor], keys: Sequence[Tensor], row: SharedRow
) -> Iterator[tuple[HeadGroup, list[Tensor]]]:
    """Yield each group with its heads of all tensors, queries first, each (seq_len, heads, head_dim)."""
    shared, ranks = row.cached(SharedHeads.of), row.plan.ranks
    queries, keys = ([_by_rank(x, ranks) for x in tensors] for tensors in (queries, keys))
    columns = sum(x.shape[1] * x.shape[2] for x in (queries[0], *keys))
    transfer_bytes = len(queries[0]) * columns * queries[0].element_size() * (ranks - 1) // ranks
    groups = head_groups(queries[0].shape[1], keys[0].shape[1], transfer_bytes, row.group_bytes, sends_results=True)

    def start(group: HeadGroup) -> Transfer:
        return shared.to_heads.start(*(x[:, group.heads] for x in queries), *(x[:, group.kv_heads] for x in keys))

    for group, transfer in zip(groups, one_ahead(map(start, groups)), strict=True):
        outs = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in transfer.parts]
        _arrange(transfer, shared.row_order, outs)
        yield group, outs


def _arrange(transfer: Transfer, order: Tensor, outs: Sequence[Tensor]) -> None:
    sum_rows(order, [Part(out, received) for out, received in zip(outs, transfer.wait(), strict=True)])


def _by_rank(x: Tensor, ranks: int) -> Tensor:
    """Return (tokens, heads, head_dim) as (tokens * ranks, heads / ranks, head_dim)."""
    return x.reshape(x.shape[0] * ranks, x.shape[1] // ranks, x.shape[2])


def _own(sinks: Tensor | None, row: SharedRow) -> Tensor | None:
    """Return the part for the rank's heads."""
    return None if sinks is None else sinks.unflatten(0, (row.plan.ranks, -1))[row.rank]
