"""All-to-all of rows that runs while the rank computes."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import torch
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

    def pack(self, *sources: Tensor) -> Packed:
        """Pack rows of all sources for one exchange; each is (rows, heads, head_dim), and all have one dtype."""
        widths = [x.shape[1] * x.shape[2] for x in sources]
        sent, received = (
            sources[0].new_empty((sum(rows), sum(widths))) for rows in (self.send, self.receive)
        )  # the sources' rows lie side by side, so that one exchange serves all of them
        packed: list[Tensor] = []
        unpacked: list[Tensor] = []
        for x, start in zip(sources, accumulate(widths, initial=0), strict=False):
            for buffer, parts in ((sent, packed), (received, unpacked)):
                strides = (buffer.shape[1], x.shape[2], 1)
                parts.append(buffer.as_strided((buffer.shape[0], *x.shape[1:]), strides, start))
        sum_rows(self.lists, [Part(out, x) for out, x in zip(packed, sources, strict=True)])
        done = torch.cuda.current_stream(sent.device).record_event() if sent.is_cuda else None
        return Packed(self, sent, received, unpacked, done)

    def start(self, *sources: Tensor) -> Transfer:
        """Pack rows and start their exchange."""
        return self.pack(*sources).start()


@dataclass(frozen=True)
class Packed:
    """Rows that are packed for an exchange.

    Attributes:
        sent, received: the exchange's buffers.
        parts: the rows of each source that will arrive.
        done: the end of the packing, on a GPU.
    """

    route: Route
    sent: Tensor
    received: Tensor
    parts: Sequence[Tensor]
    done: torch.cuda.Event | None

    def start(self) -> Transfer:
        """Start the exchange. It waits for the packing, and not for what the stream was given since then.

        An attention kernel fills the whole GPU, and the next one begins as soon as it ends. An exchange that can run
        only after the first would have to wait for the second, too.
        """
        if self.done is None:
            return self._exchange()
        side = _side_stream(self.sent.device)
        side.wait_event(self.done)
        with torch.cuda.stream(side):
            return self._exchange()

    def _exchange(self) -> Transfer:
        receive, send, group = list(self.route.receive), list(self.route.send), self.route.group
        work = dist.all_to_all_single(self.received, self.sent, receive, send, group=group, async_op=True)
        assert work is not None  # async_op=True gives one
        return Transfer(self.parts, work, self.sent)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream on which exchanges are started; they run on the process group's own."""
    return torch.cuda.Stream(device)


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
