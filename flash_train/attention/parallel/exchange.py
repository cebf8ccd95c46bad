"""All-to-all of rows that runs while the rank computes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

from flash_train.attention.parallel.row_sums import Part, sum_rows

Item = TypeVar("Item")


@dataclass(frozen=True)
class Route:
    """The rows that a rank sends to the ranks of a group, and the number that it receives from each.

    Attributes:
        lists: int32 (slots, sum(send)): a sent row is the sum of these rows of the source, as in ``sum_rows``; the rows
            for rank 0 come first.
        send, receive: rows per rank of the group. Rank a's ``send[b]`` must be rank b's ``receive[a]``.
    """

    lists: Tensor
    send: tuple[int, ...]
    receive: tuple[int, ...]
    group: dist.ProcessGroup

    def start(self, *sources: Tensor) -> Transfer:
        """Start one exchange of rows of all sources; each is (rows, heads, head_dim), and all have one dtype."""
        widths = [x.shape[1] * x.shape[2] for x in sources]
        sent, received = (
            sources[0].new_empty((sum(rows), sum(widths))) for rows in (self.send, self.receive)
        )  # the sources' rows lie side by side, so that one exchange serves all of them
        packed, unpacked = [], []
        for x, start in zip(sources, accumulate(widths, initial=0), strict=False):
            for buffer, parts in ((sent, packed), (received, unpacked)):
                strides = (buffer.shape[1], x.shape[2], 1)
                parts.append(buffer.as_strided((buffer.shape[0], *x.shape[1:]), strides, start))
        sum_rows(self.lists, [Part(out, x) for out, x in zip(packed, sources, strict=True)])
        work = dist.all_to_all_single(
            received, sent, list(self.receive), list(self.send), group=self.group, async_op=True
        )
        return Transfer(unpacked, work, sent)


@dataclass(frozen=True)
class Transfer:
    """An exchange that runs."""

    parts: Sequence[Tensor]  #: the rows of each source that arrive; filled after ``wait``
    work: dist.Work
    sent: Tensor  #: must live until the exchange ends

    def wait(self) -> Sequence[Tensor]:
        """Return the received rows of each source. On a GPU its stream waits for them, and the host does not."""
        self.work.wait()
        return self.parts


def one_ahead(items: Iterable[Item]) -> Iterator[Item]:
    """Yield each item after the next one was made, too.

    If items are running exchanges, the next exchange is queued before the kernels that use the present one. This order
    matters: an attention kernel fills the whole GPU, and an exchange that is queued after it cannot begin.
    """
    made: list[Item] = []
    for item in items:
        made.append(item)
        if len(made) == 2:
            yield made.pop(0)
    yield from made
