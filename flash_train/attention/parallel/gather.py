"""Attention of a rank's queries to all keys that they see: the rank fetches those that others hold.

Shared documents are computed in groups of heads: the next group's keys are fetched while one group is computed.
Documents that a rank holds whole need no fetched keys, so their attention can hide other transfers. In the forward, one
half of them is queued before the first fetch starts and the other half after it. In the backward, the halves run during
the first fetch and while the last gradients return. No fetched key is saved: the backward fetches the keys again, and
sends their gradients back to the ranks that hold them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor

from flash_train.attention.dropout import EntryOrigins
from flash_train.attention.packing import Packing
from flash_train.attention.parallel.exchange import Route, Transfer, one_ahead
from flash_train.attention.parallel.group_attention import Entries, Gradients, GroupAttention
from flash_train.attention.parallel.head_groups import HeadGroup, head_groups, sinks_of
from flash_train.attention.parallel.key_transfers import plan_transfers
from flash_train.attention.parallel.row_sums import Part, sum_rows
from flash_train.attention.parallel.shared_row import SharedRow


@dataclass(frozen=True)
class Documents:
    """Some of the rank's rows, and their attention call."""

    rows: slice
    entries: Entries

    def from_entry(self, entry: int) -> Documents:
        return replace(self, entries=self.entries.from_entry(entry))


@dataclass(frozen=True)
class SharedKeys:
    """A rank's documents and ``KeyTransfers`` on the device.

    Attributes:
        shared: the rank's parts of shared documents.
        whole: the documents that it holds whole, as in ``RowPlan.calls_for_whole``.
        fetch: the route of keys and values to the ranks that read them.
        bring_back: the route of their gradients to the ranks that hold them.
        keys, gradients: lists of ``sum_rows`` for the keys that ``shared`` reads, and for the gradients of its rows.
        largest: as in ``KeyTransfers``.
    """

    shared: Documents
    whole: tuple[Documents, ...]
    fetch: Route
    bring_back: Route
    keys: Tensor
    gradients: Tensor
    largest: int

    @classmethod
    def of(cls, row: SharedRow) -> SharedKeys:
        found = plan_transfers(row.plan, row.rank)
        send = tuple(map(len, found.send))
        shared = Entries(
            Packing(row.int32_tensor(found.cu_seqlens_q), row.int32_tensor(found.cu_seqlens_k)),
            EntryOrigins(row.int32_tensor(found.origins), aligned=not (found.origins[:, 1:] % 16).any()),
        )
        return cls(
            shared=Documents(slice(0, found.tokens), shared),
            whole=_whole_documents(row, found.tokens),
            fetch=Route(row.int32_tensor(np.concatenate(found.send)[None]), send, found.receive, row.group),
            bring_back=Route(row.int32_tensor(found.key_lists), found.receive, send, row.group),
            keys=row.int32_tensor(found.keys[None]),
            gradients=row.int32_tensor(found.gradient_lists),
            largest=found.largest,
        )

    def from_entry(self, entry: int) -> SharedKeys:
        """Return the same with the row's first document at this entry of the dropout mask."""
        if entry == 0:
            return self
        return replace(
            self,
            shared=self.shared.from_entry(entry),
            whole=tuple(documents.from_entry(entry) for documents in self.whole),
        )

    def groups(self, q: Tensor, k: Tensor, v: Tensor, group_bytes: int, backward: bool) -> list[HeadGroup]:
        row_bytes = k.shape[1] * (k.shape[2] + v.shape[2]) * k.element_size()
        return head_groups(q.shape[1], k.shape[1], self.largest * row_bytes, group_bytes, sends_results=backward)


def forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, attend: GroupAttention, row: SharedRow
) -> tuple[Tensor, Tensor]:
    """Compute out (tokens, heads, head_dim) and the log-sum-exp of ``GroupAttention.forward``, without gradients."""
    held = row.cached(SharedKeys.of).from_entry(attend.entry)
    out = q.new_empty((*q.shape[:2], v.shape[2]))
    lse_of_whole, lse_of_shared = [], []

    def attend_whole(documents: Documents) -> None:
        rows = documents.rows
        lse_of_whole.append(attend.forward(documents.entries, q[rows], k[rows], v[rows], sinks, 0, out[rows])[1])

    rows = held.shared.rows
    groups = held.groups(q, k, v, row.group_bytes, backward=False)
    packed = held.fetch.pack(*_of_group(groups[0], k[rows], v[rows]))
    for documents in held.whole[:1]:
        attend_whole(documents)
    fetched = _fetched(packed.start(), groups, k[rows], v[rows], held)
    del packed  # its memory is of use after the first group
    for documents in held.whole[1:]:
        attend_whole(documents)
    for (heads, _), keys, values in fetched:
        found = attend.forward(
            held.shared.entries, q[rows, heads], keys, values, sinks_of(sinks, heads), heads.start, out[rows, heads]
        )
        lse_of_shared.append(found[1])
    return out, _joined([_joined(lse_of_shared, 0), *lse_of_whole], 1)


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
    held = row.cached(SharedKeys.of).from_entry(attend.entry)
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    dsinks = None if sinks is None else torch.zeros_like(sinks, dtype=torch.promote_types(sinks.dtype, torch.float32))

    def attend_whole(documents: Documents) -> None:
        rows = documents.rows
        *_, for_sinks = attend.backward(
            documents.entries, dout[rows], q[rows], k[rows], v[rows], out[rows], lse[:, rows], sinks, 0,
            (dq[rows], dk[rows], dv[rows]),
        )  # fmt: skip
        if dsinks is not None:
            assert for_sinks is not None  # the sinks are given
            dsinks.add_(for_sinks)

    rows = held.shared.rows
    groups = held.groups(q, k, v, row.group_bytes, backward=True)
    fetched = _fetched(held.fetch.start(*_of_group(groups[0], k[rows], v[rows])), groups, k[rows], v[rows], held)
    for documents in held.whole[:1]:
        attend_whole(documents)

    def computed() -> Iterator[tuple[HeadGroup, Tensor, Tensor, Transfer]]:
        for group, keys, values in fetched:
            heads = group.heads
            _, dkeys, dvalues, for_sinks = attend.backward(
                held.shared.entries, dout[rows, heads], q[rows, heads], keys, values, out[rows, heads],
                lse[heads, rows], sinks_of(sinks, heads), heads.start, (dq[rows, heads], None, None),
            )  # fmt: skip
            if dsinks is not None:
                assert for_sinks is not None
                dsinks[heads] += for_sinks
            yield group, dkeys, dvalues, held.bring_back.start(dkeys, dvalues)
        for documents in held.whole[1:]:  # while the last gradients travel
            attend_whole(documents)

    for group, dkeys, dvalues, transfer in one_ahead(computed()):
        heads, (from_others, values_from_others) = group.kv_heads, transfer.wait()
        parts = [Part(dk[rows, heads], dkeys, from_others), Part(dv[rows, heads], dvalues, values_from_others)]
        sum_rows(held.gradients, parts)
    return dq, dk, dv, None if dsinks is None or sinks is None else dsinks.to(sinks.dtype)


def _fetched(
    transfer: Transfer | None, groups: list[HeadGroup], k: Tensor, v: Tensor, held: SharedKeys
) -> Iterator[tuple[HeadGroup, Tensor, Tensor]]:
    """Yield each group with the keys and values of its call; ``transfer`` is the first group's, which runs."""
    for group, following in zip_longest(groups, groups[1:]):
        # before the attention, because an exchange cannot begin while that fills the GPU
        next_transfer = None if following is None else held.fetch.start(*_of_group(following, k, v))
        assert group is not None and transfer is not None
        keys, values = _assembled(*_of_group(group, k, v), transfer.wait(), held)
        transfer = next_transfer
        yield group, keys, values


def _of_group(group: HeadGroup, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return k[:, group.kv_heads], v[:, group.kv_heads]


def _assembled(k: Tensor, v: Tensor, received: Sequence[Tensor], held: SharedKeys) -> tuple[Tensor, ...]:
    """Return the keys and values that the call for shared documents reads, from the rank's own and the others'."""
    keys, values = (x.new_empty((held.keys.shape[1], *x.shape[1:])) for x in (k, v))
    sum_rows(held.keys, [Part(keys, k, received[0]), Part(values, v, received[1])])
    return keys, values


def _joined(tensors: list[Tensor], dim: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)


def _whole_documents(row: SharedRow, first: int) -> tuple[Documents, ...]:
    """Return the calls for whole documents; ``first`` is their first row. Padding belongs to the last call."""
    calls = row.plan.calls_for_whole(row.rank)
    found = []
    for number, pieces in enumerate(calls, 1):
        cu = np.cumsum([0, *(map(len, pieces) if pieces else [0])])
        stop = first + int(cu[-1]) if number < len(calls) else row.plan.seq_len // row.plan.ranks
        origins = np.array([(piece.document, 0, 0) for piece in pieces] or [(0, 0, 0)])
        entries = Entries(
            Packing(row.int32_tensor(cu), row.int32_tensor(cu)), EntryOrigins(row.int32_tensor(origins), aligned=True)
        )
        found.append(Documents(slice(first, stop), entries))
        first = stop
    return tuple(found)
