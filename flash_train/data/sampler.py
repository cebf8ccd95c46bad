"""Which rows make up which batch, as a pure function of (seed, batch, rank, world size)."""

import math
from collections.abc import Iterator

import numpy as np

from flash_train.data.dataset import PADDING_ROW


class EndlessBatchSampler:
    """Batches of row indices without end, from `start_batch` on.

    Sample j of batch i of a rank is the stream's sample ``g = (i * world_size + rank) * batch_size + j``. The stream is
    one seeded permutation of the rows after another: epoch ``g // n_rows``, place ``g % n_rows``. Epochs flow into one
    another inside a batch; no row is dropped, or repeated within an epoch. With ``shuffle=False`` the place is the row.
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
        """Row indices of batch `i` of this rank."""
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
    """Every row once, in order, dealt to ranks in turn; the same number of full batches on every rank.

    What is missing for that at the end is filled with PADDING_ROW, so shapes don't change and no row is seen twice.
    """

    def __init__(self, rows: list[int], batch_size: int, *, rank: int = 0, world_size: int = 1) -> None:
        self.rows, self.batch_size, self.rank, self.world_size = rows, batch_size, rank, world_size

    def __len__(self) -> int:
        return math.ceil(len(self.rows) / (self.batch_size * self.world_size))

    def __iter__(self) -> Iterator[list[int]]:
        mine = self.rows[self.rank :: self.world_size]
        mine += [PADDING_ROW] * (len(self) * self.batch_size - len(mine))
        for first in range(0, len(mine), self.batch_size):
            yield mine[first : first + self.batch_size]


def epoch_order(n_rows: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of ``range(n_rows)``, int64, pure in (seed, epoch)."""
    # Sorting raw words of Philox: unlike Generator.permutation, no stream that NumPy may change between versions.
    words = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(n_rows)
    return np.argsort(words, kind="stable")
