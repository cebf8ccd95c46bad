"""Attention of a rank's queries to all keys that they see: the rank fetches those that others hold.

The heads form groups, and the keys of the next group travel while a group is computed. The backward keeps no fetched
key. It fetches them again, and sends their gradients back to the ranks that hold them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flash_train.attention.dropout import EntryOrigins
from flash_train.attention.packing import Packing
from flash_train.attention.parallel.exchange import Route, Transfer, one_ahead
from flash_train.attention.parallel.group_attention import Gradients, GroupAttention
from flash_train.attention.parallel.head_groups import HeadGroup, head_groups, part, place
from flash_train.attention.parallel.key_transfers import plan_transfers
from flash_train.attention.parallel.row_sums import Part, sum_rows
from flash_train.attention.parallel.shared_row import SharedRow


@dataclass(frozen=True)
class SharedKeys:
    """``KeyTransfers`` on the device.

    Attributes:
        fetch: the route of keys and values to the ranks that read them.
        bring_back: the route of their gradients to the ranks that hold them.
        keys, gradients: lists of ``sum_rows`` for the keys of the call, and for the gradients of the rank's rows.
        packing, origins: the entries of the call.
        largest, is_local: as in ``KeyTransfers``.
    """

    fetch: Route
    bring_back: Route
    keys: Tensor
    gradients: Tensor
    packing: Packing
    origins: EntryOrigins
    largest: int
    is_local: bool

    @classmethod
    def of(cls, row: SharedRow) -> SharedKeys:
        found = plan_transfers(row.plan, row.rank)
        send = tuple(map(len, found.send))
        return cls(
            fetch=Route(row.numbers(np.concatenate(found.send)[None]), send, found.receive, row.group),
            bring_back=Route(row.numbers(found.key_lists), found.receive, send, row.group),
            keys=row.numbers(found.keys[None]),
            gradients=row.numbers(found.gradient_lists),
            packing=Packing(row.numbers(found.cu_seqlens_q), row.numbers(found.cu_seqlens_k)),
            origins=EntryOrigins(row.numbers(found.origins), aligned=not (found.origins[:, 1:] % 16).any()),
            largest=found.largest,
            is_local=found.is_local,
        )

    def origins_from(self, entry: int) -> EntryOrigins:
        """Return the entries' places in the dropout mask if the row's first document is this entry of it."""
        if entry == 0:
            return self.origins
        first = self.origins.first.clone()
        first[:, 0] += entry
        return EntryOrigins(first, self.origins.aligned)

    def groups(self, q: Tensor, k: Tensor, v: Tensor, group_bytes: int, backward: bool) -> list[HeadGroup]:
        row_bytes = k.shape[1] * (k.shape[2] + v.shape[2]) * k.element_size()
        return head_groups(q.shape[1], k.shape[1], self.largest * row_bytes, group_bytes, sends_results=backward)


def forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, attend: GroupAttention, row: SharedRow
) -> tuple[Tensor, Tensor]:
    """Compute out (tokens, heads, head_dim) and the log-sum-exp of ``GroupAttention.forward``, without gradients."""
    out = q.new_empty((*q.shape[:2], v.shape[2]))
    lses = []
    for group, keys, values in _fetched(q, k, v, row, backward=False):
        heads = group.heads
        lses.append(attend.forward(q[:, heads], keys, values, part(sinks, heads), heads.start, out[:, heads])[1])
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
    """Compute the gradients. The gradients of k and v are sums in fp32 in a fixed order, rounded once."""
    shared = row.once(SharedKeys.of)
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    dsinks = None if sinks is None else torch.empty_like(sinks)

    def computed() -> Iterator[tuple[HeadGroup, Tensor, Tensor, Transfer]]:
        nonlocal dq
        for group, keys, values in _fetched(q, k, v, row, backward=True):
            heads = group.heads
            found, dkeys, dvalues, for_sinks = attend.backward(
                dout[:, heads], q[:, heads], keys, values, out[:, heads], lse[heads], part(sinks, heads), heads.start
            )
            dq = place(found, dq, heads)
            if dsinks is not None:
                dsinks[heads] = for_sinks
            yield group, dkeys, dvalues, shared.bring_back.start(dkeys, dvalues)

    for group, dkeys, dvalues, transfer in one_ahead(computed()):
        heads, (from_others, values_from_others) = group.kv_heads, transfer.wait()
        parts = [Part(dk[:, heads], dkeys, from_others), Part(dv[:, heads], dvalues, values_from_others)]
        sum_rows(shared.gradients, parts)
    return dq, dk, dv, dsinks


def _fetched(
    q: Tensor, k: Tensor, v: Tensor, row: SharedRow, *, backward: bool
) -> Iterator[tuple[HeadGroup, Tensor, Tensor]]:
    """Yield each group with the keys and values of its call."""
    shared = row.once(SharedKeys.of)
    groups = shared.groups(q, k, v, row.group_bytes, backward)
    transfers = one_ahead(shared.fetch.start(k[:, group.kv_heads], v[:, group.kv_heads]) for group in groups)
    for group, transfer in zip(groups, transfers, strict=True):
        own, received = (k[:, group.kv_heads], v[:, group.kv_heads]), transfer.wait()
        keys, values = (x.new_empty((shared.keys.shape[1], *x.shape[1:])) for x in own)
        sum_rows(shared.keys, [Part(keys, own[0], received[0]), Part(values, own[1], received[1])])
        yield group, keys, values
