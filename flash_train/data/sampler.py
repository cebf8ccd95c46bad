"""Samplers: the rows of a batch are a pure function of (seed, batch, rank, world size)."""

import math
from collections.abc import Iterator

import numpy as np

from flash_train.data.dataset import PADDING_ROW


class EndlessBatchSampler:
    """Endless batches of row indices, from `start_batch` on.

    Sample j of batch i of a rank is sample ``g = (i * world_size + rank) * batch_size + j`` of a global stream. The
    stream is a sequence of epochs, each a seeded permutation of the rows: sample g is at ``g % n_rows`` in epoch
    ``g // n_rows``. A batch may span two epochs; within an epoch no row is dropped or repeated. With ``shuffle=False``
    every epoch has the rows in order.
    """

    def __init__(
        self,
        n_rows: int,
        batch_size: int,
        *,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        start_batch: int = 0,
        shuffle: bool = True,
    ) -> None:
        self.n_rows, self.batch_size, self.seed = n_rows, batch_size, seed
        self.rank, self.world_size, self.start_batch, self.shuffle = rank, world_size, start_batch, shuffle
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def batch(self, i: int) -> list[int]:
        """Return the row indices of batch `i` of this rank."""
        first = (i * self.world_size + self.rank) * self.batch_size
        return [self._row(*divmod(g, self.n_rows)) for g in range(first, first + self.batch_size)]

    def __iter__(self) -> Iterator[list[int]]:
        i = self.start_batch
        while True:
            yield self.batch(i)
            i += 1

    def _row(self, epoch: int, place: int) -> int:
        if not self.shuffle:
            return place
        if epoch != self._epoch:
            self._epoch, self._order = epoch, epoch_order(self.n_rows, self.seed, epoch)
        return int(self._order[place])


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
