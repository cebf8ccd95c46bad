"""Samplers: the rows of a batch are a pure function of (seed, first row, batch, rank, world size)."""

import math
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, Protocol

import numpy as np

from flash_train.data.dataset import PADDING_ROW
from flash_train.data.order.deal import Synchronise, deal, imbalance


class RowOrder(Protocol):
    """An endless order of training rows, the same for all ranks."""

    def rows(self, first: int, n: int) -> list[Any]:
        """Return the data set's indices of the rows at the places ``first, …, first + n - 1`` of the order."""


class EndlessOrder:
    """The order of a map-style data set: a sequence of epochs, each a seeded permutation of the rows.

    Place g is in epoch ``g // n_rows``, at ``g % n_rows``. With ``shuffle=False`` every epoch has the rows in order.
    """

    def __init__(self, n_rows: int, *, seed: int, shuffle: bool = True) -> None:
        self.n_rows, self.seed, self.shuffle = n_rows, seed, shuffle
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def rows(self, first: int, n: int) -> list[int]:
        """Return the row indices at the places ``first, …, first + n - 1``."""
        return [self._row(*divmod(place, self.n_rows)) for place in range(first, first + n)]

    def _row(self, epoch: int, place: int) -> int:
        if not self.shuffle:
            return place
        if epoch != self._epoch:
            self._epoch, self._order = epoch, epoch_order(self.n_rows, self.seed, epoch)
        return int(self._order[place])


class PlacedOrder:
    """Another order's rows together with their places: tuples (place, row), for `PlacedRows`."""

    def __init__(self, order: RowOrder) -> None:
        self.order = order

    def rows(self, first: int, n: int) -> list[tuple[int, Any]]:
        """Return the rows at the places ``first, …, first + n - 1``."""
        return list(enumerate(self.order.rows(first, n), first))


class EndlessBatchSampler:
    """Endless batches of an order's rows, from the place `first_row` on.

    Sample j of batch i of a rank is at the place ``first_row + (i * world_size + rank) * batch_size + j``. So ranks and
    batches divide one order: no row is dropped or repeated, also when a run continues with other sizes.
    """

    def __init__(
        self, order: RowOrder, batch_size: int, *, rank: int = 0, world_size: int = 1, first_row: int = 0
    ) -> None:
        self.order, self.batch_size = order, batch_size
        self.rank, self.world_size, self.first_row = rank, world_size, first_row

    def batch(self, i: int) -> list[Any]:
        """Return the indices of batch `i` of this rank, counted from `first_row`."""
        return self.order.rows(self.first_row + (i * self.world_size + self.rank) * self.batch_size, self.batch_size)

    def __iter__(self) -> Iterator[list[Any]]:
        return map(self.batch, count())


class DealtBatchSampler:
    """Endless batches as in `EndlessBatchSampler`, with the rows of each optimizer step dealt by their cost.

    Step s has the rows at the places ``first_row + s * n, …, first_row + (s + 1) * n - 1``, where n is ``accumulate *
    world_size * batch_size``. `flash_train.data.order.deal.deal` divides them over micro-batches and ranks.

    Args:
        order: the rows' order.
        costs: returns the costs of rows, float64 (rows,), from their indices.
        batch_size: rows per batch on each rank.
        accumulate: micro-batches per optimizer step.
        synchronise: when ranks wait for each other.
        first_row: the place of the first row of a step.
        skipped: how many micro-batches of the first step are left out.
        on_step: called with the place after a step's rows and the step's imbalance, before its first batch.
    """

    def __init__(
        self,
        order: RowOrder,
        costs: Callable[[list[Any]], np.ndarray],
        batch_size: int,
        *,
        accumulate: int,
        synchronise: Synchronise,
        rank: int = 0,
        world_size: int = 1,
        first_row: int = 0,
        skipped: int = 0,
        on_step: Callable[[int, float], None] | None = None,
    ) -> None:
        self.order, self.costs, self.batch_size = order, costs, batch_size
        self.accumulate, self.synchronise = accumulate, synchronise
        self.rank, self.world_size, self.first_row, self.skipped = rank, world_size, first_row, skipped
        self.on_step = on_step

    def __iter__(self) -> Iterator[list[Any]]:
        n, skipped = self.accumulate * self.world_size * self.batch_size, self.skipped
        for first in count(self.first_row, n):
            rows = self.order.rows(first, n)
            costs = self.costs(rows)
            dealt = deal(costs, self.world_size, self.batch_size, self.synchronise)
            if self.on_step is not None:
                self.on_step(first + n, imbalance(costs, dealt, self.synchronise))
            for micro_batch in dealt[skipped:, self.rank].tolist():
                yield [rows[i] for i in micro_batch]
            skipped = 0


class ShardedBatchSampler:
    """Every row once, in order, distributed over the ranks in turn; every rank has the same number of full batches.

    PADDING_ROW fills up the last batches, so shapes don't change and no row is read twice.
    """

    def __init__(self, rows: list[int], batch_size: int, *, rank: int = 0, world_size: int = 1) -> None:
        self.rows, self.batch_size, self.rank, self.world_size = rows, batch_size, rank, world_size

    def __len__(self) -> int:
        return math.ceil(len(self.rows) / (self.batch_size * self.world_size))

    def __iter__(self) -> Iterator[list[int]]:
        share = self.rows[self.rank :: self.world_size]
        share += [PADDING_ROW] * (len(self) * self.batch_size - len(share))
        for first in range(0, len(share), self.batch_size):
            yield share[first : first + self.batch_size]


def epoch_order(n_rows: int, seed: int, epoch: int) -> np.ndarray:
    """Return a permutation of ``range(n_rows)``, int64, pure in (seed, epoch)."""
    # Sorts raw words of Philox. NumPy may change the stream of Generator.permutation between versions.
    words = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(n_rows)
    return np.argsort(words, kind="stable")
